"""The streamed pipeline over real stages: gradients against a plain model, and time against the simulator.

One start of four processes.
"""

import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megamem.config.architecture import Architecture
from megamem.config.schema import ParallelConfig
from megamem.convert.weights import stage_parameters
from megamem.layout.layout import CAUSAL, block, prefix_lm, rows
from megamem.layout.packing import RowShape
from megamem.models.build import build_model
from megamem.models.row import RowParams
from megamem.models.runner import Runner, StreamedPipeline
from megamem.platform.groups import connect_stages
from megamem.stream.layer import StreamOptions
from megamem.stream.pipeline import run_stage
from megamem.stream.schedule import choose_slack, stage_order
from megamem.stream.simulate import Transfer, chunk_costs, simulate
from megamem.train.draws import DrawnModel, DrawRows
from megamem.train.optim import wrap_for_training
from tests.dist.harness import Cases, Grid, Outcome, run_ranks
from tests.dist.test_stream_ranks import assert_no_difference, differences, make_row, objective
from tests.helpers import fill_by_name
from tests.unit.test_shared_prefix import draw_loss, samples

GRIDS = [
    Grid(pipeline=2),
    Grid(pipeline=4),
    Grid(tensor=2, pipeline=2, sequence=True),
    Grid(tensor=2, pipeline=2),
    Grid(pipeline=2, data=2),
]
ARCH = Architecture(
    layers=4, hidden=24, ffn=20, heads=4, kv_heads=2, head_dim=6, vocab_rows=61, max_positions=64,
    mask_id=60, eos_id=1, pad_id=1, qk_norm=True, qkv_bias=True, tied_head=True, positions="learned",
)  # fmt: skip
# Units per micro-batch with chunks of 4: 7, 1, 7 (blocks of 4 end where chunks do), 3, 1: ragged, and a short row.
LAYOUTS = [
    rows([17, 9], CAUSAL),
    rows([7, 1, 13, 2]),
    rows([20, 8], block(4)),
    prefix_lm([(15, 5), (3, 1)], CAUSAL),
    rows([2]),
]
SHARED_GRIDS = [Grid(pipeline=2), Grid(tensor=2, pipeline=2, sequence=True)]
SHARED = [("causal", "row"), ("causal", "handle"), ("block:4", "handle"), ("prefix_lm", "handle")]
COUNTS = {"m = 5": 5, "m = 2": 2, "m = 1": 1}
SETTINGS = {
    "stage": (StreamOptions(4, 3), "stage", None, False),
    "stage, one pass, slack 1": (StreamOptions(4, 100, "input+attention"), "stage", 1, True),
    "layer": (StreamOptions(4, 3, offload="cpu"), "layer", None, False),
    "stage, slack 5": (StreamOptions(8, 3, offload="cpu"), "stage", 5, True),
}
UNITS = 8  # of every sleeping micro-batch
SLEEPS = {  # micro-batches, attention
    "causal": (4, "causal"),
    "one micro-batch": (1, "causal"),
    "bidirectional": (6, "full"),
}
LAYER = 0.16  # seconds of a row's forward on a stage: long beside a thread's wake-up


def job(ranks):
    cases = Cases(ranks)
    for grid in GRIDS:
        cases.run(grid, {f"{name} {grid}": case for name, case in cases_of(grid)})
    return cases.results, cases.errors, cases.seconds


def cases_of(grid):
    for setting in SETTINGS:
        # Four processes on two cores take turns at every tensor-parallel collective: ragged rows are enough there.
        for count in COUNTS if grid.tensor * grid.data == 1 else ["m = 5"]:
            yield f"{setting}, {count}", (against_plain, (setting, COUNTS[count], grid.sequence, False))
    if grid.data > 1:
        yield "overlap", (against_plain, ("stage", 5, grid.sequence, True))
    if grid in SHARED_GRIDS:
        for attention, share in SHARED:
            yield f"{attention} {share}", (shared_against_repeated, (attention, share, grid.sequence))
    if grid.pipeline == 4:
        for name in SLEEPS:
            yield f"sleep {name}", (sleep_as_compute, SLEEPS[name])


def against_plain(groups, setting, count, sequence, overlap):
    """Two steps of the streamed schedule, log-probs of a forward-only pass, and a plain model on stock 1F1B."""
    options, window, slack, linear = SETTINGS[setting]
    multiple = groups.tp.size if sequence else 1
    layouts = [layout.filled(-(-layout.length // multiple) * multiple) for layout in LAYOUTS[:count]]
    seed = 100 * groups.dp.rank
    several = [make_row(layout, seed + i) for i, layout in enumerate(layouts)]
    model = build_model(ARCH, groups, torch.float64, sequence, stream=options)
    fill_by_name(stage_parameters(model), groups.tp.rank)
    pipeline = StreamedPipeline(connect_stages(groups), window, slack)
    ddp = wrap_for_training(model, ParallelConfig(overlap_grad_reduce=overlap))
    runner = Runner(ddp, groups, "full", pipeline)
    for _ in range(2):
        runner.model.zero_grad_buffer()
        reports = runner.forward_backward(
            several, lambda row, logp: (objective(logp), {"logp": logp.detach().clone()}), linear
        )
    found = {n: p.main_grad for n, p in stage_parameters(model).items()}
    found |= log_probs(groups, [r["logp"] for r in reports], runner.forward(several))
    return differences(groups, found, plain(groups, several, sequence))


def shared_against_repeated(groups, attention, share, sequence):
    """Draws that share their prompt on the streamed schedule against unshared ones through plain layers.

    Both are compared with one rank's numbers elsewhere (`tests/unit/test_shared_prefix.py`); here grids differ.
    """
    multiple = groups.tp.size if sequence else 1
    shifted = attention == "causal"

    def run(share, options, pipeline, equal):
        model = build_model(
            ARCH.model_copy(update={"shifted_logits": shifted}), groups, torch.float64, sequence, stream=options
        )
        fill_by_name(stage_parameters(model), groups.tp.rank)
        runner = Runner(wrap_for_training(model, ParallelConfig()), groups, "full", pipeline)
        drawn = DrawnModel(attention, shifted, None if shifted else 60, share)
        rows = DrawRows(samples(attention), drawn, RowShape(40, multiple, equal), groups.device.torch)
        runner.model.zero_grad_buffer()
        runner.forward_backward(rows, draw_loss, linear=share == "handle")
        return {n: p.main_grad for n, p in stage_parameters(model).items()}

    pipeline = StreamedPipeline(connect_stages(groups), "stage")
    found = run(share, StreamOptions(4, 3), pipeline, equal=False)
    return differences(groups, found, run("none", None, None, equal=groups.pp.size > 1))


def plain(groups, several, sequence):
    """Megatron-core's own schedule over plain layers, rows filled to the one shape it exchanges."""
    length = max(row.params.layout.length for row in several)
    filled = [
        replace(
            row,
            ids_S=F.pad(row.ids_S, (0, length - len(row.ids_S))),
            params=RowParams(layout=row.params.layout.filled(length)),
        )
        for row in several
    ]
    model = build_model(ARCH, groups, torch.float64, sequence)
    fill_by_name(stage_parameters(model), groups.tp.rank)
    runner = Runner(wrap_for_training(model, ParallelConfig()), groups, "full")
    runner.model.zero_grad_buffer()
    reports = runner.forward_backward(filled, lambda row, logp: (objective(logp), {"logp": logp.detach()}))
    found = {n: p.main_grad for n, p in stage_parameters(model).items()}
    return found | log_probs(groups, [r["logp"] for r in reports], runner.forward(filled))


def log_probs(groups, with_gradient, without):
    if not groups.is_last_stage:
        return {}
    return {"log-probs": torch.cat(with_gradient), "log-probs without gradient": torch.cat(without)}


class Sleeper:
    """A stage whose compute is sleep; checks that the unit it gets is the one it expects."""

    def __init__(self, costs, rank):
        self._costs, self._rank = costs, rank

    def shape(self, microbatch, unit):
        return (3,)

    def forward(self, microbatch, unit, x):
        return self._run(microbatch, unit, x, self._rank, self._costs[microbatch][unit].forward)

    def backward(self, microbatch, unit, dy):
        return self._run(microbatch, unit, dy, -self._rank, self._costs[microbatch][unit].backward)

    def _run(self, microbatch, unit, given, sign, seconds):
        if given is not None:
            assert given[:2].tolist() == [microbatch, unit], (given, microbatch, unit)
        time.sleep(seconds)
        return torch.tensor([microbatch, unit, sign], dtype=torch.float64)


def sleep_as_compute(groups, count, attention):
    """Measured and simulated makespan of the same program."""
    units = chunk_costs(attention, UNITS, 0.3)
    costs = [[type(u)(LAYER * u.forward, LAYER * u.backward, u.length) for u in units] for _ in range(count)]
    counts = [len(units)] * count
    slack = choose_slack(counts, [u.forward for row in costs for u in row])
    links = connect_stages(groups)
    program = stage_order(counts, groups.pp.rank, groups.pp.size, slack)
    groups.barrier()
    started = time.time()
    run_stage(program, Sleeper(costs, groups.pp.rank), links, slack, torch.float64, groups.device.torch)
    groups.barrier()
    return time.time() - started, simulate(costs, [1.0] * groups.pp.size, slack, Transfer()).step_time


@pytest.fixture(scope="module")
def outcome():
    return Outcome(run_ranks(job, 4))


CASES = [(name, grid) for grid in GRIDS for name, (function, _) in cases_of(grid) if function is against_plain]


@pytest.mark.parametrize(("name", "grid"), CASES, ids=str)
def test_gradients_are_those_of_plain_layers_on_the_stock_schedule(outcome, name, grid):
    found = outcome[f"{name} {grid}"]
    assert "log-probs" in found and {n.split(".")[2] for n in found if "layers." in n} == set("0123")
    assert_no_difference(found)


@pytest.mark.parametrize("grid", SHARED_GRIDS, ids=str)
@pytest.mark.parametrize(("attention", "share"), SHARED)
def test_shared_prompts(outcome, attention, share, grid):
    assert_no_difference(outcome[f"{attention} {share} {grid}"])


@pytest.mark.parametrize("name", SLEEPS)
def test_time_is_the_simulated_one(outcome, name):
    """Within 10 % (the bar): sleeping threads wake late, messages take time; the simulator knows neither."""
    measured, simulated = outcome[f"sleep {name} {Grid(pipeline=4)}"]
    assert 1 <= measured / simulated <= 1.1
