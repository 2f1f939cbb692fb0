"""What a run tells: progress bar, lines on the console, metrics.jsonl, tensorboard, wandb, and the state of the run
folder.

Only the main process tells anything; the others' journals are silent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megamem.config.load import config_yaml
from megamem.config.schema import PlannedConfig
from megamem.errors import RUN_AGAIN, UserError
from megamem.train.metrics import MetricsLog
from megamem.train.prepare import describe
from megamem.train.run import Run
from megamem.train.wandb_log import WandbLog

# What the planner found: a prediction, why there is none, or None as long as it works.
Planned = Callable[[], PlannedConfig | str | None]
State = Literal["running", "interrupted", "finished"]


class Journal:
    """The run's voice; a context manager around its steps, which shows the progress bar.

    Args:
        first_step: the step that will be written first; what an interrupted run wrote from there on is dropped.
        planned: asked at every line until it knows; then the prediction is added to config.yaml and to every line.

    Raises:
        UserError: here and in every method: a file of the run folder cannot be written, and `train.on_save_error` is
            stop.
    """

    def __init__(self, run: Run, console: Console, first_step: int, planned: Planned = lambda: None):
        config = run.prepared.config.model_copy(update={"planned": None})  # an earlier start's
        self._run, self._console, self._out = run, console, Path(config.out)
        self._log, self._wandb, self._progress = None, None, None
        self._planned, self._peak = planned, {}
        if run.groups.is_main:
            self._progress = _progress(console)
            self._bar = self._progress.add_task("training", total=config.train.steps, completed=run.finished, told="")
            self._put("config.yaml", config_yaml(config))
            told = self.tell if config.train.on_save_error == "continue" else None
            self._log = MetricsLog(self._out, first_step, config.tensorboard, told)
            self._wandb = WandbLog(config) if config.observe.wandb else None

    def __enter__(self) -> "Journal":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress:
            self._progress.stop()

    def announce(self, eval_prompts: Sequence[object]) -> None:
        """What is about to run, on one line, and what was found on the way."""
        run, g, config = self._run, self._run.groups, self._run.prepared.config
        if not self._log:
            return
        _, skipped = run.prepared.prompts("train", config.rollout.gen_length)
        facts = {
            "model": run.prepared.model.spec.name,
            "tensor": g.tp.size,
            "pipeline": g.pp.size,
            "data": g.dp.size,
            "device": str(g.device.torch),
            "objective": config.objective.name,
            **({"shared prompts": run.share} if run.share != "none" else {}),
            "train prompts": len(run.prompts),
            **{f"prompts {k}": v for k, v in skipped.items() if v},
            "eval prompts": len(eval_prompts),
            **run.prepared.task.report(),
        }
        for line in (describe(facts), *run.prepared.notes):
            self.tell(line)
        if run.finished:
            self.tell(f"resumed after step {run.finished} from {run.prepared.resume_from}")

    def tell(self, line: str) -> None:
        """A line for the user."""
        if self._progress:
            self._progress.console.print(line, markup=False)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers, everywhere."""
        if not self._log:
            return
        self._look_at_plan()
        metrics = {**metrics, **self._peak}
        self._log.write(step, metrics)
        if self._wandb:
            self._wandb.write(step, metrics)
        line, total = _line(metrics), self._run.prepared.config.train.steps
        self._progress.update(self._bar, completed=step, told=line)
        if not self._console.is_terminal or "eval_exact" in metrics:
            self.tell(f"step {step}/{total}  {line}")

    def state(self, state: State) -> None:
        """Write `status.json`, for scripts that start the run again: its state and finished steps."""
        if self._log:
            self._put("status.json", json.dumps({"state": state, "step": self._run.finished}) + "\n")
        if self._wandb and state != "running":  # after everything is saved: sending may take longer than a stop leaves
            self._wandb.close(0 if state == "finished" else RUN_AGAIN)

    def _look_at_plan(self) -> None:
        found = None if self._peak else self._planned()
        if isinstance(found, str):
            self.tell(f"no planned memory: {found}")
            self._planned = lambda: None
        elif found is not None:
            self._peak = {"planned_peak_gib": found.peak_gib}
            self._put("config.yaml", config_yaml(self._run.prepared.config.model_copy(update={"planned": found})))
            parts = ", ".join(f"{name} {size:.2f}" for name, size in found.parts_gib.items() if size >= 0.005)
            self.tell(f"planned peak of an update of full rows: {found.peak_gib:.2f} GiB ({parts})")

    def _put(self, name: str, text: str) -> None:
        """Write a small file in one piece: the old one, or the new one."""
        path = self._out / name
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            told = f"{path}: cannot be written ({error.strerror})"
            if self._run.prepared.config.train.on_save_error == "stop":
                raise UserError(told) from None
            self.tell(f"{told}; train.on_save_error = continue: training goes on")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"),
        console=console,
        disable=not console.is_terminal,
    )


_SHOWN = ("reward", "exact", "elbo", "grad_norm", "zero_variance", "skipped", "seconds", "eval_reward", "eval_exact")


def _line(metrics: Mapping[str, float]) -> str:
    shown = (name for name in _SHOWN if name in metrics and (metrics[name] or name != "skipped"))
    return "  ".join(f"{name} {metrics[name]:.3f}" for name in shown)
