"""diffu-GRPO: token-level GRPO on a one-step likelihood (d1, arXiv 2504.12216).

The log-probs come from one pass over a fully masked response (noise estimator `full`) behind a randomly masked prompt
(`diffusion.noise.mask_prompt`).

Shapes: T scored tokens.
"""

from torch import Tensor

from megamem.objectives.base import Objective, RatioLimits, bounded_exp, clipped


def diffu_grpo(limits: RatioLimits) -> Objective:
    """`J_t = min(r_t A_t, clip(r_t) A_t)`, `r_t = exp(d_t)`, without the KL term. d1 clips at 0.5 on both sides.

    On-policy (one update per rollout, as in the BGPO paper) r = 1 and the clip never acts.
    """

    def surrogate(d_T: Tensor, adv_T: Tensor) -> Tensor:
        return clipped(bounded_exp(d_T, limits.exponent_limit), adv_T, limits)

    return Objective("diffu_grpo", "token", surrogate)
