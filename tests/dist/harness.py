"""Real gloo processes for tests: start them once, run many cases inside, read results from files.

A test file writes one job, `job(ranks, folder, …) -> results`, starts it with `run_ranks`, and its tests look at their
case of the results. Inside a job `Cases` runs each case in a process grid of its own (any world up to the number of
processes) and keeps a failure to the case it belongs to.
"""

import dataclasses
import json
import shutil
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.multiprocessing as mp

from megamem.config.load import parse
from megamem.config.schema import RunConfig
from megamem.platform.device import Device
from megamem.platform.launch import Ranks, hush_dependencies
from megamem.tasks import sudoku4
from megamem.tasks.base import Problem, Score
from megamem.tasks.sudoku4 import Sudoku4
from megamem.tasks.tokenizer import load_tokenizer, train_word_sentencepiece

CPU = Device(torch.device("cpu"), "gloo")
# Seconds. A hang must fail, a busy machine must not; it also bounds the wait for processes that run other cases.
_COLLECTIVE_TIMEOUT = 400.0
# Imported once by the fork server and inherited by every process: importing megatron-core takes 10 s of a core.
_PRELOAD = ["megatron.core.optimizer", "megatron.core.dist_checkpointing", "transformers", "megamem.train.loop"]


def run_ranks(job: Callable[..., Any], world: int, *args: Any, timeout: float = 900.0) -> list[Any]:
    """Run `job(ranks, *args)` in `world` new processes with one torch thread each.

    Args:
        job: importable (it is pickled); returns numbers, strings, tensors, and lists and dicts of these.
        timeout: seconds after which every process is killed and the test fails.

    Returns:
        Every rank's result.
    """
    mp.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    folder = Path(tempfile.mkdtemp(prefix="megamem_test_"))
    try:
        context = mp.start_processes(
            _rank, (world, folder, job, args), nprocs=world, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout
        try:
            while not context.join(timeout=1.0):  # raises with the child's traceback
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{job.__name__}: {world} processes still ran after {timeout:.0f} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    kill_family(process.pid)
        return [torch.load(folder / f"result_{rank}.pt", weights_only=True) for rank in range(world)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kill_family(pid: int) -> None:
    """SIGKILL to a process and everything it started (megatron-core's checkpoint writers among them)."""
    try:
        family = psutil.Process(pid).children(recursive=True) + [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass


def _rank(rank: int, world: int, folder: Path, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    hush_dependencies()
    ranks = Ranks(rank, world, rank, f"file://{folder}/rendezvous", "test")
    torch.save(job(ranks, *args), folder / f"result_{rank}.pt")


@dataclasses.dataclass(frozen=True)
class Grid:
    """Degrees of one process grid; `data` is what the world leaves."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence: bool = False

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"tp{self.tensor}{'+sp' if self.sequence else ''} pp{self.pipeline} dp{self.data}"


Case = tuple[Callable[..., Any], tuple[Any, ...]]


class Cases:
    """Cases of a job. Those of one layout share a process grid: making one takes longer than most cases.

    Results are those of the first process: `cases.results[name]` is what the case returned there. A case that fails
    leaves its traceback in `cases.errors[name]` and ends its grid, so that the other processes fail at once instead of
    waiting for it; cases of other grids run on.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self.results: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def run(self, grid: Grid, cases: dict[str, Case]) -> None:
        """Run `function(groups, *args)` of every case on the processes below `grid.world`; the others go on."""
        if self._ranks.rank >= grid.world:
            return
        waiting = list(cases)
        try:
            with process_grid(
                self._ranks, grid, f"grid_{zlib.crc32(' '.join([str(grid), *waiting]).encode())}"
            ) as groups:
                while waiting:
                    started = time.monotonic()
                    function, args = cases[waiting[0]]
                    result = function(groups, *args)
                    groups.barrier()
                    self.results[waiting[0]] = result
                    self.seconds[waiting.pop(0)] = time.monotonic() - started
        except Exception:
            told = (
                f"rank {self._ranks.rank} in {waiting[0] if waiting else 'leaving the grid'}: {traceback.format_exc()}"
            )
            self.errors.update(dict.fromkeys(waiting, told))


@contextmanager
def process_grid(ranks: Ranks, grid: Grid, name: str):
    """megamem's process groups over the first `grid.world` processes, with a rendezvous file of their own."""
    from megamem.platform.groups import process_groups

    own = dataclasses.replace(ranks, world=grid.world, init_method=f"{ranks.init_method}_{name}")
    if grid.world == 1:
        own = dataclasses.replace(own, init_method=None)
    with process_groups(own, CPU, grid.tensor, grid.pipeline, _COLLECTIVE_TIMEOUT) as groups:
        yield groups


class Outcome:
    """What a job of `Cases` brought back: results of the first process, errors of all."""

    def __init__(self, parts: list[tuple[dict[str, Any], dict[str, str], dict[str, float]]]):
        self._results, _, self.seconds = parts[0]
        self._errors: dict[str, list[str]] = {}
        for _, errors, _ in parts:
            for name, text in errors.items():
                self._errors.setdefault(name, []).append(text)

    def __getitem__(self, name: str) -> Any:
        """The case's result; its tracebacks fail the test that asks."""
        assert name not in self._errors, "\n".join(self._errors[name])
        return self._results[name]


def hash_reward(response: str) -> float:
    """A reward in 0 … 1 for any text: every response of an untrained model earns something else."""
    return zlib.crc32(response.encode()) % 8 / 7


class HashSudoku(Sudoku4):
    """Sudoku prompts with `hash_reward`, so that groups of an untrained model differ and gradients are not zero."""

    def score(self, problem: Problem, response: str) -> Score:
        return Score(hash_reward(response), False, {})


def tiny_model(folder: Path, **overrides: Any) -> Path:
    """A tiny LLaDA folder without weights: config.json and a word tokenizer of 87 ids.

    Weights are wide (std 0.15) so that attention is far from uniform and an error in it shows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train_word_sentencepiece(sudoku4.vocabulary("cells"), folder / "tokenizer.model")
    tokenizer = load_tokenizer(folder)
    hf_config = {
        "model_type": "llada",
        "d_model": 32,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
        "mlp_hidden_size": 48,
        "vocab_size": tokenizer.vocab_size,
        "embedding_size": tokenizer.vocab_size,
        "mask_token_id": tokenizer.mask_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "max_sequence_length": 64,
        "rope": True,
        "init_std": 0.15,
    }
    (folder / "config.json").write_text(json.dumps(hf_config | overrides), encoding="utf-8")
    return folder


def tiny_settings(model: Path, out: Path) -> dict[str, Any]:
    """Settings of a tiny run, as a YAML file would hold them."""
    options = {"style": "cells", "train_empty": [4, 6], "train_size": 64, "valid_size": 8, "test_size": 8}
    return {
        "out": str(out),
        "device": "cpu",
        "tensorboard": False,
        "model": {"path": str(model), "init": "random"},
        "task": {"name": f"{HashSudoku.__module__}:HashSudoku", "options": options},
        "rollout": {
            "prompts": 4,
            "group": 4,
            "gen_length": 16,
            "block_length": 8,
            "steps": 4,
            "temperature": 1.0,
            "row_tokens": 256,
        },
        "noise": {"estimator": "stratified", "draws": 2},
        "objective": {"name": "bgpo"},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 4, "row_tokens": 160},
        "eval": {"every": 0, "at_start": False},
    }


def tiny_config(model: Path, out: Path, *overrides: str) -> RunConfig:
    """`tiny_settings` with dotted overrides, checked."""
    return parse(tiny_settings(model, out), overrides, "tiny run")


def build(
    config: RunConfig,
    groups: Any,
    alter: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    interrupts: Any = None,
) -> Any:
    """A `Run` with a trainer; without an optimizer for float64, which megatron-core's optimizer cannot do.

    Args:
        alter: (Hugging Face name, tensor) -> tensor, applied to the first weights.
        interrupts: as of `build_run`.
    """
    from megamem.config.rules import RULES, optimizer_precision
    from megamem.models.runner import Runner
    from megamem.train.optim import wrap_for_training
    from megamem.train.prepare import prepare
    from megamem.train.run import add_prompts, attention_name, build_run

    rules = [rule for rule in RULES if rule is not optimizer_precision]
    prepared = prepare(config, groups.world, rules)
    if alter is not None:
        prepared = dataclasses.replace(prepared, weights=Altered(prepared.weights, alter))
    if config.model.dtype != "float64":
        return build_run(prepared, groups, training=True, interrupts=interrupts)
    run = build_run(prepared, groups, training=False)
    run.trainer = Runner(wrap_for_training(run.model, config.parallel), groups, attention_name(prepared.model.arch, config.model))
    add_prompts(run)
    return run


class Altered:
    """A weight source whose tensors are changed by name, the same on every layout."""

    def __init__(self, source: Any, alter: Callable[[str, torch.Tensor], torch.Tensor]):
        self.shapes, self.dtypes, self.where = source.shapes, source.dtypes, source.where
        self._source, self._alter = source, alter

    def read(self, name: str) -> torch.Tensor:
        return self._alter(name, self._source.read(name).double())


def exported(run: Any) -> dict[str, torch.Tensor]:
    """Weights of the whole model by Hugging Face name; empty but on the main process."""
    from megamem.convert.weights import export_weights

    found: dict[str, torch.Tensor] = {}
    write = (lambda name, tensor: found.__setitem__(name, tensor.clone())) if run.groups.is_main else None
    folder = run.prepared.model
    export_weights(run.model, folder.spec.tensor_maps(folder.arch), folder.arch, run.groups, write)
    return found


def exported_gradients(run: Any) -> dict[str, torch.Tensor]:
    """Reduced gradients of the whole model by Hugging Face name (the weights are put aside meanwhile)."""
    weights = {p: p.data for p in run.model.parameters()}
    for parameter in weights:
        parameter.data = parameter.main_grad.clone()
    try:
        return exported(run)
    finally:
        for parameter, data in weights.items():
            parameter.data = data


class PlainAdam:
    """The optimizer of DESIGN's runs in float64, written without megatron-core: AdamW after clipping by norm.

    For a run on one process, after `update.backward`.
    """

    def __init__(self, run: Any):
        o, parameters = run.prepared.config.optimizer, list(run.model.parameters())
        decayed = [p for p in parameters if p.dim() > 1]
        spared = [p for p in parameters if p.dim() == 1]
        self._clip = o.clip_grad
        self._adam = torch.optim.AdamW(
            [{"params": decayed}, {"params": spared, "weight_decay": 0.0}],
            lr=o.lr,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
        )
        self._parameters = parameters

    def step(self) -> float:
        """One step; the gradient norm before clipping."""
        norm = torch.stack([p.main_grad.norm() for p in self._parameters]).norm().item()
        factor = min(1.0, self._clip / (norm + 1e-6))
        for parameter in self._parameters:
            parameter.grad = parameter.main_grad * factor
        self._adam.step()
        self._adam.zero_grad()  # the next backward would add to it
        return norm


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def distance(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> torch.Tensor:
    """All differences x - y, flat, float64."""
    assert x.keys() == y.keys()
    return torch.cat([(x[name].double() - y[name].double()).flatten() for name in sorted(x)])
