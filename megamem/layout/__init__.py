"""Who attends to whom: the only description, read by attention, RoPE, packing and (later) the streaming order."""
