"""Steps with a gradient that is no number on one rank, steps that are asked to stop, and what ranks know of each
other's times.
"""

import tempfile
from pathlib import Path

import pytest
import torch

from megamem.errors import UserError
from megamem.train.interrupt import Interrupted, Interrupts
from megamem.train.step import train_step
from megamem.train.stragglers import RankTimes, gather_times, straggler_report
from tests.dist.harness import Cases, Grid, Outcome, build, run_ranks, tiny_config, tiny_model

GRIDS = (Grid(), Grid(tensor=2), Grid(pipeline=2), Grid(data=2))
POISONED = (1, 2)  # steps of four


def poisoned_run(groups, folder, grid):
    """Four steps; the last rank's gradient is poisoned in two of them, before it is reduced."""
    changes = (f"parallel.tensor={grid.tensor}", f"parallel.pipeline={grid.pipeline}", "train.max_skipped=2")
    run = build(tiny_config(folder / "model", folder / f"run{groups.world}", *changes), groups)
    finalize, step = run.model.config.finalize_model_grads_func, 0

    def poison(models, *args, **kwargs):
        if groups.world_rank == groups.world - 1 and step in POISONED:
            next(run.model.parameters()).main_grad.view(-1)[0] = torch.nan
        return finalize(models, *args, **kwargs)

    run.model.config.finalize_model_grads_func = poison
    found = []
    for step in range(4):
        before = [p.detach().clone() for p in run.model.parameters()]
        metrics = train_step(run, step)
        changed = any(not torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
        numbers = all(bool(torch.isfinite(p).all()) for p in run.model.parameters())
        found.append([metrics["skipped"], float("grad_norm" in metrics), float(run.skipped), changed, numbers])
    times = gather_times(run.phases.take_own(), groups)
    return [found, [list(t.seconds) for t in times], all(t.seconds["probe"] > 0 for t in times)]


def too_many(groups, folder):
    """Every step's gradient is poisoned, one may be skipped."""
    run = build(tiny_config(folder / "model", folder / "too_many", "train.max_skipped=1"), groups)
    finalize = run.model.config.finalize_model_grads_func

    def poison(models, *args, **kwargs):
        next(run.model.parameters()).main_grad.view(-1)[0] = torch.inf
        return finalize(models, *args, **kwargs)

    run.model.config.finalize_model_grads_func = poison
    train_step(run, 0)
    try:
        train_step(run, 1)
    except UserError as error:
        return str(error)


def stopped_run(groups, folder, grid):
    """A step of two optimizer steps, which the last rank is asked to give up: never, at its start, in the first
    optimizer step. Per request: whether it was given up, steps finished, whether the next look stops, weights.
    """
    parallel = (f"parallel.tensor={grid.tensor}", f"parallel.pipeline={grid.pipeline}")
    found = []
    for request in ("never", "start", "first update"):
        told = [request == "start" and groups.world_rank == groups.world - 1]
        interrupts = Interrupts(groups, lambda told=told: told[0])
        config = tiny_config(folder / "model", folder / f"{grid} {request}", "train.updates=2", *parallel)
        run = build(config, groups, interrupts=interrupts)
        before = [p.detach().clone() for p in run.model.parameters()]
        finalize = run.model.config.finalize_model_grads_func

        def ask(*args, told=told, request=request, finalize=finalize, **kwargs):
            finalize(*args, **kwargs)  # the last look before the optimizer step
            told[0] |= request == "first update" and groups.world_rank == groups.world - 1

        run.model.config.finalize_model_grads_func = ask
        given_up = raises(Interrupted, lambda run=run: train_step(run, 0))
        changed = [not torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True)]
        weights = [p.detach().clone() for p in run.model.parameters()]
        found.append((given_up, run.finished, raises(Interrupted, interrupts.agree), any(changed), weights))
    same = all(torch.equal(a, b) for a, b in zip(found[0][-1], found[2][-1], strict=True))
    everyone = [None] * groups.world
    torch.distributed.all_gather_object(everyone, [[row[:-1] for row in found], same])
    return everyone


def raises(kind, action):
    try:
        action()
    except kind:
        return True
    return False


def job(ranks, folder):
    cases = Cases(ranks)
    for grid in GRIDS:
        cases.run(grid, {str(grid): (poisoned_run, (Path(folder), grid))})
    for grid in (Grid(data=2), Grid(pipeline=2)):
        cases.run(grid, {f"stopped {grid}": (stopped_run, (Path(folder), grid))})
    cases.run(Grid(), {"too many": (too_many, (Path(folder),))})
    return cases.results, cases.errors, cases.seconds


@pytest.fixture(scope="module")
def outcome():
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(Path(folder) / "model")
        yield Outcome(run_ranks(job, 2, folder))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_step_without_a_finite_gradient_changes_nothing(outcome, grid):
    found, _, _ = outcome[str(grid)]
    #             skipped, has a norm, in a row, weights changed, weights are numbers
    fine, first, second = [0, 1, 0, True, True], [1, 0, 1, False, True], [1, 0, 2, False, True]
    assert found == [fine, first, second, fine]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_rank_tells_its_own_times(outcome, grid):
    _, phases, probed = outcome[str(grid)]
    assert phases == [["rollout", "update", "probe"]] * grid.world and probed


@pytest.mark.parametrize("grid", [Grid(data=2), Grid(pipeline=2)], ids=str)
def test_a_step_is_given_up_before_its_first_optimizer_step_and_finished_after(outcome, grid):
    #        given up, finished, the next look stops, weights changed
    never, start, late = (False, 1, False, True), (True, 0, True, False), (False, 1, True, True)
    assert outcome[f"stopped {grid}"] == [[[never, start, late], True]] * 2


def test_too_many_end_the_run(outcome):
    told = outcome["too many"]
    assert "step 2" in told and "2 times in a row; train.max_skipped = 1" in told


def test_the_slowest_rank_is_told():
    times = [RankTimes(f"n{rank // 2}", {"rollout": s, "probe": 0.5}) for rank, s in enumerate((1.0, 2.0, 6.0, 2.0))]
    assert straggler_report(times) == "rollout rank 2 (n1) 3.00 x of 2 s; probe rank 0 (n0) 1.00 x of 0.5 s"
