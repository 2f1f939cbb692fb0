"""VRPO-OL: the ELBO policy objective itself, BGPO's baseline (arXiv 2510.11683 eq. 7 and section 4.1).

Shapes: B samples, D draws.
"""

from torch import Tensor

from megamem.objectives.base import Objective, RatioLimits, bounded_exp, clipped


def vrpo_ol(limits: RatioLimits) -> Objective:
    """`J_b = exp(mean_j d_bj) A_b` (eq. 7): the draws of a sample are coupled by the exponential.

    `dJ/dd_bj = exp(mean_j d_bj) A_b / D`: the 1/D belongs to the ELBO estimate inside J. The default limits change
    nothing below `exponent_limit`; a clip acts on the sample's ratio (as ESPO does with `scale` = 1/length).
    """

    def surrogate(d_BD: Tensor, adv_B: Tensor) -> Tensor:
        return clipped(bounded_exp(d_BD.mean(-1), limits.exponent_limit), adv_B, limits)

    return Objective("vrpo_ol", "sample", surrogate)
