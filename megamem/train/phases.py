"""What a process is doing, named once: timed, told to the watch, and marked in profiles.

The phases of a step: `rollout`, `reward`, `old_logprobs`, `update`, `checkpoint`, `evaluate`. They do not nest.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megamem.platform.device import Device


class Phases:
    """Phases of this process.

    Args:
        device: whose queued work belongs to the phase that queued it.
        pulse: told every operation that begins, and without a name that one goes on (`platform.watch.Watch.pulse`).

    Attributes:
        what: the phase, or `after` the last one.
    """

    def __init__(self, device: Device, pulse: Callable[[str | None], None] = lambda what: None):
        self._device, self._pulse = device, pulse
        self.what = "start"
        self._name, self._started = "", 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._own: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Inside is the phase `name`."""
        self._begin(name)
        self._name, self._started = name, self._device.time()
        with torch.profiler.record_function(f"megamem/{name}"):
            yield
        self._seconds[name] += self._device.time() - self._started
        self._begin(f"after {name}")

    def _begin(self, what: str) -> None:
        self.what = what
        self._pulse(what)

    def goes_on(self) -> None:
        """The phase makes progress."""
        self._pulse(None)

    def waits(self) -> None:
        """From here on the phase may wait for other replicas."""
        self._own[self._name] += self._device.time() - self._started

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        return _take(self._seconds)

    def take_own(self) -> dict[str, float]:
        """Seconds before `waits`, by phase, since the last call."""
        return _take(self._own)


def _take(seconds: dict[str, float]) -> dict[str, float]:
    taken = dict(seconds)
    seconds.clear()
    return taken
