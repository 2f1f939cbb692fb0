"""What several tests need: shared data, gradients of everything, a one-rank axis, tiny model configurations."""

import json
import random
import resource
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamem.errors import UserError
from megamem.layout.layout import CAUSAL, FULL, Edge, Layout, Relation, Segment, block, strict_block
from megamem.platform.groups import Axis

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
ALONE = Axis(group=None, rank=0, size=1)


def shared(*parts: str) -> Path:
    """A path of the `shared` folder beside the repository; the test is skipped where it is absent."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"test data are not here: ../shared/{'/'.join(parts)}")
    return path


def value_and_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """`function(*inputs)`, and the gradient of every input for one fixed random cotangent of the result."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    value = function(*leaves)
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return value.detach(), *torch.autograd.grad(value, leaves, noise.to(value))


def refused(action: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of the UserError that `action` must raise."""
    with pytest.raises(UserError) as caught:
        action(*args, **kwargs)
    return str(caught.value)


@contextmanager
def file_size(limit: int) -> Iterator[None]:
    """No file of this process and its children grows beyond `limit` bytes: real writes end early, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def llada_config(**changes: Any) -> dict[str, Any]:
    """A tiny LLaDA `config.json` with odd sizes: 97 vocabulary rows, ffn 23, two query heads per key/value head."""
    config = {
        "model_type": "llada",
        "d_model": 24,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "mlp_hidden_size": 23,
        "vocab_size": 97,
        "embedding_size": 97,
        "max_sequence_length": 64,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 10000.0,
        "weight_tying": False,
        "mask_token_id": 96,
        "eos_token_id": 90,
        "pad_token_id": 90,
        "activation_type": "silu",
    }
    return config | changes


def qwen_config(model_type: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """A tiny `config.json` with Qwen's keys and odd sizes; heads are wider than hidden / heads."""
    config = {
        "model_type": model_type,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 23,
        "vocab_size": 97,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "eos_token_id": 90,
    }
    own = {"Dream": {"mask_token_id": 96}, "sdar": {"mask_token_id": 96, "block_size": 4}}
    return config | own.get(model_type, {}) | changes


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def random_layout(rng: random.Random) -> Layout:
    """Random segments, positions and relations; every token sees itself at least."""
    segments: list[Segment] = []
    for _ in range(rng.randint(1, 5)):
        start = segments[-1].stop if segments else 0
        segments.append(Segment(start, rng.randint(1, 9), rng.randint(0, 12)))

    def relation(kinds: str) -> Relation:
        size, origin = rng.randint(1, 5), rng.randint(0, 6)
        return {"f": FULL, "c": CAUSAL, "b": block(size, origin), "s": strict_block(size, origin)}[rng.choice(kinds)]

    count = len(segments)
    edges = [Edge(i, i, relation("fcb")) for i in range(count)]
    edges += [Edge(i, j, relation("fcbs")) for i in range(count) for j in range(count) if i != j and rng.random() < 0.5]
    rng.shuffle(edges)
    return Layout(tuple(segments), tuple(edges))


def fill_by_name(parameters: Mapping[str, nn.Parameter], tensor_rank: int = 0) -> None:
    """Random weights keyed by name, large enough for every part to matter; no file format needs to know them.

    A split parameter is drawn anew on each tensor-parallel rank, any other one is the same on all.
    """
    for name, parameter in parameters.items():
        rank = tensor_rank if getattr(parameter, "tensor_model_parallel", False) else 0
        key = torch.Generator().manual_seed(zlib.crc32(f"{name} {rank}".encode()))
        drawn = torch.randn(parameter.shape, generator=key, dtype=torch.float64)
        parameter.data.copy_(1 + 0.3 * drawn if name.endswith("norm.weight") else 0.3 * drawn)
