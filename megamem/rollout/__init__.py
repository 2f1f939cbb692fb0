"""Sampling responses: block denoising, remasking policies, recorded rollouts."""
