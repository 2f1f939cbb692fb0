"""Objectives as coefficients on log-probs, advantages, and the one place that divides."""
