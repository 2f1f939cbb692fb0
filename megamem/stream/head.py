"""The streamed head (DESIGN section 3.3): selected log-probs of a chunked row, without its logits.

Forward runs the output layer on the scored tokens of one chunk at a time and keeps log-probs only. Backward replays it
chunk by chunk with the coefficients that arrive as the gradient of the log-probs. Under sequence parallelism the scored
tokens of a chunk lie unevenly on the ranks: the chunk is gathered, its scored tokens selected, and the gradient reduced
and scattered back.

Shapes: S row tokens (this rank's part where local), C tokens of a chunk, T scored tokens, U at most `head_tokens` of
them, H hidden, V vocabulary rows of this shard.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.layout.grid import ChunkGrid
from megamem.ops.vocab import VocabShard, logprob_forward, logprob_gradient
from megamem.stream.layer import GradientSums


def streamed_logprob(
    hidden_SBH: Tensor,
    weight_VH: nn.Parameter,
    position_T: Tensor,
    target_T: Tensor,
    shard: VocabShard,
    grid: ChunkGrid,
    head_tokens: int,
) -> Tensor:
    """log p(target) at each position, `[T]`, at least fp32, equal on every rank.

    Args:
        hidden_SBH: final hidden states in the grid's order; this rank's tokens if `grid.parts` > 1, else all.
        weight_VH: this rank's rows of the output matrix (or of the tied embedding).
        position_T: strictly ascending row indices of the scored tokens.
        target_T: their token ids.
        head_tokens: rows of logits that exist at a time.
    """
    assert (position_T.diff() > 0).all(), "scored positions must ascend: the row is gone through once"
    return _StreamedLogProb.apply(hidden_SBH, weight_VH, position_T, target_T, shard, grid, head_tokens)


class _StreamedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_SBH, weight_VH, position_T, target_T, shard, grid, head_tokens):
        wide = torch.promote_types(hidden_SBH.dtype, torch.float32)
        logp_T = torch.empty(len(position_T), dtype=wide, device=hidden_SBH.device)
        for span, scored in _scored_chunks(grid, position_T):
            chunk_CH = _gather(hidden_SBH, span, grid, shard)
            for part in _parts(scored, head_tokens):
                picked_UH = chunk_CH[position_T[part] - span[0]]
                logp_T[part] = logprob_forward(F.linear(picked_UH, weight_VH), target_T[part], shard)[0]
        ctx.save_for_backward(hidden_SBH, position_T, target_T)
        ctx.weight = weight_VH  # the parameter itself: a saved tensor would come back without its `main_grad`
        ctx.shard, ctx.grid, ctx.head_tokens = shard, grid, head_tokens
        return logp_T

    @staticmethod
    def backward(ctx, grad_T: Tensor):
        hidden_SBH, position_T, target_T = ctx.saved_tensors
        weight_VH = ctx.weight
        gradients = GradientSums()
        dhidden_SBH = torch.zeros_like(hidden_SBH)
        for span, scored in _scored_chunks(ctx.grid, position_T):
            chunk_CH = _gather(hidden_SBH, span, ctx.grid, ctx.shard)
            dchunk_CH = torch.zeros_like(chunk_CH)
            for part in _parts(scored, ctx.head_tokens):
                row_U = position_T[part] - span[0]
                picked_UH = chunk_CH[row_U]
                logits_UV = F.linear(picked_UH, weight_VH)
                dlogits_UV = logprob_gradient(logits_UV, target_T[part], grad_T[part], ctx.shard)
                del logits_UV
                dchunk_CH[row_U] = dlogits_UV @ weight_VH
                gradients.add_product(weight_VH, dlogits_UV, picked_UH)
            dhidden_SBH[ctx.grid.local(span), 0] = _scatter(dchunk_CH, ctx.grid, ctx.shard)
        return dhidden_SBH, gradients.hand_out(weight_VH), None, None, None, None, None


def _scored_chunks(grid: ChunkGrid, position_T: Tensor) -> Iterator[tuple[tuple[int, int], slice]]:
    """Chunks that hold scored tokens, with the slice of T that lies in each."""
    spans = grid.spans()
    stops = torch.tensor([stop for _, stop in spans], device=position_T.device)
    ends = torch.searchsorted(position_T, stops).tolist()
    begin = 0
    for span, end in zip(spans, ends, strict=True):
        if end > begin:
            yield span, slice(begin, end)
        begin = end


def _parts(scored: slice, size: int) -> Iterator[slice]:
    for begin in range(scored.start, scored.stop, size):
        yield slice(begin, min(begin + size, scored.stop))


def _gather(hidden_SBH: Tensor, span: tuple[int, int], grid: ChunkGrid, shard: VocabShard) -> Tensor:
    """The chunk's hidden states `[C, H]` on every rank."""
    local_CH = hidden_SBH[grid.local(span), 0].contiguous()
    if grid.parts == 1:
        return local_CH
    whole_CH = local_CH.new_empty(span[1] - span[0], local_CH.size(1))
    dist.all_gather_into_tensor(whole_CH, local_CH, group=shard.axis.group)
    return whole_CH


def _scatter(dchunk_CH: Tensor, grid: ChunkGrid, shard: VocabShard) -> Tensor:
    """The vocabulary shards' parts of a chunk's gradient, summed; this rank's tokens of it."""
    if grid.parts == 1:
        return shard.all_reduce(dchunk_CH)
    own_CH = dchunk_CH.new_empty(dchunk_CH.size(0) // grid.parts, dchunk_CH.size(1))
    dist.reduce_scatter_tensor(own_CH, dchunk_CH, group=shard.axis.group)
    return own_CH
