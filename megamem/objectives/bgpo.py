"""BGPO: boundary-guided policy optimization (arXiv 2510.11683).

Shapes: U draws of any mixture of samples.
"""

import torch
from torch import Tensor

from megamem.objectives.base import Objective, RatioLimits, bounded_exp, clipped


def bgpo(limits: RatioLimits) -> Objective:
    """A lower bound of VRPO-OL's `exp(mean_j d_j) A` that is a sum over draws, so draws need not meet in memory.

        J_j = (1 + d_j) A   for A >= 0   (Taylor, eq. 9)
        J_j = exp(d_j) A    for A < 0    (Jensen, eq. 12)

    with `d_j = ell_new - ell_old` on the same noise (eq. 10, 13, 14). On-policy (d = 0) value and gradient equal those
    of `exp(mean_j d_j) A` (eq. 15-17).

    The paper clips nothing, nor do the default limits; with limits set, the clip acts on `1 + d` and `exp(d)` as on a
    PPO ratio (as the public DARE code does). Above `exponent_limit` the tangent replaces `exp(d)`: the coefficient
    stays at `e^limit |A|`, and J is no longer a bound there.
    """

    def surrogate(d_U: Tensor, adv_U: Tensor) -> Tensor:
        ratio_U = torch.where(adv_U >= 0, 1.0 + d_U, bounded_exp(d_U, limits.exponent_limit))
        return clipped(ratio_U, adv_U, limits)

    return Objective("bgpo", "draw", surrogate)
