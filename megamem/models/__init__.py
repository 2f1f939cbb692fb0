"""Model families as specs, built from megatron-core's modules."""
