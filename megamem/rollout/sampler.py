"""Block denoising, as LLaDA decodes: blocks left to right, several tokens per step, the least certain masked again.

A response depends on (seed, step, problem, sample) and the weights alone: noise is keyed by these and by position and
vocabulary id, and sequences of a packed row never see each other.

Shapes: P candidate positions of a call (masked positions of the current block of all its sequences).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.layout.packing import pack
from megamem.models.gpt import SampleHead
from megamem.models.row import Row, RowParams
from megamem.models.runner import Runner
from megamem.ops.vocab import Samples
from megamem.platform.groups import Groups
from megamem.platform.rng import derive_seed, uniform_hash
from megamem.rollout.remask import POLICIES, select, transfer_counts
from megamem.rollout.rollout import Request, Rollout


@dataclass(frozen=True)
class Decoding:
    """How to decode. Fields are those of `config.schema.RolloutConfig`, the model's `eos_id` and `mask_id` (None for a
    causal model), and the key (seed, step) of the sampling noise."""

    gen_length: int
    block_length: int
    steps: int
    temperature: float
    remasking: str
    eos: str
    stop_at_eos: bool
    row_tokens: int
    eos_id: int
    mask_id: int | None
    seed: int
    step: int

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that are never chosen."""
        return tuple(t for t in (self.mask_id, self.eos_id if self.eos == "forbidden" else None) if t is not None)


@dataclass(eq=False)
class Canvas:
    """A prompt and its response so far; `ids` is filled in place."""

    request: Request
    ids: Tensor

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    def key(self, decoding: Decoding, *turn: int) -> int:
        """Of the sampling noise, without the position."""
        return derive_seed(decoding.seed, "sample", decoding.step, self.request.problem, self.request.sample, *turn)

    def rollout(self) -> Rollout:
        """The request with what is written behind its prompt."""
        r = self.request
        return Rollout(r.problem, r.sample, r.prompt, tuple(self.ids[self.prompt_length :].tolist()))


@dataclass(frozen=True, eq=False)
class Masked:
    """Masked positions at which tokens are proposed, int64 `[P]` each.

    Attributes:
        member_P: which of the canvases.
        place_P: index in the canvas.
        position_P: index in the packed row.
        key_P: of the sampling noise.
    """

    member_P: Tensor
    place_P: Tensor
    position_P: Tensor
    key_P: Tensor

    @staticmethod
    def join(parts: Sequence["Masked"]) -> "Masked":
        """All of them, in order."""
        fields = dataclasses.fields(Masked)
        return Masked(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields))


def masked_positions(canvas: Canvas, member: int, span: tuple[int, int], offset: int, key: int, mask_id: int) -> Masked:
    """Those of a canvas in `[span)`; its token i lies at row index `offset + i`."""
    place_P = (canvas.ids[slice(*span)] == mask_id).nonzero()[:, 0] + span[0]
    return Masked(torch.full_like(place_P, member), place_P, place_P + offset, place_P + key)


def sample(runner: Runner, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
    """One response per request, equal on all ranks of a model replica (a collective call among them).

    Every response has `gen_length` tokens. Where `stop_at_eos` ends one early, the rest is EOS.
    """
    device = runner.groups.device.torch
    masks = [decoding.mask_id] * decoding.gen_length
    canvases = [Canvas(r, torch.tensor([*r.prompt, *masks], device=device)) for r in requests]
    active = list(canvases)
    block_count = decoding.gen_length // decoding.block_length
    counts = transfer_counts(decoding.block_length, decoding.steps // block_count)
    for block in range(block_count):
        if not active:
            break
        for turn, count in enumerate(counts):
            _denoise(active, block, turn, count, runner, decoding)
        if decoding.stop_at_eos:
            active = [canvas for canvas in active if not _ended(canvas, block, decoding)]
    return [canvas.rollout() for canvas in canvases]


def _ended(canvas: Canvas, block: int, decoding: Decoding) -> bool:
    """Whether the block ends in EOS; then what is still masked becomes EOS."""
    last = canvas.prompt_length + (block + 1) * decoding.block_length - 1
    if canvas.ids[last] != decoding.eos_id:
        return False
    canvas.ids[canvas.ids == decoding.mask_id] = decoding.eos_id
    return True


def _denoise(canvases: Sequence[Canvas], block: int, turn: int, count: int, runner: Runner, decoding: Decoding) -> None:
    """Propose a token at every masked position of each canvas's block; keep the best `count` of each."""
    lengths = [(canvas.prompt_length, decoding.gen_length) for canvas in canvases]
    rows, parts = [], []
    for packed in pack(lengths, runner.attention, runner.row_shape(decoding.row_tokens)):
        of_row = []
        for member, start in zip(packed.members, packed.starts, strict=True):
            canvas = canvases[member]
            begin = canvas.prompt_length + block * decoding.block_length
            span, key = (begin, begin + decoding.block_length), canvas.key(decoding, block, turn)
            of_row.append(masked_positions(canvas, member, span, start, key, decoding.mask_id))
        masked = Masked.join(of_row)
        ids_S = torch.cat([canvases[i].ids for i in packed.members])
        ids_S = F.pad(ids_S, (0, packed.layout.length - len(ids_S)), value=decoding.eos_id)
        head = SampleHead(masked.key_P, decoding.temperature, decoding.forbidden)
        rows.append(Row(ids_S, RowParams(layout=packed.layout), masked.position_P, head))
        parts.append(masked)
    masked = Masked.join(parts)
    keep_best(canvases, masked, share_samples(runner.forward(rows), len(masked.key_P), runner.groups), count, decoding)


def keep_best(canvases: Sequence[Canvas], masked: Masked, samples: Samples, count: int, decoding: Decoding) -> None:
    """Write the `count` best of the proposed tokens into each canvas."""
    score_P = POLICIES[decoding.remasking](samples, _one_uniform(masked.key_P))
    if decoding.eos == "last":
        score_P = score_P.masked_fill(samples.token_P == decoding.eos_id, -torch.inf)
    kept_P = select(score_P, masked.member_P, torch.full((len(canvases),), count, device=score_P.device))
    for member, canvas in enumerate(canvases):
        chosen_P = kept_P & (masked.member_P == member)
        canvas.ids[masked.place_P[chosen_P]] = samples.token_P[chosen_P]


def _one_uniform(key_P: Tensor) -> Tensor:
    """A uniform per position for random remasking, in a column that no vocabulary id uses."""
    return uniform_hash(key_P, torch.full((1,), -2, device=key_P.device))[:, 0]


def share_samples(outputs: list[Samples], count: int, groups: Groups) -> Samples:
    """The last stage's samples of all rows on every stage, `[P]` each."""
    if groups.is_last_stage:
        fields = [torch.cat([getattr(s, f.name) for s in outputs]).double() for f in dataclasses.fields(Samples)]
        stacked_4P = torch.stack(fields)  # ids are exact in float64
    else:
        stacked_4P = torch.empty(4, count, dtype=torch.float64, device=groups.device.torch)
    token_P, *statistics = groups.from_last_stage(stacked_4P)
    return Samples(token_P.long(), *statistics)
