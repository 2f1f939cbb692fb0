"""Where a run that was asked to stop does so, on all ranks at the same place.

A request (a signal to any process, `platform/signals.py`) is looked at in two ways. `poll` stands inside work that
every model replica does at its own pace: sampling, scoring, rows of an update. The replica that sees the request gives
its work up. `agree` stands at the end of such work, before anything all replicas do together; there the others learn of
it. Both leave by `Interrupted`, on every rank, with the state of the last finished step.

What keeps this free of deadlocks: between a `poll` and the next `agree` no process meets one of another replica.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megamem.platform.groups import Groups


class Interrupted(Exception):
    """The run was asked to stop; the step under way is given up."""


class Interrupts:
    """The looks at a request to stop.

    Args:
        groups: the process grid.
        asked: whether this process knows of a request.

    Attributes:
        longest: seconds of the longest stretch without a look so far.
    """

    def __init__(self, groups: Groups, asked: Callable[[], bool] = lambda: False):
        self._groups, self._asked = groups, asked
        self._can_give_up = True
        self._looked: float | None = None
        self.longest = 0.0

    def poll(self) -> None:
        """Look within a model replica; a collective call of its ranks.

        Raises:
            Interrupted: one of them was asked to stop. All other ranks will be when they `agree`.
        """
        self._look()
        if self._can_give_up and self._groups.any_of_replica(self._asked()):
            self._groups.any(True)
            raise Interrupted

    def agree(self) -> None:
        """Look at all ranks; a collective call of the world.

        Raises:
            Interrupted: one of them was asked to stop.
        """
        self._look()
        if self._can_give_up and self._groups.any(self._asked()):
            raise Interrupted

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Nothing is given up inside: weights have changed, and the step has to be finished."""
        self._can_give_up = False
        try:
            yield
        finally:
            self._can_give_up = True

    def restart_clock(self) -> None:
        """What was done since the last look does not count."""
        self._looked = None

    def _look(self) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - (self._looked or now))
        self._looked = now
