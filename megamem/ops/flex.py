"""A layout through torch's FlexAttention: one kernel for a whole row, however deep or ragged its tree.

Partitioned attention (`ops/attention.py`) launches a call per shape of partition; a row with many responses of unequal
lengths has many. Here the layout becomes a function of two token indices, and a table of tiles says which of them have
anything to do. It serves whole rows only: chunks need partial results, which the other has.

torch has a backward for it on GPUs only, compiled; on the CPU the same function runs as dense scores.

Shapes: S tokens of the row, N query heads, G key/value heads (N a multiple of G), D head dim, K segments.
"""

from collections.abc import Callable
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megamem.layout.layout import Kind, Layout

_TILE = 128  # tokens of a side
_KINDS = {kind: number for number, kind in enumerate(Kind, 1)}  # 0: no edge
TokenPredicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attend(q_SND: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Tensor:
    """Exact attention of a packed row; arguments and result as of `ops.attention.attend`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_SND, k_SGD, v_SGD))
    kernel = flex_attention if q_SND.is_cpu else _compiled()
    out = kernel(q, k, v, block_mask=tiles(layout, q_SND.device), enable_gqa=q.size(1) != k.size(1))
    return out[0].transpose(0, 1).contiguous()


@cache
def _compiled() -> Callable[..., Tensor]:
    # Rows differ in length. Without `fullgraph`, too many recompilations would end in dense scores without a word.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@lru_cache(maxsize=8)  # rows in flight; the next step's are others
def tiles(layout: Layout, device: torch.device) -> BlockMask:
    """Which tiles of a row's scores have visible pairs, and which have nothing else; a row of tiles at a time."""
    size, predicate = layout.length, sees(layout, device)
    count = -(-size // _TILE)
    key_S, zero = torch.arange(size, device=device), torch.zeros((), dtype=torch.long, device=device)
    pairs_RC = torch.empty(count, count, dtype=torch.long, device=device)
    for row in range(count):
        query_T = key_S[row * _TILE : (row + 1) * _TILE]
        visible_TS = predicate(zero, zero, query_T[:, None], key_S[None, :])
        pairs_RC[row] = F.pad(visible_TS, (0, count * _TILE - size)).view(len(query_T), count, _TILE).sum((0, 2))
    whole_RC = pairs_RC == _TILE**2
    part, whole = _ordered((pairs_RC > 0) & ~whole_RC), _ordered(whole_RC)
    return BlockMask.from_kv_blocks(*part, *whole, BLOCK_SIZE=_TILE, mask_mod=predicate, seq_lengths=(size, size))


def _ordered(chosen_RC: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns of every row are chosen, and the columns with those first; int32, behind batch and head."""
    column_RC = chosen_RC.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_RC.sum(-1).int()[None, None], column_RC.int()[None, None]


def sees(layout: Layout, device: torch.device) -> TokenPredicate:
    """(batch, head, query index, key index) -> whether that query sees that key: the edges, looked up by segment."""
    count = len(layout.segments)
    kind_KK, block_KK, origin_KK = (torch.full((count, count), x, dtype=torch.int32) for x in (0, 1, 0))
    for edge in layout.edges:
        at, relation = (edge.query, edge.key), edge.relation
        kind_KK[at], block_KK[at], origin_KK[at] = _KINDS[relation.kind], relation.block, relation.origin
    lengths_K = torch.tensor([segment.length for segment in layout.segments])
    segment_S = torch.repeat_interleave(torch.arange(count, dtype=torch.int32), lengths_K).to(device)
    position_S = torch.tensor(layout.positions(), dtype=torch.int32, device=device)
    kind_KK, block_KK, origin_KK = (x.to(device) for x in (kind_KK, block_KK, origin_KK))

    def predicate(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other = segment_S[query], segment_S[key]
        kind, block, origin = kind_KK[own, other], block_KK[own, other], origin_KK[own, other]
        position, place = position_S[query], position_S[key]
        begin = origin + torch.div(position - origin, block, rounding_mode="floor") * block
        return (
            (kind == _KINDS[Kind.FULL])
            | ((kind == _KINDS[Kind.CAUSAL]) & (place <= position))
            | ((kind == _KINDS[Kind.BLOCK]) & (place < begin + block))
            | ((kind == _KINDS[Kind.STRICT_BLOCK]) & (place < begin))
            | ((kind == _KINDS[Kind.OWN_BLOCK]) & (begin <= place) & (place < begin + block))
        )

    return predicate
