"""Typed settings that import without torch."""
