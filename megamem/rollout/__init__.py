"""Sampling responses: denoising, decoding over a key/value cache, remasking policies, recorded rollouts."""
