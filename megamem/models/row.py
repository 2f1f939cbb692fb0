"""A packed row, and what of it travels through megatron-core to every attention module.

Shapes: S packed tokens, T positions the head needs, N query heads and G key/value heads of this tensor-parallel rank,
D head dim, H hidden, V vocabulary rows of this shard.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megamem.layout.grid import ChunkGrid
from megamem.layout.layout import Layout
from megamem.ops.attention import attention_forward
from megamem.ops.attention_plan import Plan
from megamem.ops.vocab import Samples, VocabShard

# What a head gets: hidden states `[T, H]` of the selected positions, this rank's output rows `[V, H]`, and where those
# rows lie.
Head = Callable[[Tensor, Tensor, VocabShard], Tensor | Samples]


class KeyValueStore:
    """Keys (after RoPE) and values of tokens that went forward, of every layer of this stage, in numbered slots.

    A layer's buffers `[slots, G, D]` are made when it first writes, in its dtype and on its device.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, k_SGD: Tensor, v_SGD: Tensor, slot_S: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values into slots; the layer's buffers."""
        if layer not in self._layers:
            self._layers[layer] = tuple(x.new_empty(self.slots, *x.shape[1:]) for x in (k_SGD, v_SGD))
        for buffer, x in zip(self._layers[layer], (k_SGD, v_SGD), strict=True):
            buffer[slot_S] = x
        return self._layers[layer]


@dataclass(frozen=True, eq=False)
class CacheAccess:
    """What the new tokens of a row do with a store; forward only.

    Attributes:
        store: this stage's.
        slot_S: int64, where the new tokens' keys and values go.
        plan: attention of the new tokens over the store's slots, once theirs are written.
    """

    store: KeyValueStore
    slot_S: Tensor
    plan: Plan

    def attend(self, layer: int, q_SND: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
        """`[S, N, D]`."""
        return attention_forward(q_SND, *self.store.write(layer, k_SGD, v_SGD, self.slot_S), self.plan)[0]


@dataclass
class RowParams(PackedSeqParams):
    """A layout dressed as megatron-core's `PackedSeqParams`, so that blocks, layers and recompute hand it through.

    Queries, keys and values keep megatron-core's `[S, 1, N, D]` form ("sbhd"); RoPE tables are made once per row.

    Attributes:
        layout: who sees whom.
        grid: how the row is cut into chunks; None: the row is not streamed.
        idle: chunks whose final hidden states nobody needs (the last stage knows): of the last layer they need only
            keys and values.
        cache: the row holds the new tokens of sequences whose earlier ones are stored here; `layout` says their
            positions only. Such a row is not streamed, and its `position_T` name hidden states: the token that one
            predicts may not be there yet.
    """

    qkv_format: str = "sbhd"
    layout: Layout | None = None
    grid: ChunkGrid | None = None
    idle: frozenset[int] = frozenset()
    cache: CacheAccess | None = None
    _rope: dict = field(default_factory=dict, repr=False)

    def rope_tables(self, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[S, 1, D]` at the layout's positions, in fp32 (fp64 for fp64 tensors).

        Angles are computed in that precision as the published modelling code does (LLaDA's `rope_full_precision`).
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        key = (head_dim, theta, dtype, like.device)
        if key not in self._rope:
            exponent = torch.arange(0, head_dim, 2, dtype=dtype, device=like.device) / head_dim
            position_S = torch.tensor(self.layout.positions(), dtype=dtype, device=like.device)
            angle_SD = torch.outer(position_S, theta**-exponent).repeat(1, 2)
            self._rope[key] = angle_SD.cos()[:, None], angle_SD.sin()[:, None]
        return self._rope[key]


@dataclass(frozen=True, eq=False)
class Row:
    """One micro-batch.

    Attributes:
        ids_S: int64 token ids.
        params: its layout.
        position_T: row indices of the tokens that the head predicts; if None, it gets every hidden state.
        head: what the last stage computes.
        prefix: the micro-batch of the same pass whose keys and values this one sees, or None (`models/stage.py`). The
            layout then begins with that prefix, and `ids_S` are the tokens behind it.
    """

    ids_S: Tensor
    params: RowParams
    position_T: Tensor | None
    head: Head
    prefix: int | None = field(default=None, kw_only=True)


def apply_rope(x_SND: Tensor, cos_S1D: Tensor, sin_S1D: Tensor) -> Tensor:
    """Half-split rotary embedding (not interleaved) in the tables' precision; result in x's dtype."""
    wide = x_SND.to(cos_S1D.dtype)
    half = wide.size(-1) // 2
    rotated = torch.cat([-wide[..., half:], wide[..., :half]], -1)
    return (wide * cos_S1D + rotated * sin_S1D).to(x_SND.dtype)
