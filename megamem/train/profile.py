"""The profile of a range of steps, as a trace that chrome://tracing and Perfetto show."""

from collections.abc import Callable
from pathlib import Path

import torch

from megamem.train.run import Run


class StepProfile:
    """Profiles the steps that `observe.profile_from` and `profile_steps` name; a context manager around all steps.

    The ranks of the first model replica write `out/profile/rank_N.json`: kernels and operators as the device has them,
    the phases of a step as ranges `megamem/…`. A run that is stopped or fails inside the range writes none: what it
    has left of its time is for the checkpoint. If the range is not over, it is profiled from there on when the run is
    resumed.

    Args:
        tell: where a line for the user goes.
    """

    def __init__(self, run: Run, tell: Callable[[str], None]):
        observe, self._run, self._tell = run.prepared.config.observe, run, tell
        first = observe.profile_from
        mine = first is not None and run.groups.dp.rank == 0
        self._steps = range(first, first + observe.profile_steps) if mine else range(0)
        self._profiler: torch.profiler.profile | None = None

    def __enter__(self) -> "StepProfile":
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        if self._profiler is not None and kind is None:
            self._write()
        elif self._profiler is not None:
            self._profiler.stop()

    def before(self, step: int) -> None:
        """The step, counted from 1, is about to begin."""
        if self._profiler is None and step in self._steps:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif self._profiler is not None and step not in self._steps:
            self._write()

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        path = Path(self._run.prepared.config.out) / "profile" / f"rank_{self._run.groups.world_rank}.json"
        temporary = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(temporary))
            temporary.replace(path)
            self._tell(f"profile: {path}")
        except (OSError, RuntimeError) as error:
            self._tell(f"{path}: the profile cannot be written ({error})")
        self._run.interrupts.restart_clock()
