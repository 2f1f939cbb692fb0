"""Memory of a training step before it runs, and the layouts that fit."""
