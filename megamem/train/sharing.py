"""A prompt shared in one row or through a handle (DESIGN section 5): what either costs, and which one runs.

Both compute the same. A row holds the prompt once, but draws that do not fit begin another row, with the prompt again.
A handle runs the prompt once for any number of rows; its keys and values wait until all of them have come back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megamem.config.architecture import Architecture
from megamem.config.rules import keeps_keys
from megamem.config.schema import RunConfig
from megamem.layout.packing import PackedDraws, RowShape, Share, Unit, draws, pack_draws
from megamem.models.flops import model_flops

Form = Literal["row", "handle"]
_WORTH = 0.99  # of the row's operations: from here on a handle is worth the keys and values it keeps


@dataclass(frozen=True)
class Sharing:
    """What one form costs.

    Attributes:
        operations: of forward and backward of all groups, every response token scored.
        rows: of them.
        kept_bytes: keys and values of a pipeline stage's layers, with their gradients, of as many rows as there are
            stages and of the prompt that waits for them, on one rank.
    """

    operations: int
    rows: int
    kept_bytes: int


def compare_forms(config: RunConfig, arch: Architecture, attention: str, prompts: Sequence[int]) -> dict[Form, Sharing]:
    """Both forms' cost for one group of each prompt.

    Args:
        attention: how a sequence attends (a name of `layout.packing.SEQUENCE_LAYOUTS`).
        prompts: their lengths in tokens. Responses are taken at their full length.
    """
    # Reference answers come one to a prompt.
    members, response = 1 if config.objective.name == "sft" else config.rollout.group, config.rollout.gen_length
    units = [
        Unit(group, group * members + member, prompt, response)
        for group, prompt in enumerate(prompts)
        for member in range(members)
        for _ in range(config.noise.draws)
    ]
    multiple = config.parallel.tensor if config.parallel.sequence else 1
    shape = RowShape(config.train.row_tokens, multiple)
    scored = len(units) * response
    found: dict[Form, Sharing] = {}
    for form in ("row", "handle"):
        packed = pack_draws(units, draws(attention, arch.shifted_logits, form), shape)
        tokens, pairs = sum(row.tokens for row in packed), sum(row.visible_pairs() for row in packed)
        kept = _kept_tokens(packed, config.parallel.pipeline) * _bytes_per_token(config, arch)
        found[form] = Sharing(model_flops(arch, tokens, scored, pairs), len(packed), kept)
    return found


def choose_share(config: RunConfig, arch: Architecture, attention: str, prompts: Sequence[int]) -> Share:
    """How a run shares prompts of these lengths: as it was told, or what costs less where `prefix.form` is auto.

    A handle runs only where rows keep their keys and values (`config/rules.py`). What fits is not looked at: that is
    `megamem plan --prompt`.
    """
    if not config.prefix.share:
        return "none"
    if config.prefix.form != "auto":
        return config.prefix.form
    if not keeps_keys(config):
        return "row"
    return cheaper(compare_forms(config, arch, attention, prompts))


def cheaper(costs: Mapping[Form, Sharing]) -> Form:
    """Fewer operations, unless they are hardly fewer: then what keeps less."""
    return "handle" if costs["handle"].operations < _WORTH * costs["row"].operations else "row"


def _kept_tokens(packed: Sequence[PackedDraws], stages: int) -> int:
    """The first of P stages has P rows under way before one comes back; behind a handle each has a copy of its keys."""
    waiting = max(row.start for row in packed)
    return waiting + min(stages, len(packed)) * max(row.layout.length for row in packed)


def _bytes_per_token(config: RunConfig, arch: Architecture) -> int:
    layers = -(-arch.layers // config.parallel.pipeline)
    size = getattr(torch, config.model.dtype).itemsize + torch.float32.itemsize  # gradients add up in at least fp32
    return layers * 2 * max(1, arch.kv_heads // config.parallel.tensor) * arch.head_dim * size
