"""Objectives by name."""

from collections.abc import Callable
from typing import Protocol

from megamem.errors import UserError
from megamem.objectives.base import Objective, RatioLimits
from megamem.objectives.bgpo import bgpo
from megamem.objectives.diffu_grpo import diffu_grpo
from megamem.objectives.sft import sft
from megamem.objectives.vrpo_ol import vrpo_ol

FACTORIES: dict[str, Callable[[RatioLimits], Objective]] = {
    "bgpo": bgpo,
    "vrpo_ol": vrpo_ol,
    "diffu_grpo": diffu_grpo,
    "sft": sft,
}


class ObjectiveConfig(Protocol):
    """The fields read here; see `base.RatioLimits` for their meaning."""

    name: str
    clip_low: float | None
    clip_high: float | None
    dual_clip: float | None
    exponent_limit: float


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective a configuration names.

    Raises:
        UserError: an unknown name, a limit out of range, or a limit the objective has no use for.
    """
    if config.name not in FACTORIES:
        raise UserError(f"unknown objective {config.name!r}; choose one of {', '.join(FACTORIES)}")
    limits = RatioLimits(config.clip_low, config.clip_high, config.dual_clip, config.exponent_limit)
    return FACTORIES[config.name](limits)
