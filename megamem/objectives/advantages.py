"""Advantages: what a reward is worth against the other members of its group.

A group whose rewards are all equal (also a group of one) has advantage exactly 0: it says nothing about the policy, and
must not become NaN or rounding noise divided by rounding noise.

Shapes: B groups (prompts), G members of a group (responses).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megamem.errors import UserError

STD_EPSILON = 1e-6  # on the scale of rewards, added to the standard deviation (as verl and DARE do)


def mean_std(rewards_BG: Tensor) -> Tensor:
    """`(r - mean) / (std + 1e-6)`, float64 `[B, G]` (GRPO; BGPO eq. 18).

    std is the *sample* standard deviation (G - 1 in the denominator): the papers do not say, and the public BGPO (DARE)
    and GRPO codes use `torch.std`.
    """
    centred_BG = mean(rewards_BG)
    variance_B1 = centred_BG.square().sum(-1, keepdim=True) / max(rewards_BG.shape[-1] - 1, 1)
    return centred_BG / (variance_B1.sqrt() + STD_EPSILON)


def mean(rewards_BG: Tensor) -> Tensor:
    """`r - mean`, float64 `[B, G]` (Dr. GRPO, arXiv 2503.20783; also d1)."""
    if not torch.isfinite(rewards_BG).all():
        raise UserError("a reward is NaN or infinite; rewards must be finite numbers")
    rewards_BG = rewards_BG.double()
    flat_BG = (rewards_BG == rewards_BG[:, :1]).all(-1, keepdim=True).expand_as(rewards_BG)
    # Rounding can leave r - mean at 1e-17 in a flat group, hence the explicit zero.
    return (rewards_BG - rewards_BG.mean(-1, keepdim=True)).masked_fill(flat_BG, 0.0)


def loo(rewards_BG: Tensor) -> Tensor:
    """`r - mean of the other members`, float64 `[B, G]`; equals `(r - mean) * G / (G - 1)` (RLOO, arXiv 2402.14740)."""
    members = rewards_BG.shape[-1]
    return mean(rewards_BG) * (members / max(members - 1, 1))


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"mean_std": mean_std, "mean": mean, "loo": loo}
