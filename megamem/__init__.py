"""megamem: reinforcement learning of diffusion language models on Megatron-core."""

__version__ = "0.1.0"
