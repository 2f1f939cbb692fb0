"""diffu-GRPO: token-level GRPO on a one-step likelihood (d1, arXiv 2504.12216).

The log-probs come from one pass over a fully masked response (noise estimator `full`) behind a randomly masked prompt
(`diffusion.noise.mask_prompt`).
"""

from dataclasses import replace

from megamem.objectives.base import Objective, RatioLimits
from megamem.objectives.grpo import grpo


def diffu_grpo(limits: RatioLimits) -> Objective:
    """GRPO's function of other log-probs. d1 clips at 0.5 on both sides.

    On-policy (one update per rollout, as in the BGPO paper) r = 1 and the clip never acts.
    """
    return replace(grpo(limits), name="diffu_grpo")
