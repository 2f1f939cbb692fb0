"""Remasking: which of the tokens just proposed are kept, the others being masked again.

At every step of denoising the model proposes a token for each masked position. A policy scores the proposals, the
schedule says how many each row may keep, and the best scores are kept.

Shapes: P candidate positions (masked positions of all rows, flat), R rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megamem.errors import UserError
from megamem.ops.vocab import Samples

# The score of every candidate, float64 `[P]`, best highest. The second argument, uniforms `[P]`, is read by "random"
# only and may be None elsewhere.
POLICIES: dict[str, Callable[[Samples, Tensor | None], Tensor]] = {
    # The names are those of the samplers they come from: "low_confidence" remasks low confidence, i.e. keeps high.
    "low_confidence": lambda samples, uniform_P: samples.prob_P,
    "random": lambda samples, uniform_P: uniform_P,
    "entropy": lambda samples, uniform_P: -samples.entropy_P,
    "margin": lambda samples, uniform_P: samples.margin_P,
}


def transfer_counts(masks: int, steps: int) -> list[int]:
    """Tokens to keep at each step, adding up to `masks`: `masks // steps`, one more in the first `masks % steps` steps.

    LLaDA's linear schedule (arXiv 2502.09992; `get_num_transfer_tokens` of its generate.py).

    Raises:
        UserError: fewer than one step.
    """
    if steps < 1:
        raise UserError(f"denoising needs at least one step, got {steps}")
    base, extra = divmod(masks, steps)
    return [base + (step < extra) for step in range(steps)]


def select(score_P: Tensor, row_P: Tensor, count_of_row: Tensor) -> Tensor:
    """The `count_of_row[r]` best candidates of every row r, bool `[P]`.

    Equal scores: the candidate that comes first is preferred, so list positions in ascending order. A row with fewer
    candidates than its count keeps all.

    Args:
        score_P: float, finite or -inf.
        row_P: int64, row of each candidate, 0..R-1, in any order.
        count_of_row: int64 `[R]`.
    """
    # By row, then by descending score, then by place: two stable sorts, the last key first.
    by_score = score_P.argsort(descending=True, stable=True)
    order = by_score[row_P[by_score].argsort(stable=True)]
    row_sorted = row_P[order]
    size_of_row = row_P.bincount(minlength=len(count_of_row))
    start_of_row = size_of_row.cumsum(0) - size_of_row
    rank_sorted = torch.arange(len(order), device=order.device) - start_of_row[row_sorted]
    selected_P = torch.empty_like(order, dtype=torch.bool)
    selected_P[order] = rank_sorted < count_of_row[row_sorted]
    return selected_P
