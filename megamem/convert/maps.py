"""Invertible maps between one megatron-core parameter and the Hugging Face tensors it is made of.

Every map can do four things: name its Hugging Face tensors and their shapes, turn them into the shard of one
tensor-parallel rank, and turn all shards back. `split` and `join` are exact inverses (bit-equal), for every
tensor-parallel size.

Shapes: N query heads, G key/value heads, D head dim, H hidden, F ffn; V vocabulary rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megamem.config.architecture import Architecture


class TensorMap(Protocol):
    """One parameter. `core` is its megatron-core name with the layer counted over the whole model."""

    core: str

    @property
    def hf(self) -> tuple[str, ...]: ...

    def shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        """Shapes of the Hugging Face tensors, in the order of `hf`."""
        ...

    def split(self, tensors: Sequence[Tensor], arch: Architecture, rank: int, size: int) -> Tensor:
        """Hugging Face tensors -> the shard of tensor-parallel rank `rank` of `size`."""
        ...

    def join(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        """Shards of all tensor-parallel ranks in order -> Hugging Face tensors."""
        ...


@dataclass(frozen=True)
class Plain:
    """The same tensor on both sides, sharded along `axis` (None: replicated)."""

    core: str
    name: str
    shape: tuple[int, ...]
    axis: int | None = None

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.name,)

    def shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)

    def split(self, tensors: Sequence[Tensor], arch: Architecture, rank: int, size: int) -> Tensor:
        return tensors[0] if self.axis is None else tensors[0].chunk(size, self.axis)[rank]

    def join(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        return (shards[0] if self.axis is None else torch.cat(list(shards), self.axis),)


@dataclass(frozen=True)
class Qkv:
    """q, k, v (weights `[heads * D, H]` or biases `[heads * D]`) <-> per key/value group its queries, key, value."""

    core: str
    hf: tuple[str, str, str]
    bias: bool = False

    def shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        tail = () if self.bias else (arch.hidden,)
        rows = (arch.heads, arch.kv_heads, arch.kv_heads)
        return tuple((heads * arch.head_dim, *tail) for heads in rows)

    def split(self, tensors: Sequence[Tensor], arch: Architecture, rank: int, size: int) -> Tensor:
        grouped = [t.reshape(arch.kv_heads, -1, *t.shape[1:]) for t in tensors]
        mixed = torch.cat(grouped, 1)
        return mixed.reshape(-1, *mixed.shape[2:]).chunk(size, 0)[rank]

    def join(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        mixed = torch.cat(list(shards), 0)
        grouped = mixed.reshape(arch.kv_heads, -1, *mixed.shape[1:])
        queries = arch.heads // arch.kv_heads * arch.head_dim
        parts = grouped.split([queries, arch.head_dim, arch.head_dim], 1)
        return tuple(part.reshape(-1, *part.shape[2:]) for part in parts)


@dataclass(frozen=True)
class GateUp:
    """gate and up `[F, H]`: each is split over tensor-parallel ranks first, then a rank stacks its two halves."""

    core: str
    hf: tuple[str, str]

    def shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((arch.ffn, arch.hidden),) * 2

    def split(self, tensors: Sequence[Tensor], arch: Architecture, rank: int, size: int) -> Tensor:
        return torch.cat([t.chunk(size, 0)[rank] for t in tensors], 0)

    def join(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2, 0) for shard in shards]
        return tuple(torch.cat([half[i] for half in halves], 0) for i in range(2))


@dataclass(frozen=True)
class Vocab:
    """Embedding or head `[V, H]`, padded with zero rows to the model's vocabulary and cut again on export."""

    core: str
    name: str

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.name,)

    def shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((arch.vocab_rows, arch.hidden),)

    def split(self, tensors: Sequence[Tensor], arch: Architecture, rank: int, size: int) -> Tensor:
        rows = arch.padded_vocab(size) // size
        own = tensors[0][rank * rows : (rank + 1) * rows]
        return torch.cat([own, own.new_zeros(rows - own.size(0), own.size(1))], 0)

    def join(self, shards: Sequence[Tensor], arch: Architecture) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), 0)[: arch.vocab_rows],)
