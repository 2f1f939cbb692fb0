"""Noise plans (data, drawn once) and the ELBO estimates they carry."""
