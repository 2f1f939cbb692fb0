"""GRPO on tokens (DeepSeekMath, arXiv 2402.03300), for every model that gives each token a log-prob.

The published variants are settings: DAPO (arXiv 2503.14476) is `reduction: token` and `clip_high` above `clip_low`;
Dr. GRPO (arXiv 2503.20783) is `reduction: constant` and `advantage: mean`; the KL term is `kl`.

Shapes: T scored tokens.
"""

from torch import Tensor

from megamem.objectives.base import Objective, RatioLimits, bounded_exp, clipped


def grpo(limits: RatioLimits) -> Objective:
    """`J_t = min(r_t A_t, clip(r_t) A_t)`, `r_t = exp(d_t)` (eq. 3), with a dual clip where one is set.

    On-policy r = 1: the clip never acts, and the coefficient is `-A_t` whatever the limits.
    """

    def surrogate(d_T: Tensor, adv_T: Tensor) -> Tensor:
        return clipped(bounded_exp(d_T, limits.exponent_limit), adv_T, limits)

    return Objective("grpo", "token", surrogate)
