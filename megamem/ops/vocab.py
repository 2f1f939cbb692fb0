"""Log-probabilities and sampling over a vocabulary that is split over tensor-parallel ranks.

No rank ever holds the full `[T, V]` logits. Padded vocabulary columns are -inf for every purpose.

Shapes: T selected positions, H hidden, V vocabulary rows of this shard.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megamem.platform.groups import Axis
from megamem.platform.rng import uniform_hash


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary rows of this rank.

    Attributes:
        start: global id of its first row.
        rows: rows it holds.
        valid: rows of the real vocabulary over all ranks; ids beyond are padding.
        axis: the tensor-parallel axis.
    """

    start: int
    rows: int
    valid: int
    axis: Axis

    def mask_padding(self, logits_TV: Tensor) -> Tensor:
        """-inf in the columns that are no token, in place; returns its argument."""
        local = max(0, min(self.rows, self.valid - self.start))
        logits_TV[:, local:] = -torch.inf
        return logits_TV

    def all_reduce(self, x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the shards, in place; returns its argument."""
        if self.axis.size > 1:
            dist.all_reduce(x, op=op, group=self.axis.group)
        return x


def naive_selected_logprob(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    """Reference on the full vocabulary: `log_softmax` and gather, `[T]`."""
    wide = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return wide.log_softmax(-1).gather(-1, target_T[:, None])[:, 0]


def selected_logprob(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, shard: VocabShard) -> Tensor:
    """log p(target) at each position, `[T]`, at least fp32, equal on every rank.

    Args:
        hidden_TH: final hidden states, replicated over the tensor-parallel ranks. Its gradient is this shard's part:
            the caller's gather or copy sums it over ranks.
        weight_VH: this rank's rows of the output matrix.
        target_T: global token ids.
    """
    return _SelectedLogProb.apply(hidden_TH, weight_VH, target_T, shard)


class _SelectedLogProb(torch.autograd.Function):
    """The output layer and the log-softmax in one node, so that `[T, V]` exists once and not as logits, too."""

    @staticmethod
    def forward(ctx, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, shard: VocabShard) -> Tensor:
        logp_T, p_TV = logprob_forward(F.linear(hidden_TH, weight_VH), target_T, shard)
        ctx.save_for_backward(hidden_TH, weight_VH, target_T, p_TV)
        ctx.shard = shard
        return logp_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_T: Tensor):
        hidden_TH, weight_VH, target_T, p_TV = ctx.saved_tensors
        dlogits_TV = _softmax_gradient(p_TV.clone(), target_T, grad_T, ctx.shard).to(hidden_TH.dtype)
        return dlogits_TV @ weight_VH, dlogits_TV.t() @ hidden_TH, None, None


def logprob_forward(logits_TV: Tensor, target_T: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """log p(target) `[T]` and this shard's probabilities `[T, V]`, at least fp32, without autograd.

    The logits are used up: where they are wide enough, the probabilities take their place.
    """
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    p_TV = shard.mask_padding(logits_TV.to(wide))
    top_T = shard.all_reduce(p_TV.max(-1).values, dist.ReduceOp.MAX)
    p_TV.sub_(top_T[:, None])
    local_T, mine_T = _own_targets(target_T, shard)
    picked_T = torch.where(mine_T, p_TV.gather(-1, local_T[:, None])[:, 0], 0.0)
    sums_2T = shard.all_reduce(torch.stack([picked_T, p_TV.exp_().sum(-1)]))
    return sums_2T[0] - sums_2T[1].log(), p_TV.div_(sums_2T[1][:, None])


def logprob_gradient(logits_TV: Tensor, target_T: Tensor, grad_T: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """log p(target) `[T]`, and the gradient of `sum grad * log p(target)` by this shard's logits, in their dtype.

    The logits are used up.
    """
    dtype = logits_TV.dtype
    logp_T, p_TV = logprob_forward(logits_TV, target_T, shard)
    return logp_T, _softmax_gradient(p_TV, target_T, grad_T, shard).to(dtype)


def _softmax_gradient(p_TV: Tensor, target_T: Tensor, grad_T: Tensor, shard: VocabShard) -> Tensor:
    """`grad * (onehot(target) - p)`, in place of `p_TV`."""
    local_T, mine_T = _own_targets(target_T, shard)
    p_TV.mul_(-grad_T[:, None])
    return p_TV.scatter_add_(-1, local_T[:, None], torch.where(mine_T, grad_T, 0.0).to(p_TV.dtype)[:, None])


def _own_targets(target_T: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Column of each target in this shard (clamped), and whether it lies here."""
    local_T = target_T - shard.start
    return local_T.clamp(0, shard.rows - 1), (local_T >= 0) & (local_T < shard.rows)


@dataclass(frozen=True)
class Samples:
    """One sampled token per position and what the clean softmax says about it; all `[P]`, float64 but `token_P`."""

    token_P: Tensor
    prob_P: Tensor
    entropy_P: Tensor
    margin_P: Tensor


def sample_tokens(
    logits_PV: Tensor, key_P: Tensor, temperature: float, shard: VocabShard, forbidden: tuple[int, ...] = ()
) -> Samples:
    """Gumbel-max sampling over the sharded vocabulary, in float64.

    The choice is `argmax(logits - temperature * log(-log u))`, the log form of LLaDA's `exp(logits) / (-log u)^T`;
    `u` is a hash of (row key, vocabulary id), so shards, batches and layouts draw the same noise. Ties go to the lower
    id. Probability, entropy (nats) and margin (largest minus second largest probability) are of the clean softmax.

    Args:
        logits_PV: this rank's logits.
        key_P: int64 key of the random row of each position.
        temperature: 0 is greedy.
        forbidden: token ids that may not be chosen.
    """
    clean_PV = shard.mask_padding(logits_PV.to(torch.float64, copy=True))
    ids_V = torch.arange(shard.start, shard.start + shard.rows, device=logits_PV.device)
    score_PV = clean_PV
    if temperature > 0:
        score_PV = clean_PV - temperature * torch.log(-torch.log(uniform_hash(key_P, ids_V)))
    for token in forbidden:
        score_PV = score_PV.masked_fill(ids_V == token, -torch.inf)
    score_P, index_P = score_PV.max(-1)
    chosen_P = clean_PV.gather(-1, index_P[:, None])[:, 0]
    top_P2 = clean_PV.topk(min(2, shard.rows), -1).values
    top_P2 = F.pad(top_P2, (0, 2 - top_P2.size(-1)), value=-torch.inf)
    # A shard of padding only has no finite logit; 0 stands in for its maximum and its sums are 0.
    base_P = top_P2[:, 0].nan_to_num(neginf=0.0)
    weight_PV = (clean_PV - base_P[:, None]).exp()
    mean_P = torch.where(weight_PV > 0, weight_PV * clean_PV, 0.0).sum(-1)
    stats_P7 = torch.stack(
        [score_P, index_P + shard.start, chosen_P, top_P2[:, 0], top_P2[:, 1], weight_PV.sum(-1), mean_P], -1
    )
    return _combine_shards(_gather(stats_P7, shard))


def _gather(stats_PK: Tensor, shard: VocabShard) -> Tensor:
    """`[R, P, K]` from R shards."""
    if shard.axis.size == 1:
        return stats_PK[None]
    parts = [torch.empty_like(stats_PK) for _ in range(shard.axis.size)]
    dist.all_gather(parts, stats_PK.contiguous(), group=shard.axis.group)
    return torch.stack(parts)


def _combine_shards(stats_RPK: Tensor) -> Samples:
    score_RP, token_RP, chosen_RP, top_RP, second_RP, sum_RP, mean_RP = stats_RPK.unbind(-1)
    best_P = score_RP.argmax(0)  # the first of equal shards holds the lower id

    def pick(x_RP: Tensor) -> Tensor:
        return x_RP.gather(0, best_P[None])[0]

    top_P = top_RP.max(0).values
    scale_RP = (top_RP.nan_to_num(neginf=0.0) - top_P).exp()
    scale_RP = torch.where(sum_RP > 0, scale_RP, 0.0)
    total_P = (sum_RP * scale_RP).sum(0)
    lse_P = top_P + total_P.log()
    two_P2 = torch.cat([top_RP, second_RP]).topk(2, 0).values
    return Samples(
        token_P=pick(token_RP).long(),
        prob_P=(pick(chosen_RP) - lse_P).exp(),
        entropy_P=lse_P - (mean_RP * scale_RP).sum(0) / total_P,
        margin_P=(two_P2[0] - lse_P).exp() - (two_P2[1] - lse_P).exp(),
    )
