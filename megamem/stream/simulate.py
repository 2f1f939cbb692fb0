"""A pipeline on paper: when every stage runs every unit, given costs, links and bounded buffers; or that it never ends.

Semantics of the engine's transport. A directed edge (one per neighbour and direction) is a FIFO. A stage that comes to
an op posts the receive of the message `receives_ahead` after the op's own, then waits for its own; after the op it
issues the send and goes on once at most `sends` of the edge are unfinished. A message moves when it is sent, its
receive is posted and the link is free. Nothing competes for an edge, so times follow by propagation and need no event
queue, and whether a program ends does not depend on the costs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megamem.layout.layout import Layout
from megamem.stream.schedule import RECEIVES_AHEAD, Op, choose_slack, sends_in_flight, stage_order
from megamem.stream.trace import Event, Trace

# Work of a backward with full recompute per unit of forward work: linear parts run again, then the gradients of their
# input and weight; attention is computed again and its flash backward is 2.5 times that.
LINEAR_BACKWARD, ATTENTION_BACKWARD = 3.0, 3.5


@dataclass(frozen=True)
class UnitCost:
    """One unit through one layer: time of forward and backward, and its length, which its messages have too."""

    forward: float
    backward: float
    length: float


@dataclass(frozen=True)
class Transfer:
    """A message of length x keeps its link busy for `per_length * x` and arrives `latency` later."""

    per_length: float = 0.0
    latency: float = 0.0


INSTANT = Transfer()


@dataclass(frozen=True)
class Buffers:
    """Receives posted ahead and unfinished sends allowed, per directed edge."""

    receives_ahead: int
    sends: int


class Deadlock(RuntimeError):
    """The stages wait for each other; the message says which waits for what."""


class _Edge:
    """The messages from one stage to a neighbour, in order; every list is indexed by message."""

    def __init__(self, receives_ahead: int, transfer: Transfer) -> None:
        self.transfer = transfer
        self.posted = [0.0] * receives_ahead
        self.sent: list[tuple[float, UnitCost, Op]] = []
        self.delivered: list[float] = []
        self.free = 0.0

    def post(self, now: float) -> None:
        self.posted.append(now)
        self._move()

    def send(self, now: float, cost: UnitCost, op: Op) -> None:
        self.sent.append((now, cost, op))
        self._move()

    def _move(self) -> None:
        for n in range(len(self.delivered), min(len(self.posted), len(self.sent))):
            now, cost, _ = self.sent[n]
            self.free = max(now, self.posted[n], self.free) + self.transfer.per_length * cost.length
            self.delivered.append(self.free + self.transfer.latency)


@dataclass(frozen=True)
class _Wait:
    """A stage that comes to `op` goes on once message `index` of an edge is delivered; without an edge, never."""

    stage: int
    op: Op
    edge: _Edge | None
    index: int
    why: str

    def over(self) -> bool:
        return self.edge is not None and self.index < len(self.edge.delivered)

    def __str__(self) -> str:
        what = f"{self.op.kind} of micro-batch {self.op.microbatch}, unit {self.op.unit}"
        return f"stage {self.stage}, {what}: waits {self.why}"


def _run_stage(
    stage: int,
    program: Sequence[Op],
    cost_of: Callable[[int, Op], tuple[UnitCost, float]],
    edges: dict[tuple[int, int], _Edge],
    sends: int,
    events: list[Event],
) -> Iterator[_Wait]:
    """Run a stage's program; yield where it has to wait for another stage."""
    now, ran = 0.0, set()
    taken = {"forward": 0, "backward": 0}
    for op in program:
        step = 1 if op.kind == "forward" else -1
        inbox, outbox = edges.get((stage - step, stage)), edges.get((stage, stage + step))
        cost, duration = cost_of(stage, op)
        if inbox is not None:
            n = taken[op.kind]
            taken[op.kind] += 1
            inbox.post(now)
            if n >= len(inbox.delivered):
                yield _Wait(stage, op, inbox, n, f"for it from stage {stage - step}")
            assert inbox.sent[n][2] == op, f"stage {stage} wants {op}, stage {stage - step} sent {inbox.sent[n][2]}"
            now = max(now, inbox.delivered[n])
        elif op.kind == "backward" and Op("forward", op.microbatch, op.unit) not in ran:
            yield _Wait(stage, op, None, 0, "for its own forward")
        events.append(Event(stage, op, now, now + duration))
        ran.add(op)
        now += duration
        if outbox is not None:
            outbox.send(now, cost, op)
            n = len(outbox.sent) - 1 - sends
            if n >= len(outbox.delivered):
                yield _Wait(stage, op, outbox, n, f"for a free send slot to stage {stage + step}")
            now = max(now, outbox.delivered[n]) if n >= 0 else now


def run_programs(
    programs: Sequence[Sequence[Op]],
    costs: Sequence[Sequence[UnitCost]],
    layers: Sequence[float],
    buffers: Buffers,
    transfer: Transfer,
) -> Trace:
    """Run one program per stage.

    Args:
        programs: of every stage, its ops in order.
        costs: of every micro-batch, the cost of its units in one layer, in forward order.
        layers: layers of every stage (a head can be counted as some layers of the last one).
        buffers: of every edge.
        transfer: of every edge.

    Raises:
        Deadlock: the programs cannot finish.
    """
    stages = len(programs)
    assert stages == len(layers), (stages, layers)
    pairs = [(r, r + step) for r in range(stages) for step in (1, -1) if 0 <= r + step < stages]
    edges = {pair: _Edge(buffers.receives_ahead, transfer) for pair in pairs}
    events: list[Event] = []

    def cost_of(stage: int, op: Op) -> tuple[UnitCost, float]:
        cost = costs[op.microbatch][op.unit]
        return cost, layers[stage] * (cost.forward if op.kind == "forward" else cost.backward)

    running = [
        _run_stage(stage, program, cost_of, edges, buffers.sends, events) for stage, program in enumerate(programs)
    ]
    waits: dict[int, _Wait | None] = {stage: next(run, None) for stage, run in enumerate(running)}
    while waits := {stage: wait for stage, wait in waits.items() if wait is not None}:
        ready = [stage for stage, wait in waits.items() if wait.over()]
        if not ready:
            raise Deadlock("\n".join(str(wait) for wait in waits.values()))
        for stage in ready:
            waits[stage] = next(running[stage], None)
    return Trace(tuple(events))


def simulate(
    costs: Sequence[Sequence[UnitCost]],
    layers: Sequence[float],
    slack: int | None = None,
    transfer: Transfer = INSTANT,
    buffers: Buffers | None = None,
    forward_only: bool = False,
    prefixes: Sequence[int | None] | None = None,
) -> Trace:
    """One step of one replica in the order of `stage_order`, with the engine's buffers unless others are given.

    Args:
        costs, layers, transfer: as in `run_programs`; the number of stages is `len(layers)`.
        slack: by default what `choose_slack` gives for these costs.
        forward_only, prefixes: as in `stage_order`.

    Raises:
        Deadlock: the buffers are too few.
    """
    units = [len(row) for row in costs]
    slack = choose_slack(units, [unit.forward for row in costs for unit in row]) if slack is None else slack
    order = partial(stage_order, units, stages=len(layers), slack=slack, forward_only=forward_only, prefixes=prefixes)
    programs = [order(stage=stage) for stage in range(len(layers))]
    buffers = buffers or Buffers(RECEIVES_AHEAD, sends_in_flight(slack))
    return run_programs(programs, costs, layers, buffers, transfer)


def one_forward_one_backward(
    costs: Sequence[Sequence[UnitCost]],
    layers: Sequence[float],
    transfer: Transfer = INSTANT,
) -> Trace:
    """The stock schedule over the same work: every micro-batch is one unit."""
    return simulate([[joined(row)] for row in costs], layers, 1, transfer)


def check_deadlock(
    units: Sequence[int],
    stages: int,
    slack: int,
    buffers: Buffers | None = None,
    prefixes: Sequence[int | None] | None = None,
) -> None:
    """Refuse an order before a run starts with it; takes milliseconds.

    Raises:
        Deadlock: it cannot finish with these buffers (the engine's by default), whatever the costs.
    """
    one = UnitCost(1.0, 1.0, 1.0)
    simulate([[one] * count for count in units], [1.0] * stages, slack, buffers=buffers, prefixes=prefixes)


def joined(units: Sequence[UnitCost]) -> UnitCost:
    """Several chunks as one unit."""
    return UnitCost(
        sum(unit.forward for unit in units), sum(unit.backward for unit in units), sum(unit.length for unit in units)
    )


def unit_cost(linear: float, attention: float, length: float) -> UnitCost:
    """A unit from its linear and its attention forward work, with full recompute in the backward."""
    return UnitCost(linear + attention, LINEAR_BACKWARD * linear + ATTENTION_BACKWARD * attention, length)


# Attention of chunk i = 1 … D as a share of the whole row's.
ATTENTION: dict[str, Callable[[int, int], float]] = {
    "flat": lambda i, chunks: 1 / chunks,
    "causal": lambda i, chunks: (2 * i - 1) / chunks**2,
    "block": lambda i, chunks: 2 * i / chunks**2,  # blocks of one chunk: the square on the diagonal is whole
    "full": lambda i, chunks: 1 / chunks,
}


def chunk_costs(kind: str, chunks: int, attention_share: float) -> list[UnitCost]:
    """Units of a row of length 1 in `chunks` equal chunks; one layer's forward is 1, of which a share is attention.

    Args:
        kind: a key of `ATTENTION`. With "full", chunks see each other both ways and the row is one unit.
    """
    units = [
        unit_cost((1 - attention_share) / chunks, attention_share * ATTENTION[kind](i, chunks), 1 / chunks)
        for i in range(1, chunks + 1)
    ]
    return [joined(units)] if kind == "full" else units


def layout_costs(
    layout: Layout,
    spans: Sequence[tuple[int, int]],
    units: Sequence[Sequence[int]],
    token: float,
    pair: float,
) -> list[UnitCost]:
    """Units of a real row, attention counted from its layout.

    Args:
        layout: the row.
        spans: row ranges `[start, stop)` of its chunks (`ChunkGrid.spans`).
        units: chunk indices of every unit, in forward order (for example `range(0, 2)`).
        token: forward cost of one token's linear work in a layer.
        pair: forward cost of one visible pair in a layer. For a share a of attention over a row of S tokens and p
            pairs it is token * a / (1 - a) * S / p.

    Returns:
        Costs whose lengths are in tokens.
    """
    chunks = [
        unit_cost(token * (stop - start), pair * layout.visible_pairs(start, stop), stop - start)
        for start, stop in spans
    ]
    return [joined([chunks[i] for i in unit]) for unit in units]
