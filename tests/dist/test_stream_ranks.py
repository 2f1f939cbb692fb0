"""Streamed against plain over ranks: tensor, sequence, pipeline and data parallelism, and every objective.

One start of four processes. Gradients are fp64; `test_equivalence.py` has already compared plain with plain.
"""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig

from megamem.config.architecture import Architecture
from megamem.config.schema import ParallelConfig
from megamem.convert.weights import stage_parameters
from megamem.layout.layout import CAUSAL, block, prefix_lm, rows
from megamem.models.build import build_model
from megamem.models.gpt import LogProbHead
from megamem.models.row import Row, RowParams
from megamem.models.runner import Runner
from megamem.stream.layer import StreamOptions
from megamem.train import optim
from megamem.train.step import learn_from_rollouts, make_updates, train_step
from megamem.train.update import backward
from tests.dist.harness import (
    Cases,
    Grid,
    Outcome,
    PlainAdam,
    build,
    exported,
    run_ranks,
    tiny_config,
    tiny_model,
)
from tests.dist.test_equivalence import OBJECTIVES, first_weights, gradients, parallel
from tests.helpers import fill_by_name
from tests.tol import ALGEBRA, assert_algebra, assert_floor

ONE = Grid()
GRIDS = [
    Grid(tensor=2),
    Grid(tensor=2, sequence=True),
    Grid(tensor=4, sequence=True),
    Grid(pipeline=2),
    Grid(tensor=2, pipeline=2, sequence=True),
    Grid(data=2),
]
STREAM = ("stream.layers=true", "stream.chunk_tokens=48", "stream.head_tokens=16", "stream.save=input+attention")
# Four processes on two cores take turns at every collective: one objective is enough where only their number is new.
OBJECTIVE_CASES = [(name, grid) for grid in [ONE, *GRIDS] for name in OBJECTIVES if grid.tensor < 4 or name == "bgpo"]
SCHEDULE_CASES = [(name, grid) for name, grid in OBJECTIVE_CASES if grid == Grid(pipeline=2)]
STEPS = 2
# So large that Adam is smooth: with a tiny eps its first steps are signs, and one gradient near zero decides an rms.
SMOOTH = "optimizer.eps=1e-2"
FOR_TRAINING = [Grid(data=2), Grid(tensor=2, sequence=True)]

# 61 vocabulary rows are padded to 128: two of four shards hold padding only.
_SIZES = dict(layers=2, hidden=24, ffn=20, heads=8, kv_heads=4, head_dim=6, vocab_rows=61, max_positions=64)
_TOKENS = dict(mask_id=60, eos_id=1, pad_id=1)
# An architecture with RoPE, one with everything else, and how each is streamed.
ARCHITECTURES = {
    "gqa": (Architecture(**_SIZES, **_TOKENS), StreamOptions(8, 3)),
    "norm, bias, tied, learned": (
        Architecture(**_SIZES, **_TOKENS, qk_norm=True, qkv_bias=True, tied_head=True, positions="learned"),
        StreamOptions(12, 100, "input+attention", "cpu"),
    ),
}
LAYOUTS = [
    rows([7, 1, 13, 2]),
    rows([17, 9], CAUSAL),
    rows([19, 7], block(4)),
    prefix_lm([(3, 8), (9, 5)], CAUSAL),
]
# Tokens of each row of each data-parallel rank, step by step: one to seven chunks. Rows of one or two tokens take the
# plain path, but with overlap: then the last rows of both ranks must hand out gradients in one order.
UNEVEN = [([26, 2], [5, 9, 2]), ([4], [21, 1]), ([2, 26], [27])]


# --- what runs on the processes -------------------------------------------------------------------------------------


def job(ranks, folder):
    cases = Cases(ranks)
    record = [f"rollout.record={folder}/rollouts"]
    first = {
        "first weights": (first_weights, (folder / "untied", folder / "first")),
        "record": (train, (folder / "untied", folder / "record", record)),
    }
    cases.run(ONE, first)
    for grid in [ONE, *GRIDS]:
        cases.run(grid, {f"{name} {grid}": case for name, case in cases_of(grid, folder)})
    return cases.results, cases.errors, cases.seconds


def cases_of(grid, folder):
    untied, out = folder / "untied", folder / "runs" / str(grid)
    settings = [f"rollout.replay={folder}/rollouts", *parallel(grid)]
    for name, changes in OBJECTIVES.items():
        if (name, grid) not in OBJECTIVE_CASES:
            continue
        yield name, (gradients, (untied, out / name, [*settings, *changes, *STREAM]))
        if (name, grid) in SCHEDULE_CASES:
            streamed = [*settings, *changes, *STREAM, "pipeline.schedule=streamed", "pipeline.trace=true"]
            yield f"{name}, streamed schedule", (gradients, (untied, out / f"{name}, streamed", streamed))
        if grid == ONE:
            yield f"plain {name}", (gradients, (untied, out / f"plain {name}", [*settings, *changes]))
    for name in ARCHITECTURES:
        yield f"rows of {name}", (rows_against_plain, (name, grid.sequence))
    if grid.data > 1:
        for overlap in (False, True):
            yield f"uneven, overlap {overlap}", (uneven_rows_against_plain, (overlap,))
    if grid in FOR_TRAINING:
        yield "train", (train, (untied, out / "train", [*settings, *STREAM]))
        yield "plain train", (train, (untied, out / "plain train", settings))
    if grid == ONE:
        yield "train in fp64", (train_in_fp64, (untied, out / "fp64", settings))


def train(groups, model, out, settings):
    """Parameters after two steps of fp32, with megatron-core's distributed optimizer."""
    run = build(tiny_config(model, out, f"train.steps={STEPS}", SMOOTH, *settings), groups)
    assert run.prepared.config.parallel.distributed_optimizer
    for step in range(STEPS):
        train_step(run, step)
    return exported(run)


def train_in_fp64(groups, model, out, settings):
    config = tiny_config(model, out, "model.dtype=float64", f"train.steps={STEPS}", SMOOTH, *settings)
    run = build(config, groups)
    adam = PlainAdam(run)
    for step in range(STEPS):
        (update,) = make_updates(run, learn_from_rollouts(run, step), step)
        run.trainer.model.zero_grad_buffer()
        backward(run.trainer, update, run.prepared.objective, length_norm=False)
        adam.step()
    return exported(run)


def make_row(layout, seed):
    """Every third token is scored, so ranks and chunks hold different numbers of them."""
    key, position_T = torch.Generator().manual_seed(seed), torch.arange(0, layout.length, 3)
    ids_S = torch.randint(0, 61, (layout.length,), generator=key)
    target_T = torch.randint(0, 61, (len(position_T),), generator=key)
    return Row(ids_S, RowParams(layout=layout), position_T, LogProbHead(target_T))


def objective(logp_T):
    """A sum of log-probs, each with a coefficient of its own."""
    return (logp_T * torch.arange(1, len(logp_T) + 1).cos()).sum()


def differences(groups, found, expected):
    """Largest difference by name relative to the largest entry, over all ranks."""
    assert found.keys() == expected.keys()
    mine = {}
    for name, value in expected.items():
        scale = value.abs().max().item()
        mine[name] = (found[name] - value).abs().max().item() / (scale or 1.0)
    every = [None] * groups.world
    dist.all_gather_object(every, mine)
    return {name: max(part.get(name, 0.0) for part in every) for name in {n for part in every for n in part}}


def rows_against_plain(groups, name, sequence):
    """Log-probs and every rank's gradients of all layouts in one step, streamed against plain."""
    arch, options = ARCHITECTURES[name]
    multiple = groups.tp.size if sequence else 1
    lengths = [-(-layout.length // multiple) * multiple for layout in LAYOUTS]
    if groups.pp.size > 1:  # stock schedules exchange one shape
        lengths = [max(lengths)] * len(lengths)
    several = [make_row(x.filled(n), i) for i, (x, n) in enumerate(zip(LAYOUTS, lengths, strict=True))]

    def run(stream):
        model = build_model(arch, groups, torch.float64, sequence, stream=stream)
        fill_by_name(stage_parameters(model), groups.tp.rank)
        runner = Runner(optim.wrap_for_training(model, ParallelConfig()), groups, "full")
        runner.model.zero_grad_buffer()
        reports = runner.forward_backward(several, lambda row, logp_T: (objective(logp_T), {"logp": logp_T.detach()}))
        without_gradient = runner.forward(several)
        found = {n: p.main_grad for n, p in stage_parameters(model).items()}
        if groups.is_last_stage:
            found["log-probs"] = torch.cat([r["logp"] for r in reports])
            found["log-probs without gradient"] = torch.cat(without_gradient)
        return found

    return differences(groups, run(options), run(None))


def uneven_rows_against_plain(groups, overlap):
    """Both ranks' rows through one plain model and torch's autograd, against the reduced buffers, step by step.

    Small buckets, so that with overlap they leave one after the other while the backward still runs.
    """
    arch, found = ARCHITECTURES["norm, bias, tied, learned"][0], {}
    small = functools.partial(DistributedDataParallelConfig, bucket_size=600)
    model = build_model(arch, groups, torch.float64, stream=StreamOptions(4, 3))
    fill_by_name(stage_parameters(model))
    with mock.patch.object(optim, "DistributedDataParallelConfig", small):
        runner = Runner(optim.wrap_for_training(model, ParallelConfig(overlap_grad_reduce=overlap)), groups, "full")
    assert not overlap or len(runner.model.bucket_groups) > 3
    for step, lengths in enumerate(UNEVEN):
        several = [[make_row(rows([n]), 10 * step + n + r) for n in part] for r, part in enumerate(lengths)]
        runner.model.zero_grad_buffer()
        runner.forward_backward(several[groups.dp.rank], lambda row, logp_T: (objective(logp_T), {}))
        plain_path = [row.params.grid is None for row in several[groups.dp.rank]]
        assert plain_path == [n < 3 and not overlap for n in lengths[groups.dp.rank]]
        plain = build_model(arch, groups, torch.float64)
        fill_by_name(stage_parameters(plain))
        for row in several[0] + several[1]:
            objective(plain(row.ids_S[None], row.params, row.position_T, row.head)).backward()
        reduced = {n: p.main_grad for n, p in stage_parameters(model).items()}
        expected = {n: p.grad for n, p in stage_parameters(plain).items()}
        found |= {f"step {step}: {n}": x for n, x in differences(groups, reduced, expected).items()}
    return found


# --- what must hold -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    tiny_model(folder / "untied", n_heads=8, n_kv_heads=4)
    return Outcome(run_ranks(job, 4, folder))


def assert_gradient(found, plain):
    assert found["gradient"].keys() == plain["gradient"].keys()
    for what, expected in plain["gradient"].items():
        assert expected.abs().max() > 0, what
        assert_algebra(found["gradient"][what], expected, what)


@pytest.mark.parametrize(("name", "grid"), OBJECTIVE_CASES, ids=str)
def test_gradient_of_every_objective(outcome, name, grid):
    assert_gradient(outcome[f"{name} {grid}"], outcome[f"plain {name} {ONE}"])


@pytest.mark.parametrize(("name", "grid"), SCHEDULE_CASES, ids=str)
def test_gradient_under_the_streamed_schedule(outcome, name, grid):
    assert_gradient(outcome[f"{name}, streamed schedule {grid}"], outcome[f"plain {name} {ONE}"])


@pytest.mark.parametrize("name", ["bgpo", "vrpo_ol", "diffu_grpo"])
def test_off_policy_cases_are_off_policy(outcome, name):
    assert abs(outcome[f"{name} {ONE}"]["ratio"]) > 1e-2


def assert_no_difference(found):
    assert max(found.values()) <= ALGEBRA, {name: x for name, x in found.items() if x > ALGEBRA}


@pytest.mark.parametrize("grid", [ONE, *GRIDS], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_of_every_layout(outcome, name, grid):
    found = outcome[f"rows of {name} {grid}"]
    layers = {n.split(".")[2] for n in found if n.startswith("decoder.layers.")}
    assert layers == {"0", "1"} and "log-probs" in found, "something was not compared"
    assert_no_difference(found)


@pytest.mark.parametrize("overlap", [False, True])
def test_data_parallel_ranks_with_different_chunks(outcome, overlap):
    assert_no_difference(outcome[f"uneven, overlap {overlap} {Grid(data=2)}"])


@pytest.mark.parametrize("grid", FOR_TRAINING, ids=str)
def test_training_with_the_distributed_optimizer(outcome, grid):
    truth = outcome[f"train in fp64 {ONE}"]
    found, trusted = outcome[f"train {grid}"], outcome[f"plain train {grid}"]
    for name, value in truth.items():
        assert (value - outcome["first weights"][name]).abs().max() > 1e-4, f"{name} has not moved"
        assert_floor(found[name], trusted[name], value, name)
