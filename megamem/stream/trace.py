"""What a pipeline did and when: events of every stage, from a run or from the simulator, as JSON lines.

One line per unit: {"rank": 0, "op": "forward", "microbatch": 0, "unit": 0, "start": 0.0, "end": 0.1}; times are in
seconds on a clock that the stages share (a simulation's are in the unit of its costs).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megamem.errors import UserError
from megamem.stream.schedule import Op


@dataclass(frozen=True)
class Event:
    """Stage `stage` computed `op` from `start` to `end`; waiting for messages is not part of it."""

    stage: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """All events of one step of one replica."""

    events: tuple[Event, ...]

    @property
    def stages(self) -> int:
        return 1 + max(event.stage for event in self.events)

    @property
    def begin(self) -> float:
        return min(event.start for event in self.events)

    @property
    def step_time(self) -> float:
        """From the first start to the last end of any stage."""
        return max(event.end for event in self.events) - self.begin

    @property
    def bubbles(self) -> list[float]:
        """Of every stage, the share of the step in which it computed nothing."""
        work = [0.0] * self.stages
        for event in self.events:
            work[event.stage] += event.end - event.start
        step_time = self.step_time
        return [1 - busy / step_time for busy in work]

    @property
    def bubble(self) -> float:
        """The mean over stages."""
        bubbles = self.bubbles
        return sum(bubbles) / len(bubbles)


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Write one stage's (or several stages') events to a file of JSON lines."""
    lines = (
        json.dumps(
            {
                "rank": event.stage,
                "op": event.op.kind,
                "microbatch": event.op.microbatch,
                "unit": event.op.unit,
                "start": event.start,
                "end": event.end,
            }
        )
        for event in events
    )
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


class TraceFolder:
    """Writes one stage's events, step by step: `step-000000/stage-0.jsonl` and so on."""

    def __init__(self, folder: Path, stage: int):
        self._folder, self._stage, self._step = folder, stage, 0

    def write(self, events: Iterable[Event]) -> None:
        """Events of the next step."""
        step = self._folder / f"step-{self._step:06d}"
        step.mkdir(parents=True, exist_ok=True)
        write_events(step / f"stage-{self._stage}.jsonl", events)
        self._step += 1


def read_trace(path: Path) -> Trace:
    """The events of a file, or of all `*.jsonl` files of a folder (one per stage).

    Raises:
        UserError: there is no such file or folder, no event in it, or a line that is not an event.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise UserError(f"{path}: no trace here; expected a file of JSON lines or a folder of *.jsonl files")
    events = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                op = Op(row["op"], row["microbatch"], row["unit"])
                events.append(Event(row["rank"], op, row["start"], row["end"]))
            except (ValueError, KeyError, TypeError) as error:
                keys = "rank, op, microbatch, unit, start, end"
                raise UserError(f"{file}:{number}: not an event ({error}); it has the keys {keys}") from None
    if not events:
        raise UserError(f"{path}: no event in it")
    return Trace(tuple(events))
