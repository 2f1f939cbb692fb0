"""One training step, and the loop, checkpoints and metrics around it."""
