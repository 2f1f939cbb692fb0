"""Objectives as coefficients (DESIGN section 4).

An objective is a small scalar function `J(d, advantage)` of log ratios `d = (logp_new - logp_old) * scale`, to be
maximised; it may also charge for `logp_new - logp_ref`, the drift from a reference policy. The model never sees it: it
sees `loss = sum stopgrad(c) * logp_new` with `c = -dJ/dlogp_new`, whose gradient is exactly that of `-J`. So one
backward path serves every objective, and an objective that is a sum over units lets each unit be a micro-batch of its
own, in memory that does not grow with their number (BGPO Algorithm 1).

J holds no 1/n of any kind (draws, tokens, samples, ranks): `reduction.py` alone divides.

Shapes: U units (draws, or tokens), B samples, D draws, T scored tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamem.errors import UserError

Level = Literal["token", "draw", "sample"]


@dataclass(frozen=True)
class Objective:
    """What is maximised.

    Attributes:
        name: as in `registry.FACTORIES`.
        level: what the log ratio d belongs to, and with it the shapes of `surrogate`:
            "token"   d `[T]`, advantage `[T]` -> `[T]`, separable;
            "draw"    d `[U]`, advantage `[U]` -> `[U]`, separable: draws of different samples may share a call;
            "sample"  d `[B, D]`, advantage `[B]` -> `[B]`, coupled: all draws of a sample are needed at once, so a step
                      takes one no-grad pass for the log-probs, then replays the draws with the coefficients.
        surrogate: J of every unit, elementwise in units, differentiable in d, finite for every finite d.
        uses_old: False if J is linear in d (SFT), so that coefficients depend on no log-probs: pass zeros for the old.
        penalty: of the drift `[T]` from a reference policy, `[T]`, subtracted from the surrogate (level "token" only).
            With it a coefficient depends on the new log-prob even on-policy. None: there is no reference.
    """

    name: str
    level: Level
    surrogate: Callable[[Tensor, Tensor], Tensor]
    uses_old: bool = True
    penalty: Callable[[Tensor], Tensor] | None = None

    def value(self, d: Tensor, adv: Tensor, drift: Tensor | None = None) -> Tensor:
        """J of every unit.

        Args:
            d, adv: as for `surrogate`.
            drift: new minus reference log-probs, where there is a penalty.
        """
        if self.penalty is None:
            return self.surrogate(d, adv)
        assert drift is not None, f"{self.name} has a penalty and needs the reference policy's log-probs"
        return self.surrogate(d, adv) - self.penalty(drift)


@dataclass(frozen=True)
class RatioLimits:
    """How far a probability ratio may pull. Everything is off by default but the guard against overflow.

    Attributes:
        clip_low, clip_high: PPO clip range `[1 - clip_low, 1 + clip_high]`; None leaves that side open.
        dual_clip: for negative advantages bounds the loss of one unit by `dual_clip * |advantage|` (> 1; verl: 3).
        exponent_limit: the largest exponent taken of e (see `bounded_exp`); in (0, 80], finite in float32 too.

    Raises:
        UserError: a value out of its range.
    """

    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    exponent_limit: float = 20.0

    def __post_init__(self):
        if self.clip_low is not None and not 0.0 <= self.clip_low <= 1.0:
            raise UserError(f"clip_low must lie in [0, 1] or be null, got {self.clip_low}")
        if self.clip_high is not None and not self.clip_high >= 0.0:
            raise UserError(f"clip_high must be at least 0 or be null, got {self.clip_high}")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise UserError(f"dual_clip must be above 1 or be null, got {self.dual_clip}")
        if not 0.0 < self.exponent_limit <= 80.0:
            raise UserError(f"exponent_limit must lie in (0, 80], got {self.exponent_limit}")

    @property
    def clips(self) -> bool:
        return not (self.clip_low is self.clip_high is self.dual_clip is None)


def coefficients(
    objective: Objective,
    new: Tensor,
    old: Tensor,
    adv: Tensor,
    scale: Tensor | float = 1.0,
    ref: Tensor | None = None,
) -> Tensor:
    """`c = -dJ/dnew` with J summed over units; constants of the graph, to be used as `sum c * logp_new`.

    Args:
        objective: what is maximised; its `level` fixes the shapes.
        new, old: log-probs (nats) under the trained and the rollout policy on the same noise: tokens `[T]`, or ELBO
            estimates of draws `[U]`, or `[B, D]` for a coupled objective. Both are detached here. On-policy (no update
            since the rollout) `old = new` is exact and the old-policy pass can be skipped.
        adv: advantage of every unit (`[T]`, `[U]`), or of every sample (`[B]`).
        scale: factor on the log ratio, a number or broadcastable to `new`: 1 (the papers), or 1/length.
        ref: log-probs under the reference policy, the shape of `new`; read where the objective has a penalty.

    Returns:
        float64, the shape of `new`. It carries `scale`, and 1/D for a coupled objective (the mean inside J).
    """
    assert new.shape == old.shape, (new.shape, old.shape)
    with torch.enable_grad():  # the caller usually runs under no_grad
        leaf = new.detach().double().requires_grad_()
        drift = None if ref is None else leaf - ref.detach().double()
        value = objective.value((leaf - old.detach().double()) * scale, adv.detach().double(), drift)
        assert value.shape == adv.shape, (value.shape, adv.shape)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return -slope


def bounded_exp(x: Tensor, limit: float) -> Tensor:
    """e^x up to `limit` and its tangent beyond: the slope there is e^limit, large but finite and never zero.

    (A plain clamp would stop pushing exactly the units that are furthest off.)
    """
    return torch.exp(x.clamp(max=limit)) * (1.0 + torch.relu(x - limit))


def k3(drift: Tensor, limit: float) -> Tensor:
    """`e^-x - 1 + x` of the drift x = new - ref: at least 0, and its mean under the new policy is KL(new || ref).

    Schulman's third estimator (http://joschu.net/blog/kl-approx.html), the KL term of GRPO (arXiv 2402.03300 eq. 4).
    """
    return bounded_exp(-drift, limit) - 1.0 + drift


def clipped(ratio: Tensor, adv: Tensor, limits: RatioLimits) -> Tensor:
    """`min(r A, clip(r) A)` (PPO, arXiv 1707.06347); then, for A < 0, at least `dual_clip * A` (arXiv 1912.09729)."""
    value = ratio * adv
    if limits.clip_low is not None or limits.clip_high is not None:
        low = None if limits.clip_low is None else 1.0 - limits.clip_low
        high = None if limits.clip_high is None else 1.0 + limits.clip_high
        value = torch.minimum(value, ratio.clamp(low, high) * adv)
    if limits.dual_clip is not None:
        value = torch.where(adv < 0, torch.maximum(value, limits.dual_clip * adv), value)
    return value
