"""Exact operators, each beside its slow and obvious reference (`naive_*`)."""
