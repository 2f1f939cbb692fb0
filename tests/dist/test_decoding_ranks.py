"""Cached decoding over ranks against a plain loop on one that runs the whole sequence at every step.

fp64 and sharp logits, so that no choice hangs on rounding.
"""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from megamem.convert.source import RandomSource
from megamem.convert.weights import load_weights
from megamem.layout.layout import CAUSAL, FULL, block, rows
from megamem.layout.trees import shared_prefix
from megamem.models.build import build_model
from megamem.models.gpt import LogitsHead
from megamem.models.row import Row, RowParams
from megamem.models.runner import Runner, StreamedPipeline
from megamem.models.spec import find_spec
from megamem.platform.groups import connect_stages
from megamem.platform.rng import derive_seed, uniform_hash
from megamem.rollout import sampler
from megamem.rollout.registry import sample
from megamem.rollout.remask import transfer_counts
from megamem.rollout.rollout import Request
from megamem.rollout.sampler import Decoding
from megamem.stream.layer import StreamOptions
from tests.dist.harness import Cases, Grid, Outcome, run_ranks
from tests.helpers import qwen_config

ONE = Grid()
GRIDS = [
    ONE,
    Grid(tensor=2),
    Grid(tensor=2, sequence=True),
    Grid(pipeline=2),
    Grid(data=2),
    Grid(tensor=2, pipeline=2, sequence=True),
]
STREAMED = Grid(pipeline=2)
SEED, STEP, EOS = 7, 3, 15
TINY = {"vocab_size": 23, "intermediate_size": 24, "initializer_range": 0.4, "eos_token_id": EOS}
MASKED = TINY | {"mask_token_id": 22}
CONFIGS = {
    "causal": qwen_config("qwen3", **TINY),
    "block": qwen_config("sdar", **MASKED),
    "prefix_lm": qwen_config("a2d-qwen3", **MASKED),
    "prefix_lm shifted": qwen_config("Dream", **MASKED),
}
# (model, temperature, steps of a response of 8 tokens, remasking, stop at EOS, slots of the cache)
DECODINGS = {
    "causal greedy": ("causal", 0.0, 4, "low_confidence", True, 1000),
    "causal sampled": ("causal", 1.0, 4, "low_confidence", True, 60),
    "causal sampled to the end": ("causal", 1.0, 4, "low_confidence", False, 60),
    "block greedy": ("block", 0.0, 4, "low_confidence", True, 1000),
    "block sampled": ("block", 1.0, 6, "low_confidence", True, 60),
    "block random": ("block", 1.0, 8, "random", False, 60),
    "block in one step": ("block", 1.0, 2, "entropy", True, 1000),
    "prefix_lm sampled": ("prefix_lm", 1.0, 6, "low_confidence", True, 60),
    "prefix_lm shifted": ("prefix_lm shifted", 1.0, 4, "entropy", True, 1000),
}
# Groups of two and three samples, among them one prompt that comes back, one of one token, one of whole blocks.
PROMPTS = [((9, 8, 7, 6, 4), 3), ((11,), 2), ((1, 2, 3, 4, 6, 7, 8, 9), 3), ((9, 8, 7, 6, 4), 2), ((12, 13, 14), 1)]
REQUESTS = [
    Request(f"problem {i}", sample, prompt) for i, (prompt, count) in enumerate(PROMPTS) for sample in range(count)
]
LENGTH = 8


# --- the plain loops ------------------------------------------------------------------------------------------------


def logits_of(runner, ids, layout):
    """Logits `[L, V]` of one sequence as a whole row; on one process."""
    return runner.forward([Row(torch.tensor(ids), RowParams(layout=layout), None, LogitsHead())])[0]


def choose(logits_LV, key_L, temperature, mask_id):
    """Token and its probability at every position."""
    score_LV = logits_LV.clone()
    if temperature:
        score_LV -= temperature * torch.log(-torch.log(uniform_hash(key_L, torch.arange(logits_LV.size(1)))))
    if mask_id is not None:
        score_LV[:, mask_id] = -torch.inf
    token_L = score_LV.argmax(-1)
    return token_L, logits_LV.softmax(-1)


def plain_causal(runner, request, d):
    ids = list(request.prompt)
    key = derive_seed(SEED, "sample", STEP, request.problem, request.sample)
    for _ in range(LENGTH):
        logits_1V = logits_of(runner, ids, rows([len(ids)], CAUSAL))[-1:]
        token_1, _ = choose(logits_1V, torch.tensor([len(ids)]) + key, d.temperature, None)
        ids.append(int(token_1))
        if d.stop_at_eos and ids[-1] == EOS:
            break
    response = ids[len(request.prompt) :]
    return tuple([*response, *[EOS] * LENGTH][:LENGTH])


def plain_block(runner, request, d):
    begin, size = len(request.prompt), d.block_length
    length = begin + LENGTH
    spans = [(start, min(start + size, length)) for start in range(begin // size * size, length, size)]
    return plain_denoise(runner, request, d, spans, lambda stop: rows([stop], block(size)), lambda block: EOS in block)


def plain_prefix_lm(runner, request, d):
    """A shifted model's last prompt token goes with the response, as in training."""
    begin, shifted = len(request.prompt), runner.model.shifted_logits
    layout = shared_prefix([(begin - shifted, [LENGTH + shifted])], FULL)
    spans = [(start, start + d.block_length) for start in range(begin, begin + LENGTH, d.block_length)]
    return plain_denoise(runner, request, d, spans, lambda stop: layout, lambda block: block[-1] == EOS)


def plain_denoise(runner, request, d, spans, layout_of, ends):
    mask_id, begin, shifted = d.mask_id, len(request.prompt), runner.model.shifted_logits
    canvas = [*request.prompt, *[mask_id] * LENGTH]
    counts = transfer_counts(d.block_length, d.steps * d.block_length // LENGTH)
    for number, (start, stop) in enumerate(spans):
        layout = layout_of(stop)
        for turn, count in enumerate(counts):
            masked = [i for i in range(start, stop) if canvas[i] == mask_id]
            if not masked:
                break
            key = derive_seed(SEED, "sample", STEP, request.problem, request.sample, number, turn)
            logits_LV = logits_of(runner, canvas[: layout.length], layout).roll(int(shifted), 0)
            key_L = torch.arange(layout.length) + key
            token_L, p_LV = choose(logits_LV, key_L, d.temperature, mask_id)
            worth = {
                "low_confidence": p_LV.gather(-1, token_L[:, None])[:, 0],
                "entropy": torch.special.xlogy(p_LV, p_LV).sum(-1),
                "random": uniform_hash(key_L, torch.tensor([-2]))[:, 0],
            }[d.remasking]
            for i in sorted(masked, key=lambda i: -float(worth[i]))[:count]:
                canvas[i] = int(token_L[i])
        if d.stop_at_eos and ends(canvas[max(start, begin) : stop]):
            canvas[stop:] = [EOS] * (len(canvas) - stop)
            break
    return tuple(canvas[begin:])


PLAIN = {
    "causal": plain_causal,
    "block": plain_block,
    "prefix_lm": plain_prefix_lm,
    "prefix_lm shifted": plain_prefix_lm,
}


# --- what runs on the processes -------------------------------------------------------------------------------------


def decodings(grid):
    """Every one on one process; where only the grid is new, one of each model."""
    return [name for name in DECODINGS if grid == ONE or "sampled" in name.split()[-1] or "shifted" in name]


def job(ranks):
    cases = Cases(ranks)
    for grid in GRIDS:
        found = {f"{name} {grid}": (decode, (name, grid.sequence)) for name in decodings(grid)}
        if grid == STREAMED:
            found |= {f"{name} {grid} streamed": (decode, (name, False, True)) for name in decodings(grid)}
        cases.run(grid, found)
    plain = {f"plain {name}": (decode_plainly, (name,)) for name in DECODINGS}
    plain["without a cache"] = (decode_without_cache, ("prefix_lm sampled",))
    cases.run(ONE, plain | {f"tokens {name}": (tokens_run, (name,)) for name in ("causal", "block")})
    return cases.results, cases.errors, cases.seconds


def build(groups, attention, sequence=False, streamed=False):
    config = CONFIGS[attention]
    spec = find_spec(config, "test")
    arch = spec.read_config(config)
    maps = spec.tensor_maps(arch)
    stream = StreamOptions(4, 100) if streamed else None
    model = build_model(arch, groups, torch.float64, sequence, stream=stream)
    load_weights(model, maps, arch, RandomSource(maps, arch, 1), groups)
    pipeline = StreamedPipeline(connect_stages(groups)) if streamed else None
    how = "prefix_lm" if attention.startswith("prefix_lm") else arch.sequence_attention
    return Runner(model, groups, how, pipeline), arch


def decoding(name, arch):
    _, temperature, steps, remasking, stop, slots = DECODINGS[name]
    return Decoding(
        LENGTH, 4, steps, temperature, remasking, "free", stop, slots, arch.eos_id, arch.mask_id, SEED, STEP
    )  # fmt: skip


def decode(groups, name, sequence, streamed=False):
    """Responses to all requests."""
    runner, arch = build(groups, DECODINGS[name][0], sequence, streamed)
    mine = REQUESTS[groups.dp.rank :: groups.dp.size]
    parts = [None] * groups.dp.size
    found = [list(rollout.response) for rollout in sample(runner, mine, decoding(name, arch))]
    dist.all_gather_object(parts, found, group=groups.dp.group)
    return [r for turn in itertools.zip_longest(*parts) for r in turn if r]


def decode_plainly(groups, name):
    attention = DECODINGS[name][0]
    runner, arch = build(groups, attention)
    return [list(PLAIN[attention](runner, request, decoding(name, arch))) for request in REQUESTS]


def decode_without_cache(groups, name):
    runner, arch = build(groups, DECODINGS[name][0])
    return [list(rollout.response) for rollout in sampler.sample(runner, REQUESTS, decoding(name, arch))]


@dataclasses.dataclass(frozen=True, eq=False)
class CountingRunner(Runner):
    """Notes how many tokens go forward."""

    tokens: list[int] = dataclasses.field(default_factory=list)

    def forward(self, rows):
        self.tokens.append(sum(len(row.ids_S) for row in rows))
        return super().forward(rows)


def tokens_run(groups, attention):
    """Tokens of every forward of a run of one group of three that no EOS ends."""
    runner, arch = build(groups, attention)
    counting = CountingRunner(runner.model, groups, runner.attention)
    d = dataclasses.replace(decoding(f"{attention} greedy", arch), stop_at_eos=False)
    sample(counting, [r for r in REQUESTS if r.problem == "problem 2"], d)
    return counting.tokens


# --- tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome():
    return Outcome(run_ranks(job, 4))


CASES = [(name, f"{name} {grid}") for grid in GRIDS for name in decodings(grid)]
CASES += [(name, f"{name} {STREAMED} streamed") for name in decodings(STREAMED)]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[case for _, case in CASES])
def test_cached_decoding_equals_the_plain_loop(outcome, name, case):
    assert outcome[case] == outcome[f"plain {name}"]


def test_prefix_lm_needs_no_cache(outcome):
    assert outcome["prefix_lm sampled " + str(ONE)] == outcome["without a cache"]


def test_the_cases_say_something(outcome):
    """Responses differ between samples, some end early, and some go on after an EOS where they may."""
    for name, (_, temperature, *_, stop, _) in DECODINGS.items():
        responses = outcome[f"plain {name}"]
        assert len({tuple(r) for r in responses}) >= (8 if temperature else 3), name
        if stop:
            assert 0 < sum(r[-3:] == [EOS] * 3 for r in responses) < len(responses), name
        else:
            assert any(EOS in r[:-1] and r[-1] != EOS for r in responses), name
        assert 22 not in itertools.chain(*responses) or name.startswith("causal"), name


def test_every_token_goes_forward_once(outcome):
    """Prompt of 8, three samples of 8. Causal: the prompt once but for its last token, which is each sample's own."""
    assert outcome["tokens causal"] == [7 + 3] + [3] * 7
    # Block-causal: the prompt with the first block; then that block, clean, with the second; two steps per block.
    assert outcome["tokens block"] == [8 + 3 * 4, 3 * 4, 3 * 8, 3 * 4]
