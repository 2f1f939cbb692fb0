"""The reshard matrix: a checkpoint saved at any layout and loaded at any other is the same run.

One process trains two steps. Every layout loads that checkpoint and saves it again, in the background, while all of its
weights and optimizer state are overwritten; then every layout loads what every other saved. What a layout holds is
read from its parameters and its optimizer's own record of who holds which part, gathered over data-parallel ranks here
and over the rest by the Hugging Face export: nothing of megatron-core's checkpoint code takes part.
"""

import dataclasses
import hashlib
import time

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megamem.cli.convert import export_checkpoint
from megamem.convert.source import CODES
from megamem.train.checkpoint import load_training, read_info, step_folder
from megamem.train.save import begin_checkpoint
from megamem.train.saver import Saver
from megamem.train.step import train_step
from tests.dist.harness import Cases, Grid, Outcome, build, exported, run_ranks, tiny_config, tiny_model
from tests.tol import assert_exact

ONE = Grid()
GRIDS = [ONE, Grid(tensor=2), Grid(pipeline=2), Grid(tensor=2, pipeline=2), Grid(data=2), Grid(tensor=2, data=2)]
KINDS = {"fp32": (), "bf16": ("model.dtype=bfloat16",)}
# In fp32 the weights are their own master copies. In bf16 there are others; two sources, sharded in every way, tell.
SOURCES = {"fp32": GRIDS, "bf16": [Grid(tensor=2, pipeline=2), Grid(tensor=2, data=2)]}
# Supervised: its loss is not about 0, and nothing is sampled. Short rows, so that both stages and ranks have some.
SETTINGS = ("objective.name=sft", "rollout.prompts=8", "train.row_tokens=40", "train.steps=4", "optimizer.lr=0.01")


# --- what runs on the processes -------------------------------------------------------------------------------------


def job(ranks, folder):
    cases = Cases(ranks)
    cases.run(ONE, {f"start {kind}": (train_and_save, (folder, kind)) for kind in KINDS})
    for grid in GRIDS:
        kinds = [kind for kind in KINDS if grid in SOURCES[kind]]
        cases.run(grid, {f"save {kind} {grid}": (save_again, (folder, kind, grid)) for kind in kinds})
    for grid in GRIDS:
        cases.run(grid, {f"load {kind} {grid}": (load_all, (folder, kind, grid)) for kind in KINDS})
    if ranks.rank == 0:
        for kind in KINDS:
            for name in ("start", *map(str, SOURCES[kind])):
                hf = folder / f"hf {kind} {name}"
                export_checkpoint(folder / f"{name} {kind}", hf, [], None)
                cases.results[f"export {kind} {name}"] = {
                    path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in hf.glob("*.safetensors")
                }
    return cases.results, cases.errors, cases.seconds


def new_run(groups, folder, kind, grid, name, *settings):
    layout = (f"parallel.tensor={grid.tensor}", f"parallel.pipeline={grid.pipeline}")
    run = build(
        tiny_config(folder / "model", folder / "runs" / name, *SETTINGS, *layout, *KINDS[kind], *settings), groups
    )
    # Prompts and noise of the run that is continued, whatever seed the weights had.
    run.prepared = dataclasses.replace(run.prepared, config=run.prepared.config.model_copy(update={"seed": 0}))
    return run


def whole_state(run):
    """Weights, fp32 master weights and Adam's moments by Hugging Face name, and the steps Adam has counted."""
    found = {f"weight {name}": tensor for name, tensor in exported(run).items()}
    parameters = list(run.model.parameters())
    weights = [p.data for p in parameters]
    for what in ("master", "exp_avg", "exp_avg_sq"):
        for parameter in parameters:
            parameter.data = gathered(run, parameter, what)
        found |= {f"{what} {name}": tensor for name, tensor in exported(run).items()}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    steps = {float(s["step"]) for part in run.optimizer.chained_optimizers for s in part.optimizer.state.values()}
    steps |= {float(group["step"]) for group in run.optimizer.param_groups if "step" in group}
    return found, sorted(steps)


def gathered(run, parameter, what):
    """This rank's parameter's state, from the data-parallel ranks that hold parts of it."""
    flat = torch.zeros(parameter.numel(), dtype=torch.float32)
    held = torch.zeros(parameter.numel())
    for part in run.optimizer.chained_optimizers:
        if parameter in part.model_param_group_index_map:
            group, order = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][order]
            here = part._get_model_param_range_map(parameter)["param"]
            flat[here.start : here.end] = main.detach() if what == "master" else part.optimizer.state[main][what]
            held[here.start : here.end] += 1
    if run.groups.dp.size > 1:
        dist.all_reduce(flat, group=run.groups.dp.group)
        dist.all_reduce(held, group=run.groups.dp.group)
    assert (held == 1).all(), "a part is held by none or by several"
    return flat.view(parameter.shape)


def overwrite(run):
    """Change every weight and all optimizer state in place, as training would."""
    for parameter in run.model.parameters():
        parameter.data.mul_(3).add_(1)
    for part in run.optimizer.chained_optimizers:
        for main, state in part.optimizer.state.items():
            main.data.add_(5)
            for value in state.values():
                value.add_(7)


def train_and_save(groups, folder, kind):
    run = new_run(groups, folder, kind, ONE, f"start {kind}")
    saver = Saver(run, {name: CODES[dtype] for name, dtype in run.prepared.weights.dtypes.items()})
    for step in range(2):
        train_step(run, step)
    saver.save({})
    step_folder(folder / "runs" / f"start {kind}", 2).rename(folder / f"start {kind}")
    state, steps = whole_state(run)
    return {"state": state, "steps": steps, "loss": train_step(run, 2)["loss"]}


def save_again(groups, folder, kind, grid):
    """Load what one process saved, save it here, and overwrite everything before a byte is written."""
    run = new_run(groups, folder, kind, grid, f"save {kind} {grid}", "seed=1")
    start, target, gate = folder / f"start {kind}", folder / f"{grid} {kind}", folder / f"gate {kind} {grid}"
    load_training(start, run.model, run.optimizer)
    write = FileSystemWriterAsync.write_preloaded_data

    def write_once_allowed(*args, **kwargs):
        while not gate.exists():
            time.sleep(0.01)
        write(*args, **kwargs)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write_once_allowed)
    try:
        hf = run.prepared.model.hf
        writing = begin_checkpoint(target, read_info(start), run.model, groups, hf, run.optimizer)
        early = writing.advance(wait=False)
        overwrite(run)
        groups.barrier()
        if groups.is_main:
            gate.touch()
        late = writing.advance(wait=True)
    finally:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
    return {"early": early, "late": late}


def load_all(groups, folder, kind, grid):
    """Load what every layout saved, one after the other into the same run; a step after each."""
    run = new_run(groups, folder, kind, grid, f"load {kind} {grid}", "seed=1")
    found = {}
    for source in SOURCES[kind]:
        load_training(folder / f"{source} {kind}", run.model, run.optimizer)
        state, steps = whole_state(run)
        found[str(source)] = {"state": state, "steps": steps, "loss": train_step(run, 2)["loss"]}
    return found


# --- what must hold -------------------------------------------------------------------------------------------------

ALL = [(kind, source, target) for kind in KINDS for source in SOURCES[kind] for target in GRIDS]
SAVED = [(kind, source) for kind in KINDS for source in SOURCES[kind]]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reshard")
    tiny_model(folder / "model")
    return Outcome(run_ranks(job, 4, folder))


@pytest.mark.parametrize("kind, source, target", ALL, ids=[f"{k} {s} -> {t}" for k, s, t in ALL])
def test_weights_and_optimizer_are_bit_equal(outcome, kind, source, target):
    start, found = outcome[f"start {kind}"], outcome[f"load {kind} {target}"][str(source)]
    assert found["steps"] == start["steps"] == [2.0]
    assert found["state"].keys() == start["state"].keys()
    for name, expected in start["state"].items():
        assert_exact(found["state"][name], expected, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", GRIDS, ids=str)
def test_the_next_loss_is_bit_equal_wherever_it_was_saved(outcome, kind, target):
    # The same sums in the same order: only the layout that computes decides about rounding.
    losses = {found["loss"] for found in outcome[f"load {kind} {target}"].values()}
    if target == ONE:
        losses.add(outcome[f"start {kind}"]["loss"])
    assert len(losses) == 1


@pytest.mark.parametrize("kind, bound", [("fp32", 1e-6), ("bf16", 2**-8)])
@pytest.mark.parametrize("target", GRIDS, ids=str)
def test_the_next_loss_is_that_of_the_run_that_goes_on(outcome, kind, bound, target):
    # fp32: 24 bits, about a hundred roundings in a row; bf16: one unit of its last place. Sums in another order.
    loss = outcome[f"load {kind} {target}"][str(SOURCES[kind][0])]["loss"]
    assert loss == pytest.approx(outcome[f"start {kind}"]["loss"], rel=bound)


@pytest.mark.parametrize("kind, grid", SAVED, ids=[f"{k} {g}" for k, g in SAVED])
def test_a_background_save_holds_what_training_had_at_the_call(outcome, kind, grid):
    # The contents are compared above: everything was overwritten between these two.
    assert outcome[f"save {kind} {grid}"] == {"early": False, "late": True}


@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_and_moments_differ_from_weights(outcome, kind):
    state = outcome[f"start {kind}"]["state"]
    for name in (n.removeprefix("weight ") for n in state if n.startswith("weight ")):
        assert all(state[f"{moment} {name}"].abs().max() > 0 for moment in ("exp_avg", "exp_avg_sq")), name
        rounded = kind == "bf16"
        assert torch.equal(state[f"master {name}"], state[f"weight {name}"].float()) != rounded, name


@pytest.mark.parametrize("kind, grid", SAVED, ids=[f"{k} {g}" for k, g in SAVED])
def test_export_writes_the_same_bytes(outcome, kind, grid):
    exports = outcome[f"export {kind} {grid}"]
    assert exports and exports == outcome[f"export {kind} start"]
