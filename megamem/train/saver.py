"""Which checkpoints a run writes and keeps, when they are complete, and what happens where one cannot be written."""

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megamem.errors import UserError
from megamem.train.checkpoint import CheckpointInfo, latest_name, list_checkpoints, read_info, step_folder
from megamem.train.run import Run
from megamem.train.save import Writing, begin_checkpoint, flush_to_disk

SCORES = ("eval_reward", "eval_exact")


class Saver:
    """Saves a run after a step as `train.save_*`, `train.keep*` and `train.on_save_error` say.

    Every rank has one and calls it at the same steps. At most one checkpoint is on its way at a time.

    Args:
        dtypes: safetensors dtype code of each Hugging Face tensor of the model's source, kept for the export.
        tell: where a line for the user goes (main process only); default: standard error.

    Attributes:
        seconds: from the start of the last save until it was found complete; None before the first.
    """

    def __init__(self, run: Run, dtypes: dict[str, str], tell: Callable[[str], None] | None = None):
        self._run, self._dtypes = run, dtypes
        self._tell = tell or (lambda text: sys.stderr.write(f"megamem: {text}\n"))
        self._pending: Writing | None = None
        self._started = 0.0
        self._saved_step = run.finished  # resumed from it, or nothing to save yet
        self.seconds: float | None = None

    def save(self, metrics: Mapping[str, float], unlogged: Mapping[str, float] | None = None) -> None:
        """Save the present state, unless this step is saved already; a collective call.

        With `train.save_async` the checkpoint becomes complete in a later `poll`, `save` or `finish`.

        Args:
            metrics: of this step; those in `SCORES` decide whether the checkpoint is kept as one of the best.
            unlogged: numbers of this step that a resumed run has to log.

        Raises:
            UserError: it, or one that was on its way, could not be written and `train.on_save_error` is stop.
        """
        self.finish()
        run, step = self._run, self._run.finished
        if step == self._saved_step:
            return
        config, folder = run.prepared.config, run.prepared.model
        info = CheckpointInfo(
            folder.spec.name,
            step,
            has_optimizer=True,
            weights=config.model.dtype,
            dtypes=self._dtypes,
            scores={name: float(metrics[name]) for name in SCORES if name in metrics},
            unlogged=dict(unlogged or {}),
        )
        target = step_folder(Path(config.out), step)
        self._started = time.monotonic()
        try:
            self._pending = begin_checkpoint(target, info, run.model, run.groups, folder.hf, run.optimizer, config)
        except UserError as error:
            self._failed(error)
            return
        self._saved_step = step
        if not config.train.save_async:
            self.finish()

    def poll(self) -> None:
        """Complete the checkpoint on its way if all ranks have written it; a collective call, cheap.

        Raises:
            UserError: as `save`.
        """
        self._advance(wait=False)

    def finish(self) -> None:
        """Wait for the checkpoint on its way, if there is one; a collective call.

        Raises:
            UserError: as `save`.
        """
        self._advance(wait=True)

    def _advance(self, wait: bool) -> None:
        if self._pending is None:
            return
        pending = self._pending
        try:
            if not pending.advance(wait):
                return
            self._pending, self.seconds = None, time.monotonic() - self._started
            self._keep(pending.folder)
        except UserError as error:
            if self._pending is not None:  # not written: this step may be tried again
                self._pending, self._saved_step = None, -1
            self._failed(error)

    def _keep(self, newest: Path) -> None:
        """Let `latest` name the checkpoint just completed, then delete those that are not to be kept."""
        run, t = self._run, self._run.prepared.config.train
        problem = None
        if run.groups.is_main:
            out = Path(run.prepared.config.out)
            try:
                point_latest(out, newest)
                prune_checkpoints(out, t.keep, t.keep_best, t.best)
            except OSError as error:
                problem = f"{newest} is complete, but its neighbours cannot be changed ({error})"
        if run.groups.any(problem is not None):
            raise UserError(problem or f"{newest.parent}: cannot be changed")

    def _failed(self, error: UserError) -> None:
        if self._run.prepared.config.train.on_save_error == "stop":
            raise error
        if self._run.groups.is_main:
            self._tell(f"{error}; train.on_save_error = continue: training goes on, the next save is tried again")


def point_latest(run: Path, folder: Path) -> None:
    """Write a complete checkpoint's name to `checkpoints/latest`, in one piece."""
    latest = run / "checkpoints" / "latest"
    temporary = latest.with_suffix(".tmp")
    temporary.write_text(folder.name + "\n", encoding="utf-8")
    flush_to_disk(temporary)
    temporary.replace(latest)


def prune_checkpoints(run: Path, keep: int, keep_best: int, best: str) -> None:
    """Delete all but the newest `keep` checkpoints, the `keep_best` with the highest score `best` and the `latest`.

    A checkpoint without that score is never one of the best; of equal ones the newer is better. Damaged checkpoints
    are left alone and not counted. Half-written ones of earlier runs go.
    """
    found = list_checkpoints(run)
    scores = {folder: read_info(folder).scores.get(best, math.nan) for folder in found}
    ranked = sorted((folder for folder in found if not math.isnan(scores[folder])), key=lambda folder: scores[folder])
    kept = {*found[-keep:], *ranked[len(ranked) - min(keep_best, len(ranked)) :], step_named(run, latest_name(run))}
    for folder in found:
        if folder not in kept:
            # Renamed first: a half-deleted folder must not look complete.
            folder.rename(folder.with_name(folder.name + ".tmp"))
    for folder in (run / "checkpoints").glob("step_*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)


def step_named(run: Path, name: str | None) -> Path | None:
    """The folder of a name in `checkpoints`."""
    return run / "checkpoints" / name if name else None
