"""Supervised fine-tuning of a dLLM: the ELBO itself, one draw at a time (LLaDA, arXiv 2502.09992).

Shapes: U draws.
"""

from torch import Tensor

from megamem.errors import UserError
from megamem.objectives.base import Objective, RatioLimits


def sft(limits: RatioLimits) -> Objective:
    """`J_u = d_u A_u`, with advantage 1 (or a weight of the example) and old log-probs 0.

    Raises:
        UserError: a clip is set; there is no ratio to clip.
    """
    if limits.clips:
        raise UserError("objective sft has no probability ratio: leave clip_low, clip_high and dual_clip null")

    def surrogate(d_U: Tensor, adv_U: Tensor) -> Tensor:
        return d_U * adv_U

    return Objective("sft", "draw", surrogate, uses_old=False)
