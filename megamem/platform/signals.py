"""Signals by which a launcher asks a run to stop: SIGTERM, and SIGUSR1 as Slurm sends it ahead of time.

The handler only takes note; the run looks where it can stop (`train/interrupt.py`). SIGINT keeps its meaning.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """What has been asked for, by a signal to this process or by another process.

    Attributes:
        by: who asked, for people; None until somebody does.
    """

    def __init__(self) -> None:
        self.by: str | None = None

    def ask(self, by: str) -> None:
        """Ask for a stop; the first to ask is remembered."""
        self.by = self.by or by

    def asked(self) -> bool:
        """Whether the run is to stop."""
        return self.by is not None


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Catch the stop signals inside the block; main thread only."""
    request = StopRequest()
    before = {
        number: signal.signal(number, lambda n, _: request.ask(signal.Signals(n).name)) for number in STOP_SIGNALS
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
