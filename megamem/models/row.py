"""A packed row, and what of it travels through megatron-core to every attention module.

Shapes: S packed tokens, T positions the head needs, D head dim, H hidden, V vocabulary rows of this shard.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megamem.layout.grid import ChunkGrid
from megamem.layout.layout import Layout
from megamem.ops.vocab import Samples, VocabShard

# What a head gets: hidden states `[T, H]` of the selected positions, this rank's output rows `[V, H]`, and where those
# rows lie.
Head = Callable[[Tensor, Tensor, VocabShard], Tensor | Samples]


@dataclass
class RowParams(PackedSeqParams):
    """A layout dressed as megatron-core's `PackedSeqParams`, so that blocks, layers and recompute hand it through.

    Queries, keys and values keep megatron-core's `[S, 1, N, D]` form ("sbhd"); RoPE tables are made once per row.

    Attributes:
        layout: who sees whom.
        grid: how the row is cut into chunks; None: the row is not streamed.
    """

    qkv_format: str = "sbhd"
    layout: Layout | None = None
    grid: ChunkGrid | None = None
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
    """One micro-batch: int64 `ids_S`, its layout, and a head that predicts the tokens at row indices `position_T` (if
    None, it gets every hidden state)."""

    ids_S: Tensor
    params: RowParams
    position_T: Tensor | None
    head: Head


def apply_rope(x_SND: Tensor, cos_S1D: Tensor, sin_S1D: Tensor) -> Tensor:
    """Half-split rotary embedding (not interleaved) in the tables' precision; result in x's dtype."""
    wide = x_SND.to(cos_S1D.dtype)
    half = wide.size(-1) // 2
    rotated = torch.cat([-wide[..., half:], wide[..., :half]], -1)
    return (wide * cos_S1D + rotated * sin_S1D).to(x_SND.dtype)
