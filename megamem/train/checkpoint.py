"""Checkpoints: one self-contained folder each, complete or absent.

    CKPT/
      megamem.json   format, family, step, dtypes of the Hugging Face tensors, scores, sizes of all files
      config.yaml    the resolved configuration of the run (absent after an import)
      hf/            config.json, tokenizer and other small files of the Hugging Face folder
      weights/       megatron-core's distributed checkpoint: model, and the optimizer of a training run

A checkpoint is written (`save.py`) under a temporary name and renamed when every rank has finished, so a run that is
killed at any moment leaves the last good one. It can be loaded at any tensor x pipeline x data layout.

A run folder holds them as `checkpoints/step_000050`; the file `checkpoints/latest` names the newest complete one.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from megamem.errors import UserError
from megamem.platform.checkpoint_io import CommonReader, read_metadata, restricted_reading

FORMAT = 1
INFO_NAME = "megamem.json"
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
        scores: what an evaluation of these weights found, by name.
        unlogged: numbers of the step that still have to be logged, once it has been evaluated.
        files: bytes of every other file, by its path in the folder.
    """

    family: str
    step: int
    has_optimizer: bool
    weights: str
    dtypes: dict[str, str] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    unlogged: dict[str, float] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    format: int = FORMAT


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a megamem checkpoint (or else, maybe, a Hugging Face folder)."""
    return (folder / INFO_NAME).is_file()


def read_info(folder: Path) -> CheckpointInfo:
    """Read `megamem.json`.

    Raises:
        UserError: not a checkpoint, or of a format that this version does not read.
    """
    path = folder / INFO_NAME
    try:
        info = CheckpointInfo(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{folder}: not a megamem checkpoint (no {INFO_NAME})") from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if info.format != FORMAT:
        raise UserError(f"{path}: format = {info.format}; this version reads format {FORMAT}")
    return info


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps goes."""
    return run / "checkpoints" / f"step_{step:06d}"


def step_folders(run: Path) -> list[Path]:
    """Folders of a run that are named like a checkpoint, whatever they hold; oldest first."""
    found = (p for p in (run / "checkpoints").glob("step_*") if p.name.removeprefix("step_").isdecimal() and p.is_dir())
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run folder with all their files, oldest first."""
    return [folder for folder in step_folders(run) if wrong_files(folder) is None]


def wrong_files(folder: Path) -> str | None:
    """What is missing or cut short in a checkpoint, by names and sizes; None where all is there."""
    try:
        files = read_info(folder).files
    except UserError as error:
        return str(error).removeprefix(f"{folder}: ").removeprefix(f"{folder}/")
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != size:
            return f"{name} has {found} bytes, {size} were written"
    return None


def damage(folder: Path) -> str | None:
    """Why a checkpoint cannot be loaded, as far as that shows without reading its tensors; None where nothing does."""
    wrong = wrong_files(folder)
    if wrong is not None:
        return wrong
    try:
        read_metadata(folder / "weights" / ".metadata")
    except Exception as error:  # a damaged pickle raises anything
        return f"weights/.metadata cannot be read ({first_line(error)})"
    return None


def choose_checkpoint(run: Path) -> tuple[Path | None, tuple[str, ...]]:
    """The newest checkpoint of a run folder that is whole, and what a user should be told about it.

    The folders decide, not the file `latest`: a run may be killed between a checkpoint and that file.

    Raises:
        UserError: there are checkpoints, and none is whole.
    """
    told: list[str] = []
    chosen = None
    for folder in reversed(step_folders(run)):
        wrong = damage(folder)
        if wrong is None:
            chosen = folder
            break
        told.append(f"{folder} is damaged and left out: {wrong}")
    if told and chosen is None:
        raise UserError(
            f"{run / 'checkpoints'}: no checkpoint is whole; {told[0]}\n"
            "choose another run folder, or delete these checkpoints to start from the beginning"
        )
    named = latest_name(run)
    if chosen is not None and named not in (None, chosen.name):
        told.append(f"{run / 'checkpoints' / 'latest'} names {named}; the newest whole checkpoint is {chosen.name}")
    return chosen, tuple(told)


def latest_name(run: Path) -> str | None:
    """Name of the checkpoint in the file `checkpoints/latest`; None where there is none."""
    try:
        return (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def load_model(folder: Path, model: nn.Module) -> None:
    """Load weights only, at whatever layout `model` has."""
    _load(folder, {"model": model.sharded_state_dict()}, model)


def load_training(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Load weights and optimizer state."""
    state = _load(folder, sharded_state(model, optimizer, is_loading=True), model)
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
    """Torch's Adam makes its state in its first step; megatron-core asks for the count of it to save or load one."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.init_state_fn(part.optimizer, part.config)
    for state in _torch_adam_states(optimizer):
        state.setdefault("step", torch.zeros(()))


def _load(folder: Path, sharded: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    try:
        with restricted_reading():
            state = dist_checkpointing.load(sharded, str(folder / "weights"), common_strategy=CommonReader())
    except (Exception, CheckpointException) as error:  # torch and megatron-core raise many kinds for damaged files
        raise UserError(f"{folder}: checkpoint cannot be loaded ({first_line(error)})") from error
    model.load_state_dict(state["model"])
    return state


def sharded_state(model: nn.Module, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    """megamem's checkpoint content in megatron-core's terms; `optimizer` may be None. A collective call with one."""
    state = {"model": model.sharded_state_dict()}
    if optimizer is not None:
        _allocate_torch_adam(optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(
            model.sharded_state_dict(), is_loading=is_loading, metadata=_OPTIMIZER
        )
    return state


def copy_small_files(source: Path, target: Path) -> None:
    """Copy a Hugging Face folder's configuration, tokenizer and code, everything but weights."""
    target.mkdir(parents=True, exist_ok=True)
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(weights):
            shutil.copyfile(path, target / path.name)


def first_line(error: BaseException) -> str:
    """What an error says, short."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]  # its own text only names ranks
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300]
