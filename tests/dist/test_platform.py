"""megatron-core on CPU and gloo: every parallel feature megamem uses, on 1, 2 and 4 processes, in fp32 and bf16."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from megamem.train.checkpoint import CheckpointInfo, load_training
from megamem.train.save import begin_checkpoint
from megamem.train.step import learn_from_answers, make_updates, train_step
from megamem.train.update import backward
from tests.dist.harness import (
    Cases,
    Grid,
    Outcome,
    PlainAdam,
    build,
    exported,
    relative,
    run_ranks,
    tiny_config,
    tiny_model,
)
from tests.tol import FLOOR, assert_exact, assert_floor

ONE = Grid()
GRIDS = [
    Grid(tensor=4, sequence=True),
    Grid(tensor=2, pipeline=2, sequence=True),
    Grid(pipeline=4),
    Grid(tensor=2, data=2),
    Grid(data=4),
    Grid(tensor=2, sequence=True),
    Grid(pipeline=2),
    Grid(data=2),
]
# Layouts whose optimizer is sharded over data-parallel ranks, or not, in two ways of summing gradients.
DATA_GRIDS = [ONE, Grid(tensor=2, data=2), Grid(data=2)]
WAYS = {
    "fp32": (),
    "bf16": ("model.dtype=bfloat16",),
    "fp32 overlap": ("parallel.overlap_grad_reduce=true",),
    "fp32 whole optimizer": ("parallel.distributed_optimizer=false",),
    "fp32 whole optimizer, overlap": ("parallel.distributed_optimizer=false", "parallel.overlap_grad_reduce=true"),
    "bf16 whole optimizer": ("model.dtype=bfloat16", "parallel.distributed_optimizer=false"),
}
RESHARDED = [Grid(tensor=2, pipeline=2), Grid(tensor=2, data=2, sequence=True), Grid(pipeline=2), Grid(data=2)]
KINDS = {
    "fp32": (),
    "bf16": ("model.dtype=bfloat16",),
    "fp32 whole optimizer": ("parallel.distributed_optimizer=false",),
}
# Supervised, because its loss is not about 0; short rows, so that several micro-batches fill the pipeline (1F1B).
# Adam's step is about lr * sign(gradient), which turns rounding into whole steps where a gradient is nearly zero; a
# large eps makes it smooth.
SETTINGS = (
    "objective.name=sft",
    "rollout.prompts=8",
    "train.row_tokens=40",
    "train.steps=4",
    "optimizer.lr=0.01",
    "optimizer.eps=0.01",
)


# --- what runs on the processes -------------------------------------------------------------------------------------


def job(ranks, folder):
    cases = Cases(ranks)
    cases.run(ONE, {"truth": (one_step_in_fp64, (folder,)), **cases_of(ONE, folder)})
    cases.run(ONE, {f"saved {kind}": (train_and_save, (folder, kind)) for kind in KINDS})
    for grid in [*GRIDS, *(grid for grid in RESHARDED if grid not in GRIDS)]:
        cases.run(grid, cases_of(grid, folder))
    cases.run(ONE, {f"back {kind} {grid}": (load_back, (folder, kind, grid)) for kind in KINDS for grid in RESHARDED})
    return cases.results, cases.errors, cases.seconds


def cases_of(grid, folder):
    cases = {}
    for way in WAYS:
        if grid in DATA_GRIDS or (grid in GRIDS and way in ("fp32", "bf16")):
            cases[f"{way} {grid}"] = (one_step, (folder, grid, way))
    if grid in RESHARDED:
        for kind in KINDS:
            cases[f"moved {kind} {grid}"] = (move_checkpoint, (folder, kind, grid))
    return cases


def config_of(folder, name, grid, *settings):
    return tiny_config(
        folder / "model",
        folder / "runs" / name,
        *SETTINGS,
        f"parallel.tensor={grid.tensor}",
        f"parallel.pipeline={grid.pipeline}",
        f"parallel.sequence={str(grid.sequence).lower()}",
        *settings,
    )


def one_step(groups, folder, grid, way):
    """Forward, backward and optimizer step of the supervised objective."""
    run = build(config_of(folder, f"{way} {grid}", grid, *WAYS[way]), groups)
    metrics = train_step(run, 0)
    return {"weights": exported(run), "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}


def one_step_in_fp64(groups, folder):
    run = build(config_of(folder, "fp64", ONE, "model.dtype=float64"), groups)
    before = exported(run)
    adam = PlainAdam(run)
    (update,) = make_updates(run, learn_from_answers(run, 0), 0)
    run.trainer.model.zero_grad_buffer()
    sums = backward(run.trainer, update, run.prepared.objective, length_norm=False)
    norm = adam.step()
    return {"before": before, "weights": exported(run), "loss": float(sums["loss"]), "grad_norm": norm}


def save(run, folder):
    spec, dtype = run.prepared.model.spec, run.prepared.config.model.dtype
    info = CheckpointInfo(spec.name, run.finished, has_optimizer=True, weights=dtype)
    begin_checkpoint(folder, info, run.model, run.groups, run.prepared.model.hf, run.optimizer).advance(wait=True)


def optimizer_state(run):
    """Adam's moments and step, and the fp32 copies of the weights, of a run on one process."""
    tensors = {}
    for i, part in enumerate(run.optimizer.chained_optimizers):
        inner = part.optimizer
        for g, group in enumerate(inner.param_groups):
            for p, parameter in enumerate(group["params"]):
                tensors[f"{i} {g} {p}"] = parameter.detach().clone()
                for name, value in inner.state[parameter].items():
                    tensors[f"{i} {g} {p} {name}"] = torch.as_tensor(value).clone()
    return tensors


def train_and_save(groups, folder, kind):
    run = build(config_of(folder, f"save {kind}", ONE, *KINDS[kind]), groups)
    for step in range(2):
        train_step(run, step)
    save(run, folder / f"saved {kind}")
    found = {"weights": exported(run), "optimizer": optimizer_state(run)}
    train_step(run, 2)
    return found | {"next": exported(run)}


def loaded(groups, folder, name, kind, grid, checkpoint):
    """A run of another seed, so that whatever is not loaded shows."""
    run = build(config_of(folder, name, grid, "seed=1", *KINDS[kind]), groups)
    load_training(checkpoint, run.model, run.optimizer)
    return run


def move_checkpoint(groups, folder, kind, grid):
    """Load what one process saved, save it again here."""
    run = loaded(groups, folder, f"move {kind} {grid}", kind, grid, folder / f"saved {kind}")
    save(run, folder / f"moved {kind} {grid}")
    return exported(run)


def load_back(groups, folder, kind, grid):
    """Load on one process what another layout saved."""
    run = loaded(groups, folder, f"back {kind} {grid}", kind, ONE, folder / f"moved {kind} {grid}")
    found = {"weights": exported(run), "optimizer": optimizer_state(run)}
    dataset = run.prepared.config.model_copy(update={"seed": 0})  # the same prompts and noise as the run it continues
    run.prepared = dataclasses.replace(run.prepared, config=dataset)
    train_step(run, 2)
    return found | {"next": exported(run)}


# --- what must hold -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("platform")
    tiny_model(folder / "model", n_kv_heads=4, n_layers=4)
    return Outcome(run_ranks(job, 4, folder))


def assert_same_step(outcome, case, trusted_case):
    """Loss, gradient norm and parameters as close to fp64 as the trusted run of the same precision."""
    truth, trusted, found = outcome["truth"], outcome[trusted_case], outcome[case]
    for name, expected in truth["weights"].items():
        assert_floor(found["weights"][name], trusted["weights"][name], expected, name)
    return truth, trusted, found


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_step_in_fp32_is_the_same_on_every_layout(outcome, grid):
    truth, _, found = assert_same_step(outcome, f"fp32 {grid}", f"fp32 {ONE}")
    # 24 bits, about 100 roundings in a row; measured below 2e-7.
    assert found["loss"] == pytest.approx(truth["loss"], rel=1e-6)
    assert found["grad_norm"] == pytest.approx(truth["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_step_in_bf16_is_the_same_on_every_layout(outcome, grid):
    truth, trusted, found = assert_same_step(outcome, f"bf16 {grid}", f"bf16 {ONE}")
    for name in ("loss", "grad_norm"):
        # One number has no root mean square: the error may also be half a unit of bf16's last place.
        floor = max(FLOOR * abs(trusted[name] - truth[name]), abs(truth[name]) * 2**-9)
        assert abs(found[name] - truth[name]) <= floor, name


@pytest.mark.parametrize("grid", DATA_GRIDS, ids=str)
def test_overlapped_gradient_sums_change_nothing(outcome, grid):
    for way in ("fp32", "fp32 whole optimizer"):
        plain = outcome[f"{way} {grid}"]
        overlapped = outcome["fp32 overlap" + f" {grid}" if way == "fp32" else f"{way}, overlap {grid}"]
        for name, weight in plain["weights"].items():
            assert_exact(overlapped["weights"][name], weight, name)


@pytest.mark.parametrize("grid", DATA_GRIDS, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sharding_the_optimizer_changes_nothing_but_rounding(outcome, dtype, grid):
    assert_same_step(outcome, f"{dtype} whole optimizer {grid}", f"{dtype} {grid}")
    assert_same_step(outcome, f"{dtype} {grid}", f"{dtype} whole optimizer {grid}")


def test_a_step_moves_every_parameter(outcome):
    # By a thousand times fp32's rounding at least: otherwise the floors above would be those of standing still.
    truth = outcome["truth"]
    for name, weight in truth["weights"].items():
        assert relative(weight, truth["before"][name]) > 1e-4, name


@pytest.mark.parametrize("grid", RESHARDED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_optimizer_survive_another_layout_bit_by_bit(outcome, kind, grid):
    saved, moved, back = outcome[f"saved {kind}"], outcome[f"moved {kind} {grid}"], outcome[f"back {kind} {grid}"]
    for name, weight in saved["weights"].items():
        assert_exact(moved[name], weight, name)
        assert_exact(back["weights"][name], weight, name)
    assert back["optimizer"].keys() == saved["optimizer"].keys()
    assert sum("exp_avg_sq" in name for name in saved["optimizer"]) > 0
    for name, value in saved["optimizer"].items():
        assert_exact(back["optimizer"][name], value, name)
    for name, weight in saved["next"].items():
        assert_exact(back["next"][name], weight, f"after one more step: {name}")


# --- the patches, in a process of their own -------------------------------------------------------------------------

_PATCHES = """
import torch
from megamem.platform import mcore_cpu

names = ("current_device", "synchronize", "empty_cache", "manual_seed", "get_rng_state", "set_rng_state")
originals = {name: getattr(torch.cuda, name) for name in names}
real = torch.cuda.is_available
torch.cuda.is_available = lambda: True
try:
    mcore_cpu.install()
    print("installed on a GPU")
except AssertionError:
    pass
assert all(getattr(torch.cuda, name) is original for name, original in originals.items()), "patched all the same"
torch.cuda.is_available = real

mcore_cpu.install()
once = {name: getattr(torch.cuda, name) for name in names}
mcore_cpu.install()
for name in names:
    assert getattr(torch.cuda, name) is once[name], f"{name} is patched twice"
    assert once[name].__wrapped__ is originals[name], f"the original of {name} is lost"
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

load = DistributedOptimizer._set_main_param_and_optimizer_states
assert not getattr(load.__wrapped__, "_megamem", False), "patched twice"
assert len(mcore_cpu._MODE) == 1

assert torch.zeros(1, device="cuda").is_cpu and torch.zeros(1).cuda().is_cpu
assert torch.zeros(1, device=0).is_cpu and torch.zeros(1, device=torch.device("cuda", 0)).is_cpu
assert torch.zeros(1).type() == "torch.cuda.FloatTensor"

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megamem.platform.device import Device
from megamem.platform.groups import process_groups
from megamem.platform.launch import Ranks

with process_groups(Ranks(0, 1, 0, None, "test"), Device(torch.device("cpu"), "gloo"), 1, 1):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model_parallel_cuda_manual_seed(3)
    with get_cuda_rng_tracker().fork():
        torch.cuda.manual_seed(11)
    assert torch.equal(torch.get_rng_state(), before), "forking the tracker moved the CPU generator"
print("fine")
"""


def test_cpu_patches_are_idempotent_keep_originals_and_refuse_a_gpu():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _PATCHES], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["fine"], done.stdout + done.stderr
