"""The streamed head (DESIGN section 3.3): selected log-probs of a chunked row, without its logits.

The output layer runs on the scored tokens of one chunk at a time. Where the gradient of the log-probs is known before
they are (supervised, on-policy, replayed coefficients), log-probs and gradients of a chunk come from one pass over it.
Else the forward keeps log-probs only, and the backward replays the chunk with the gradient that arrives. Under sequence
parallelism the scored tokens of a chunk lie unevenly on the ranks: the chunk is gathered, its scored tokens selected,
and the gradient reduced and scattered back.

Shapes: S row tokens, C tokens of a chunk (this rank's part of them where local), T scored tokens, U at most
`head_tokens` of them, H hidden, V vocabulary rows of this shard.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.layout.grid import ChunkGrid
from megamem.ops.vocab import VocabShard, logprob_forward, logprob_gradient
from megamem.stream.gradients import GradientSums


@dataclass(frozen=True, eq=False)
class HeadSteps:
    """The chunk steps of the head on one row.

    Attributes:
        weight_VH: this rank's rows of the output matrix (or of the tied embedding).
        position_T: strictly ascending row indices of the scored tokens; None: every token of the row.
        target_T: their token ids.
        grid: the row's chunks.
        head_tokens: rows of logits that exist at a time.
    """

    weight_VH: nn.Parameter
    position_T: Tensor | None
    target_T: Tensor
    shard: VocabShard
    grid: ChunkGrid
    head_tokens: int

    def scored(self) -> list[slice]:
        """The part of T that lies in each chunk."""
        spans = self.grid.spans()
        if self.position_T is None:
            return [slice(*span) for span in spans]
        assert (self.position_T.diff() > 0).all(), "scored positions must ascend: the row is gone through once"
        stops = torch.tensor([stop for _, stop in spans], device=self.position_T.device)
        ends = torch.searchsorted(self.position_T, stops).tolist()
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def idle(self) -> frozenset[int]:
        """Chunks without scored tokens."""
        return frozenset(i for i, part in enumerate(self.scored()) if part.start == part.stop)

    def empty(self, hidden_SBH: Tensor) -> Tensor:
        """Room for the log-probs `[T]`, at least fp32."""
        wide = torch.promote_types(hidden_SBH.dtype, torch.float32)
        return torch.empty(len(self.target_T), dtype=wide, device=hidden_SBH.device)

    @torch.no_grad()
    def forward(self, hidden_CBH: Tensor, i: int, scored: slice, logp_T: Tensor) -> None:
        """Write the log-probs of chunk `i`, whose local hidden states these are."""
        if scored.start == scored.stop:
            return
        chunk_CH = self._gather(hidden_CBH)
        for part, row_U in self._parts(i, scored):
            logits_UV = F.linear(chunk_CH[row_U], self.weight_VH)
            logp_T[part] = logprob_forward(logits_UV, self.target_T[part], self.shard)[0]

    @torch.no_grad()
    def backward(
        self, hidden_CBH: Tensor, i: int, scored: slice, grad_T: Tensor, gradients: GradientSums,
        logp_T: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """dhidden `[C, 1, H]` (local) of chunk `i` for the gradient of all log-probs; writes log-probs where asked."""
        if scored.start == scored.stop:
            return torch.zeros_like(hidden_CBH)
        chunk_CH = self._gather(hidden_CBH)
        dchunk_CH = torch.zeros_like(chunk_CH)
        for part, row_U in self._parts(i, scored):
            picked_UH = chunk_CH[row_U]
            logits_UV = F.linear(picked_UH, self.weight_VH)
            logp_U, dlogits_UV = logprob_gradient(logits_UV, self.target_T[part], grad_T[part], self.shard)
            del logits_UV
            if logp_T is not None:
                logp_T[part] = logp_U
            dchunk_CH[row_U] = dlogits_UV @ self.weight_VH
            gradients.add_product(self.weight_VH, dlogits_UV, picked_UH)
            del dlogits_UV
        return self._scatter(dchunk_CH)[:, None]

    def _parts(self, i: int, scored: slice) -> Iterator[tuple[slice, Tensor | slice]]:
        """Pieces of at most `head_tokens` scored tokens: where they lie in T and in the chunk."""
        first = self.grid.spans()[i][0]
        for begin in range(scored.start, scored.stop, self.head_tokens):
            part = slice(begin, min(begin + self.head_tokens, scored.stop))
            every = self.position_T is None
            yield part, slice(part.start - first, part.stop - first) if every else self.position_T[part] - first

    def _gather(self, hidden_CBH: Tensor) -> Tensor:
        """The chunk's hidden states `[C, H]` on every rank."""
        local_CH = hidden_CBH[:, 0].contiguous()
        if self.grid.parts == 1:
            return local_CH
        whole_CH = local_CH.new_empty(local_CH.size(0) * self.grid.parts, local_CH.size(1))
        dist.all_gather_into_tensor(whole_CH, local_CH, group=self.shard.axis.group)
        return whole_CH

    def _scatter(self, dchunk_CH: Tensor) -> Tensor:
        """The vocabulary shards' parts of a chunk's gradient, summed; this rank's tokens of it."""
        if self.grid.parts == 1:
            return self.shard.all_reduce(dchunk_CH)
        own_CH = dchunk_CH.new_empty(dchunk_CH.size(0) // self.grid.parts, dchunk_CH.size(1))
        dist.reduce_scatter_tensor(own_CH, dchunk_CH, group=self.shard.axis.group)
        return own_CH


def streamed_logprob(hidden_SBH: Tensor, steps: HeadSteps, known_T: Tensor | None = None) -> Tensor:
    """log p(target) of each scored token, `[T]`, at least fp32, equal on every rank.

    Args:
        hidden_SBH: final hidden states in the grid's order; this rank's tokens if `grid.parts` > 1, else all.
        known_T: the gradient that these log-probs will get, where it is known: then the backward does not replay the
            head, and the gradient that arrives is not looked at.
    """
    if known_T is not None and torch.is_grad_enabled():
        return _OnePass.apply(hidden_SBH, steps.weight_VH, steps, known_T)
    return _Replayed.apply(hidden_SBH, steps.weight_VH, steps)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_SBH, weight_VH, steps):
        logp_T, scored = steps.empty(hidden_SBH), steps.scored()
        for i, span in enumerate(steps.grid.spans()):
            steps.forward(hidden_SBH[steps.grid.local(span)], i, scored[i], logp_T)
        ctx.save_for_backward(hidden_SBH)
        ctx.steps, ctx.scored = steps, scored
        return logp_T

    @staticmethod
    def backward(ctx, grad_T: Tensor):
        (hidden_SBH,), steps = ctx.saved_tensors, ctx.steps
        gradients, dhidden_SBH = GradientSums(), torch.empty_like(hidden_SBH)
        for i, span in enumerate(steps.grid.spans()):
            local = steps.grid.local(span)
            dhidden_SBH[local] = steps.backward(hidden_SBH[local], i, ctx.scored[i], grad_T, gradients)
        return dhidden_SBH, gradients.hand_out(steps.weight_VH), None


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_SBH, weight_VH, steps, known_T):
        logp_T, scored = steps.empty(hidden_SBH), steps.scored()
        gradients, dhidden_SBH = GradientSums(), torch.empty_like(hidden_SBH)
        for i, span in enumerate(steps.grid.spans()):
            local = steps.grid.local(span)
            dhidden_SBH[local] = steps.backward(hidden_SBH[local], i, scored[i], known_T, gradients, logp_T)
        ctx.save_for_backward(dhidden_SBH)
        ctx.gradients, ctx.weight_VH = gradients, weight_VH
        return logp_T

    @staticmethod
    def backward(ctx, _):
        (dhidden_SBH,) = ctx.saved_tensors
        return dhidden_SBH, ctx.gradients.hand_out(ctx.weight_VH), None, None
