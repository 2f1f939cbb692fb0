"""Hugging Face <-> megatron-core: declarative invertible maps, streamed safetensors, any TP and PP on either side."""
