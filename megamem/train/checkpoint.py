"""Checkpoints: one self-contained folder each, complete or absent.

    CKPT/
      megamem.json   format, family, step, dtypes of the Hugging Face tensors
      config.yaml    the resolved configuration of the run (absent after an import)
      hf/            config.json, tokenizer and other small files of the Hugging Face folder
      weights/       megatron-core's distributed checkpoint: model, and the optimizer of a training run

A checkpoint is written under a temporary name and renamed when every rank has finished, so a run that is killed at any
moment leaves the last good one. It can be loaded at any tensor x pipeline x data layout.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from megamem.config.load import dump_config
from megamem.config.schema import RunConfig
from megamem.errors import UserError
from megamem.platform.groups import Groups

FORMAT = 1
_INFO = "megamem.json"
# The only optimizer sharding that every layout can load (megatron-core's default raises on save).
_OPTIMIZER = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


@dataclass(frozen=True)
class CheckpointInfo:
    """What `megamem.json` says.

    Attributes:
        family: name of the ModelSpec.
        step: finished training steps; 0 for an import.
        has_optimizer: whether a run can continue from it.
        weights: torch dtype name of the stored parameters.
        dtypes: safetensors dtype code of each Hugging Face tensor at import, kept for the export.
    """

    family: str
    step: int
    has_optimizer: bool
    weights: str
    dtypes: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a megamem checkpoint (or else, maybe, a Hugging Face folder)."""
    return (folder / _INFO).is_file()


def read_info(folder: Path) -> CheckpointInfo:
    """Read `megamem.json`.

    Raises:
        UserError: not a checkpoint, or of a format that this version does not read.
    """
    path = folder / _INFO
    try:
        info = CheckpointInfo(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{folder}: not a megamem checkpoint (no {_INFO})") from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if info.format != FORMAT:
        raise UserError(f"{path}: format = {info.format}; this version reads format {FORMAT}")
    return info


def list_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    found = (p for p in (run / "checkpoints").glob("step_*") if is_checkpoint(p) and p.suffix != ".tmp")
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps goes."""
    return run / "checkpoints" / f"step_{step:06d}"


def save_checkpoint(
    folder: Path,
    info: CheckpointInfo,
    model: nn.Module,
    groups: Groups,
    hf_folder: Path,
    optimizer: Any = None,
    config: RunConfig | None = None,
) -> None:
    """Write a checkpoint; a collective call. An existing `folder` is replaced only once the new one is complete.

    Raises:
        UserError: it could not be written (disk full, no permission); nothing but a temporary folder was touched.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    problem = None
    if groups.is_main:
        problem = _attempt(lambda: _prepare(temporary, info, hf_folder, config))
    _raise_together(problem, temporary, groups)
    state = _sharded_state(model, optimizer, is_loading=False)
    problem = _attempt(
        lambda: dist_checkpointing.save(
            state,
            str(temporary / "weights"),
            # Optimizer facts live on some ranks only, by design; without this a warning says so at every save.
            preprocess_common_before_consistancy_check=lambda common: {
                key: value for key, value in common.items() if key != "optimizer"
            },
        )
    )
    _raise_together(problem, temporary, groups)
    if groups.is_main:
        problem = _attempt(lambda: _publish(temporary, folder))
    _raise_together(problem, temporary, groups)


def load_model(folder: Path, model: nn.Module) -> None:
    """Load weights only, at whatever layout `model` has."""
    _load(folder, {"model": model.sharded_state_dict()}, model)


def load_training(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Load weights and optimizer state."""
    _allocate_torch_adam(optimizer)
    state = _load(folder, _sharded_state(model, optimizer, is_loading=True), model)
    optimizer.load_state_dict(state["optimizer"])
    for state in _torch_adam_states(optimizer):
        # megatron-core hands one step tensor to all parameters; torch counts in place, so each needs its own.
        state["step"] = state["step"].clone()


def _torch_adam_states(optimizer: Any) -> Iterator[dict[str, Any]]:
    """The state of every parameter where torch's Adam is the optimizer (no Transformer Engine, no apex)."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield part.optimizer.state[parameter]


def _allocate_torch_adam(optimizer: Any) -> None:
    """Torch's Adam makes its state in its first step; megatron-core asks for the count of it before it loads one."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.init_state_fn(part.optimizer, part.config)
    for state in _torch_adam_states(optimizer):
        state.setdefault("step", torch.zeros(()))


def prune_checkpoints(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for folder in list_checkpoints(run)[:-keep]:
        # Renamed first: a half-deleted folder must not look complete.
        doomed = folder.with_name(folder.name + ".tmp")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _load(folder: Path, sharded: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    try:
        state = dist_checkpointing.load(sharded, str(folder / "weights"))
    except (Exception, CheckpointException) as error:  # torch and megatron-core raise many kinds for damaged files
        raise UserError(f"{folder}: checkpoint cannot be loaded ({_first_line(error)})") from error
    model.load_state_dict(state["model"])
    return state


def _sharded_state(model: nn.Module, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    state = {"model": model.sharded_state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            model.sharded_state_dict(), is_loading=is_loading, metadata=_OPTIMIZER
        )
    return state


def _prepare(temporary: Path, info: CheckpointInfo, hf_folder: Path, config: RunConfig | None) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "weights").mkdir(parents=True)
    copy_small_files(hf_folder, temporary / "hf")
    if config is not None:
        dump_config(config, temporary / "config.yaml")
    (temporary / _INFO).write_text(json.dumps(asdict(info), indent=1), encoding="utf-8")


def copy_small_files(source: Path, target: Path) -> None:
    """Copy a Hugging Face folder's configuration, tokenizer and code, everything but weights."""
    target.mkdir(parents=True, exist_ok=True)
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(weights):
            shutil.copyfile(path, target / path.name)


def _publish(temporary: Path, folder: Path) -> None:
    for path in temporary.rglob("*"):
        if path.is_file():
            with open(path, "rb") as handle:
                os.fsync(handle.fileno())
    old = folder.with_name(folder.name + ".old.tmp")
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _attempt(action: Any) -> str | None:
    try:
        action()
    except (Exception, CheckpointException) as error:  # megatron-core's writers wrap an OSError in their own kinds
        return _first_line(error)
    return None


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]  # its own text only names ranks
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300]


def _raise_together(problem: str | None, temporary: Path, groups: Groups) -> None:
    """Every rank fails if one does; the temporary folder goes."""
    problems: list[str | None] = [problem]
    if groups.world > 1:
        problems = [None] * groups.world
        dist.all_gather_object(problems, problem)
    told = next((p for p in problems if p), None)
    if told:
        if groups.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{temporary.with_suffix('')}: checkpoint could not be written; is the disk full? ({told})")
