"""Processes that watch each other while their main threads compute or wait.

Every process publishes once a second, in the store of the rendezvous, what it does and since when. From that come
three things that no collective can give: a stop asked of one process reaches all, a process that fails ends the others
at once and is the only one to print a traceback, and a process that hangs is named with its last operation.

One thread talks to the store. Its calls can block for good when the process that serves the store is stopped, so a
second one, which only looks at the clock and at what was read, judges and ends the process.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType

from megamem.errors import UserError
from megamem.platform.groups import Groups
from megamem.platform.signals import StopRequest

_FAILED, _HUNG, _STOP = "megamem/failed", "megamem/hung", "megamem/stop"
_LEAVE = 2.0  # seconds for a main thread to end by itself, and for the one that tells why, once the job is lost


@dataclass(frozen=True)
class Pulse:
    """What a process last published.

    Attributes:
        beat: counts publications: a stopped process has none.
        age: seconds since the process got on with its work.
        what: its last operation.
        where: innermost line of its main thread outside of torch.
        waits: its main thread is inside torch.distributed.
        host, pid: where it runs.
    """

    beat: int
    age: float
    what: str
    where: str
    waits: bool
    host: str
    pid: int


def judge(before: Sequence[Pulse], after: Sequence[Pulse], timeout: float) -> str | None:
    """Who holds up a job that has not moved, from two looks at all ranks some beats apart; None if somebody moves.

    A rank that does not answer is named first, else those that do not wait for others.
    """
    silent = [rank for rank, (a, b) in enumerate(zip(before, after, strict=True)) if a.beat == b.beat]
    if any(pulse.age < timeout for rank, pulse in enumerate(after) if rank not in silent):
        return None
    busy = [rank for rank, pulse in enumerate(after) if rank not in silent and not pulse.waits]
    named = silent or busy or range(len(after))
    lines = [
        f"rank {rank} ({after[rank].host}, process {after[rank].pid}) "
        + ("does not answer" if rank in silent else "hangs" if rank in busy else "waits")
        + f"; its last operation: {after[rank].what}, at {after[rank].where}"
        for rank in list(named)[:8]
    ]
    others = sorted({p.what for rank, p in enumerate(after) if rank not in named})
    told = f"no progress for {timeout:g} s; " + "\n".join(lines)
    return told + (f"\nthe others are in: {', '.join(others)}" if others else "")


class Watch:
    """This process's part of the watch; a context manager around the job's work.

    An exception that leaves the block is told by the first process that has one, then the process ends: status 2 for a
    `UserError`, 1 otherwise. Without one, leaving the block is a collective call.

    Args:
        groups: with the store to meet in.
        request: where a stop asked of another process arrives, and one asked here is seen.
        timeout: seconds without progress of any rank after which the job counts as hung.
        interval: seconds between beats.
    """

    def __init__(self, groups: Groups, request: StopRequest, timeout: float, interval: float = 1.0):
        self._groups, self._request, self._timeout = groups, request, timeout
        self._interval = min(interval, timeout / 10)
        self._what, self._moved, self._beat = "start", time.monotonic(), 0
        self._store = groups.store.clone()
        self._own_store = groups.store.clone()  # of the main thread: a call must not wait for one that blocks
        self._answered = time.monotonic()
        self._lost: str | None = None  # why the job is over; empty where another process tells it
        self._closing = False
        self._main = threading.get_ident()

    def pulse(self, what: str | None = None) -> None:
        """This process gets on: it begins operation `what`, or goes on with the last one."""
        self._what, self._moved = what or self._what, time.monotonic()

    def __enter__(self) -> "Watch":
        if self._groups.world > 1:
            self._publish()
            for work in (self._talk, self._look):
                threading.Thread(target=work, daemon=True, name=f"megamem{work.__name__}").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._closing = True
        if error is None:
            self._groups.barrier()
        elif self._groups.world > 1 and not isinstance(error, SystemExit):
            self._end(error)
        return False

    def _end(self, error: BaseException) -> None:
        """Tell, if nobody has, and leave; tearing groups down could wait for processes that are gone."""
        if self._first(_FAILED):
            told = f"megamem: {error}" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
            _say(told if isinstance(error, UserError) else f"megamem: rank {self._groups.world_rank} failed\n{told}")
        os._exit(2 if isinstance(error, UserError) else 1)

    def _first(self, key: str) -> bool:
        try:
            return self._own_store.add(key, 1) == 1
        except Exception:  # the process that served the store is gone, and has told why
            return False

    # --- the thread that talks ----------------------------------------------------------------------------------------

    def _talk(self) -> None:
        while not self._closing:
            try:
                self._publish()
                if self._request.asked():
                    self._store.set(_STOP, str(self._request.by))
                elif self._store.check([_STOP]):
                    self._request.ask(self._store.get(_STOP).decode())
                if self._store.check([_FAILED]) or self._store.check([_HUNG]):
                    self._lost = ""
                elif time.monotonic() - self._moved > self._timeout:
                    self._look_around()
            except Exception as error:
                if not self._closing:
                    self._lost = f"the process that serves the rendezvous is gone ({type(error).__name__})"
                return
            self._answered = time.monotonic()
            time.sleep(self._interval)

    def _publish(self) -> None:
        self._beat += 1
        where, waits = _place(sys._current_frames().get(self._main))
        age = time.monotonic() - self._moved
        pulse = Pulse(self._beat, age, self._what, where, waits, socket.gethostname(), os.getpid())
        self._store.set(f"megamem/pulse/{self._groups.world_rank}", json.dumps(asdict(pulse)))

    def _pulses(self) -> list[Pulse]:
        keys = [f"megamem/pulse/{rank}" for rank in range(self._groups.world)]
        return [Pulse(**json.loads(value)) for value in self._store.multi_get(keys)]

    def _look_around(self) -> None:
        before = self._pulses()
        for _ in range(4):  # go on beating meanwhile: others look, too
            time.sleep(self._interval)
            self._publish()
        after = self._pulses()
        told = judge(before, after, self._timeout)
        if told is None:
            return
        if self._store.add(_HUNG, 1) == 1:
            _say(f"megamem: {told}")
        self._lost = ""
        for old, new in zip(before, after, strict=True):
            if old.beat == new.beat and new.host == socket.gethostname():
                _kill(new.pid)  # a stopped process would keep its launcher waiting

    # --- the thread that looks ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        patience = self._timeout + 30 * self._interval
        while not self._closing:
            time.sleep(self._interval)
            if self._lost is None and time.monotonic() - self._answered > patience:
                self._lost = f"the rendezvous has not answered for {patience:.0f} s; is the node of rank 0 gone?"
            if self._lost is not None:
                time.sleep(_LEAVE)
                if self._closing:  # the main thread noticed by itself
                    return
                if self._lost and self._groups.world_rank == 1:
                    _say(f"megamem: rank 1: {self._lost}")
                os._exit(1)


def _place(frame: FrameType | None) -> tuple[str, bool]:
    """Innermost line outside of torch, and whether it waits in torch.distributed."""
    waits = False
    while frame is not None:
        name = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in name:
            return f"{os.path.basename(name)}:{frame.f_lineno} {frame.f_code.co_name}", waits
        waits |= f"{os.sep}distributed{os.sep}" in name
        frame = frame.f_back
    return "?", waits


def _say(text: str) -> None:
    sys.stderr.write(text.rstrip() + "\n")
    sys.stderr.flush()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
