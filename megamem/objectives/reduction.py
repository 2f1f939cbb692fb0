"""The one place that divides (DESIGN section 4).

Every denominator of the loss is counted here, over the whole global batch: all data-parallel ranks and micro-batches.
Called once per optimizer step with all samples of this rank, it returns one factor per sample, and

    loss = sum over samples b and their units u of  weight_B[b] * coefficient_u * logp_u

added up over any split into micro-batches and ranks is the mean over the global batch. Nothing may divide after it.

A factor is `share / units`: the share of the sample in the global mean (shares of all samples of all ranks add up to
1, except under "constant"), spread over the units (draws, tokens, or the sample itself) its coefficients belong to.

Shapes: B samples of this rank.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megamem.errors import UserError
from megamem.objectives.base import Level

Reduction = Literal["sequence", "token", "group", "constant"]
AllReduce = Callable[[Tensor], Tensor]


def sample_weights(
    kind: Reduction,
    tokens_B: Tensor,
    groups_B: Tensor,
    draws: int,
    level: Level,
    all_reduce: AllReduce,
    longest: int = 0,
) -> Tensor:
    """The factor of every unit of sample b, float64 `[B]`.

    Args:
        kind: what the loss is the mean of, over the global batch:
            "sequence"  samples, each counting the same (BGPO eq. 19 with groups of equal size);
            "token"     scored tokens, so long samples count more;
            "group"     means over the samples of a group, each group counting the same. A group must live on one rank:
                        only the number of groups is summed over ranks;
            "constant"  samples, each sum over its tokens divided by `longest` instead of their number, so that length
                        changes no token's weight (Dr. GRPO). Shares add up to less than 1.
        tokens_B: scored tokens of each sample; at level "token" of all its draws together. A sample without scored
            tokens weighs 0 and is not counted, so dummy samples can keep ranks in step.
        groups_B: int64 id of each sample's group, unique over ranks; read by "group" only.
        draws: D, draws per sample; read at level "draw" only.
        level: the level of the objective.
        all_reduce: sums a float64 tensor over data-parallel ranks (identity on one rank). Called once by every rank,
            also by one without samples.
        longest: scored tokens of the longest possible sample, counted as in `tokens_B`; read by "constant" only.

    Raises:
        UserError: an unknown kind.
    """
    if kind not in SHARES:
        raise UserError(f"unknown loss reduction {kind!r}; choose one of {', '.join(SHARES)}")
    tokens_B = tokens_B.double()
    part_B, counted_B = SHARES[kind](tokens_B, groups_B, longest)
    share_B = _divide(part_B, all_reduce(counted_B.sum()))
    return _divide(share_B, UNITS[level](tokens_B, draws))


def _sequence_part(tokens_B: Tensor, groups_B: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    counted_B = (tokens_B > 0).double()
    return counted_B, counted_B


def _token_part(tokens_B: Tensor, groups_B: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    return tokens_B, tokens_B


def _group_part(tokens_B: Tensor, groups_B: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """1 / size of the own group: the parts of a group add up to 1, those of a rank to its number of groups."""
    counted_B = (tokens_B > 0).double()
    ids, index_B = groups_B.unique(return_inverse=True)
    size = torch.zeros(len(ids), dtype=torch.float64, device=tokens_B.device).index_add(0, index_B, counted_B)
    part_B = _divide(counted_B, size[index_B])
    return part_B, part_B


def _constant_part(tokens_B: Tensor, groups_B: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    assert longest > 0, f"longest = {longest}"
    return tokens_B / longest, (tokens_B > 0).double()


def _divide(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where nothing was counted."""
    return torch.where(whole > 0, part / whole.masked_fill(whole <= 0, 1.0), 0.0)


# Each sample's part of the global mean, and what it adds to the number that all parts are divided by.
SHARES: dict[str, Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]] = {
    "sequence": _sequence_part,
    "token": _token_part,
    "group": _group_part,
    "constant": _constant_part,
}

# The number of units that share a sample's weight.
UNITS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sample": lambda tokens_B, draws: torch.ones_like(tokens_B),
    "draw": lambda tokens_B, draws: torch.full_like(tokens_B, draws),
    "token": lambda tokens_B, draws: tokens_B,
}
