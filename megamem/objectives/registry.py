"""Objectives by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from megamem.errors import UserError
from megamem.objectives.base import Objective, RatioLimits, k3
from megamem.objectives.bgpo import bgpo
from megamem.objectives.diffu_grpo import diffu_grpo
from megamem.objectives.grpo import grpo
from megamem.objectives.sft import sft
from megamem.objectives.vrpo_ol import vrpo_ol

FACTORIES: dict[str, Callable[[RatioLimits], Objective]] = {
    "bgpo": bgpo,
    "vrpo_ol": vrpo_ol,
    "diffu_grpo": diffu_grpo,
    "grpo": grpo,
    "sft": sft,
}


class ObjectiveConfig(Protocol):
    """The fields read here; see `base.RatioLimits` for their meaning."""

    name: str
    clip_low: float | None
    clip_high: float | None
    dual_clip: float | None
    exponent_limit: float
    kl: float


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective a configuration names.

    Raises:
        UserError: an unknown name, a limit out of range, a limit the objective has no use for, or a KL term where
            log-probs are not those of tokens.
    """
    if config.name not in FACTORIES:
        raise UserError(f"unknown objective {config.name!r}; choose one of {', '.join(FACTORIES)}")
    limits = RatioLimits(config.clip_low, config.clip_high, config.dual_clip, config.exponent_limit)
    objective = FACTORIES[config.name](limits)
    if config.kl == 0:
        return objective
    if objective.level != "token":
        per_token = ", ".join(name for name, make in FACTORIES.items() if make(RatioLimits()).level == "token")
        raise UserError(
            f"objective.kl = {config.kl} compares log-probs of tokens, which objective.name = {config.name} does not "
            f"have; allowed: 0, or objective.name = {per_token}"
        )
    return replace(objective, penalty=lambda drift_T: config.kl * k3(drift_T, limits.exponent_limit))
