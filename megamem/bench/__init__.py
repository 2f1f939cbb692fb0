"""Measurements against the plain path, in one process and interleaved."""
