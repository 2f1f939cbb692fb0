"""A pipeline stage runs its program: units in, units out (DESIGN section 3.4).

Nothing about shapes or order is exchanged: both come from the layouts, which every stage knows. One receive is posted
ahead per edge, a few sends are in flight, and a stage waits for nothing but its neighbours' units
(`stream/schedule.py` has the order and why it cannot deadlock).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.platform.groups import Link, StageLinks
from megamem.stream.schedule import RECEIVES_AHEAD, Op, sends_in_flight
from megamem.stream.trace import Event


class Stage(Protocol):
    """What a stage does with a unit of a micro-batch; tensors are `[tokens of the unit on this rank, 1, H]`."""

    def shape(self, microbatch: int, unit: int) -> tuple[int, ...]:
        """Of the unit's hidden states and of their gradient."""

    def forward(self, microbatch: int, unit: int, x: Tensor | None) -> Tensor | None:
        """Hidden states for the next stage (None on the last) from the previous stage's (None on the first)."""

    def backward(self, microbatch: int, unit: int, dy: Tensor | None) -> Tensor | None:
        """Gradient for the previous stage (None on the first) from the next stage's (None on the last)."""


def run_stage(
    program: Sequence[Op],
    stage: Stage,
    links: StageLinks,
    slack: int,
    dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float] = time.time,
) -> list[Event]:
    """Run the program of one stage; returns when each op computed (without waiting), by `clock`, as stage 0's.

    Args:
        program: from `schedule.stage_order`, for the same micro-batches, units and slack on all stages.
        links: to the neighbours.
        dtype: of hidden states and their gradients.
    """

    def shapes(kind: str) -> Iterable[tuple[int, ...]]:
        return (stage.shape(op.microbatch, op.unit) for op in program if op.kind == kind)

    inbox = {
        "forward": _Inbox(links.forward_in, shapes("forward"), dtype, device),
        "backward": _Inbox(links.backward_in, shapes("backward"), dtype, device),
    }
    outbox = {
        "forward": _Outbox(links.forward_out, sends_in_flight(slack)),
        "backward": _Outbox(links.backward_out, sends_in_flight(slack)),
    }
    compute = {"forward": stage.forward, "backward": stage.backward}
    events = []
    for op in program:
        given = inbox[op.kind].receive()
        start = clock()
        result = compute[op.kind](op.microbatch, op.unit, given)
        events.append(Event(0, op, start, clock()))
        del given
        outbox[op.kind].send(result)
    for box in outbox.values():
        box.drain()
    return events


class _Inbox:
    """Messages of one edge in order, with receives posted ahead."""

    def __init__(self, link: Link | None, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, device: torch.device):
        self._link, self._shapes, self._dtype, self._device = link, iter(shapes), dtype, device
        self._posted: deque[tuple[Tensor, dist.Work]] = deque()
        for _ in range(RECEIVES_AHEAD):
            self._post()

    def receive(self) -> Tensor | None:
        if self._link is None:
            return None
        self._post()
        tensor, work = self._posted.popleft()
        work.wait()
        return tensor

    def _post(self) -> None:
        shape = None if self._link is None else next(self._shapes, None)
        if shape is not None:
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._posted.append((tensor, dist.irecv(tensor, self._link.peer, self._link.group)))


class _Outbox:
    """Sends of one edge; tensors are kept until they are gone."""

    def __init__(self, link: Link | None, in_flight: int):
        self._link, self._in_flight = link, in_flight
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()

    def send(self, tensor: Tensor | None) -> None:
        if self._link is None:
            return
        tensor = tensor.contiguous()
        self._sent.append((tensor, dist.isend(tensor, self._link.peer, self._link.group)))
        self._wait(self._in_flight)

    def drain(self) -> None:
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._sent) > left:
            self._sent.popleft()[1].wait()
