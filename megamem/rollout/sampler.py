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
    """How to decode. Fields are those of `config.schema.RolloutConfig`, the model's `eos_id` and `mask_id`, and the key
    (seed, step) of the sampling noise."""

    gen_length: int
    block_length: int
    steps: int
    temperature: float
    remasking: str
    eos: str
    stop_at_eos: bool
    row_tokens: int
    eos_id: int
    mask_id: int
    seed: int
    step: int


@dataclass(eq=False)
class _Sequence:
    """A prompt and its response so far; `ids` is filled in place."""

    request: Request
    ids: Tensor

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    def key(self, decoding: Decoding, *turn: int) -> int:
        return derive_seed(decoding.seed, "sample", decoding.step, self.request.problem, self.request.sample, *turn)


def sample(runner: Runner, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
    """One response per request, equal on all ranks of a model replica (a collective call among them).

    Every response has `gen_length` tokens. Where `stop_at_eos` ends one early, the rest is EOS.
    """
    device = runner.groups.device.torch
    masks = [decoding.mask_id] * decoding.gen_length
    sequences = [_Sequence(r, torch.tensor([*r.prompt, *masks], device=device)) for r in requests]
    active = list(sequences)
    block_count = decoding.gen_length // decoding.block_length
    counts = transfer_counts(decoding.block_length, decoding.steps // block_count)
    for block in range(block_count):
        if not active:
            break
        for turn, count in enumerate(counts):
            _denoise(active, block, turn, count, runner, decoding)
        if decoding.stop_at_eos:
            active = [s for s in active if not _ended(s, block, decoding)]
    return [
        Rollout(s.request.problem, s.request.sample, s.request.prompt, tuple(s.ids[s.prompt_length :].tolist()))
        for s in sequences
    ]


def _ended(sequence: _Sequence, block: int, decoding: Decoding) -> bool:
    """Whether the block ends in EOS; then what is still masked becomes EOS."""
    last = sequence.prompt_length + (block + 1) * decoding.block_length - 1
    if sequence.ids[last] != decoding.eos_id:
        return False
    sequence.ids[sequence.ids == decoding.mask_id] = decoding.eos_id
    return True


def _denoise(
    sequences: Sequence[_Sequence], block: int, turn: int, count: int, runner: Runner, decoding: Decoding
) -> None:
    """Propose a token at every masked position of each sequence's block; keep the best `count` of each."""
    lengths = [(s.prompt_length, decoding.gen_length) for s in sequences]
    packed_rows = pack(lengths, runner.attention, runner.row_shape(decoding.row_tokens))
    forbidden = (decoding.mask_id, decoding.eos_id) if decoding.eos == "forbidden" else (decoding.mask_id,)
    rows, member_parts, place_parts = [], [], []
    for packed in packed_rows:
        positions, keys, members, places = [], [], [], []
        for member, start in zip(packed.members, packed.starts, strict=True):
            sequence = sequences[member]
            begin = sequence.prompt_length + block * decoding.block_length
            masked = sequence.ids[begin : begin + decoding.block_length] == decoding.mask_id
            place = masked.nonzero()[:, 0] + begin
            positions.append(place + start)
            keys.append(place + sequence.key(decoding, block, turn))
            members.append(torch.full_like(place, member))
            places.append(place)
        ids_S = torch.cat([sequences[i].ids for i in packed.members])
        ids_S = F.pad(ids_S, (0, packed.layout.length - len(ids_S)), value=decoding.eos_id)
        head = SampleHead(torch.cat(keys), decoding.temperature, forbidden)
        rows.append(Row(ids_S, RowParams(layout=packed.layout), torch.cat(positions), head))
        member_parts.append(torch.cat(members))
        place_parts.append(torch.cat(places))
    key_P = torch.cat([row.head.key_T for row in rows])
    samples = _share(runner.forward(rows), len(key_P), runner.groups)
    score_P = POLICIES[decoding.remasking](samples, _one_uniform(key_P))
    if decoding.eos == "last":
        score_P = score_P.masked_fill(samples.token_P == decoding.eos_id, -torch.inf)
    member_P, place_P = torch.cat(member_parts), torch.cat(place_parts)
    kept_P = select(score_P, member_P, torch.full((len(sequences),), count, device=score_P.device))
    for member, sequence in enumerate(sequences):
        chosen_P = kept_P & (member_P == member)
        sequence.ids[place_P[chosen_P]] = samples.token_P[chosen_P]


def _one_uniform(key_P: Tensor) -> Tensor:
    """A uniform per position for random remasking, in a column that no vocabulary id uses."""
    return uniform_hash(key_P, torch.full((1,), -2, device=key_P.device))[:, 0]


def _share(outputs: list[Samples], count: int, groups: Groups) -> Samples:
    """The last stage's samples of all rows on every stage, `[P]` each."""
    if groups.is_last_stage:
        fields = [torch.cat([getattr(s, f.name) for s in outputs]).double() for f in dataclasses.fields(Samples)]
        stacked_4P = torch.stack(fields)  # ids are exact in float64
    else:
        stacked_4P = torch.empty(4, count, dtype=torch.float64, device=groups.device.torch)
    token_P, *statistics = groups.from_last_stage(stacked_4P)
    return Samples(token_P.long(), *statistics)
