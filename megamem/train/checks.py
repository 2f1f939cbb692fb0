"""Step-boundary checks of our own invariants; `train.checks=false` switches them off."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamem.config.schema import RunConfig
from megamem.errors import UserError
from megamem.objectives.base import Objective
from megamem.platform.groups import Axis, Groups
from megamem.train.draws import Sample


def check_skipped(skipped: int, allowed: int, step: int) -> None:
    """Not too many steps in a row were skipped.

    Args:
        skipped: steps in a row that had a loss or gradient that is not finite, up to `step` (from 1).

    Raises:
        UserError: more than `allowed`: the run cannot go on as configured.
    """
    if skipped > allowed:
        raise UserError(
            f"step {step}: the loss or a gradient is not finite, {skipped} time{'s' * (skipped > 1)} in a row; "
            f"train.max_skipped = {allowed}.\nLower optimizer.lr or objective.exponent_limit, or use "
            "model.dtype=float32. No such gradient touched the weights, and the last checkpoint is intact."
        )


def check_in_sync(model: nn.Module, groups: Groups, step: int) -> None:
    """Parameters are equal over data-parallel ranks, and replicated ones over tensor-parallel ranks."""
    split = [p for p in model.parameters() if getattr(p, "tensor_model_parallel", False)]
    shared = [p for p in model.parameters() if not getattr(p, "tensor_model_parallel", False)]
    _assert_equal([*split, *shared], groups.dp, groups, f"step {step}: parameters differ over data-parallel ranks")
    _assert_equal(shared, groups.tp, groups, f"step {step}: replicated parameters differ over tensor-parallel ranks")


def _assert_equal(parameters: Sequence[nn.Parameter], axis: Axis, groups: Groups, message: str) -> None:
    if axis.size == 1 or not parameters:
        return
    mine = torch.stack([p.detach().double().sum() for p in parameters])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=axis.group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=axis.group)
    assert torch.equal(low, high), message


def check_shares(
    weight_B: Tensor, samples: Sequence[Sample], objective: Objective, config: RunConfig, groups: Groups
) -> None:
    """The shares of all units of the global batch add up to one (to less, where a constant divides)."""
    tokens_B = torch.tensor([s.scored_tokens for s in samples], dtype=torch.float64, device=weight_B.device)
    draws = config.noise.draws
    units_B = {"token": tokens_B * draws, "draw": torch.full_like(tokens_B, draws), "sample": tokens_B**0}
    total = groups.sum_over_data((weight_B * units_B[objective.level]).sum())
    constant = config.objective.reduction == "constant" and 0 < float(total) < 1
    assert constant or abs(float(total) - 1) < 1e-9, f"loss shares add up to {float(total)}, not to 1"
