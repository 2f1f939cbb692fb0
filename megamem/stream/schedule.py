"""The order in which a pipeline stage runs the units of its micro-batches: pure integers (DESIGN section 3.4).

A *unit* is the smallest piece of a micro-batch that crosses a stage boundary alone: one chunk where chunks see only
earlier ones, the whole micro-batch where all see all. Forwards go through the units ascending, the backwards of a
micro-batch descending. With one unit per micro-batch and slack 1 this is the stock one-forward-one-backward order.

Why no order made here can deadlock: let h(g) be the forwards that the last stage has run before backward g. Stage r
has run min(N, h(g) + lead_r), and the lead does not grow with r. So one can execute rounds g = 0, 1, ...: all stages'
forwards up to that number, upstream first, then backward g of every stage, downstream first. Every wait points
backwards in that list. Advancing one forward at a time inside a round, an edge holds at most slack + 1 forwards and one
backward: two receive slots and `sends_in_flight` sends are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Literal

RECEIVES_AHEAD = 1
"""Receives posted ahead per edge: with the message being read, two slots. Each slot holds one unit's [S_unit, 1, H];
more slots gain nothing once sends do not block, and with one hardware queue per device they can deadlock."""


@dataclass(frozen=True)
class Op:
    """One unit of one micro-batch through all layers of a stage."""

    kind: Literal["forward", "backward"]
    microbatch: int
    unit: int


def stage_order(
    units: Sequence[int],
    stage: int,
    stages: int,
    slack: int,
    forward_only: bool = False,
    prefixes: Sequence[int | None] | None = None,
) -> list[Op]:
    """What one stage runs, in order.

    Args:
        units: number of units of every micro-batch (they may differ), the same on all stages.
        stage: this stage, 0 is the first.
        stages: number of stages.
        slack: forwards by which a stage runs ahead of the next one; one number for the whole replica.
        forward_only: no backwards (evaluation).
        prefixes: of every micro-batch, the one before it whose keys and values it sees, or None. A prefix goes
            backward after the last micro-batch that sees it.
    """
    assert units and min(units) >= 1 and 0 <= stage < stages and slack >= 1, (units, stage, stages, slack)
    forwards = [Op("forward", k, i) for k, count in enumerate(units) for i in range(count)]
    if forward_only:
        return forwards
    through = list(accumulate(units))
    lead = slack * (stages - 1 - stage)
    order: list[Op] = []
    ran, last_ran = 0, None
    for k in _backward_order(len(units), prefixes):
        for i in reversed(range(units[k])):
            # Forwards that the last stage has run before this backward: one more, and all of micro-batch k.
            last_ran = min(len(forwards), through[k] if last_ran is None else max(last_ran + 1, through[k]))
            upto = min(len(forwards), last_ran + lead)
            order += [*forwards[ran:upto], Op("backward", k, i)]
            ran = max(ran, upto)
    return order


def _backward_order(count: int, prefixes: Sequence[int | None] | None) -> list[int]:
    if prefixes is None:
        return list(range(count))
    last_reader = {prefix: k for k, prefix in enumerate(prefixes) if prefix is not None}
    order: list[int] = []
    for k, prefix in enumerate(prefixes):
        if k not in last_reader:
            order.append(k)
        if prefix is not None and last_reader[prefix] == k:
            order.append(prefix)
    return order


def choose_slack(units: Sequence[int], forward_costs: Sequence[float]) -> int:
    """The slack that hides unequal unit costs: s = min(max D, ceil(2 f_max / f_mean)), 1 if nothing is cut.

    Args:
        units: number of units of every micro-batch.
        forward_costs: forward cost of every unit of the replica's rows, any unit of measure.

    A causal row's last stage pairs cheap early forwards with dear late backwards, the others pair different ones; with
    too little lead they wait for each other in every step. More lead than this only costs memory.
    """
    assert len(forward_costs) == sum(units) and min(forward_costs) > 0, (units, forward_costs)
    most = max(units)
    mean = sum(forward_costs) / len(forward_costs)
    # Rounded, so that equal costs give 2 and not 3 by a last bit.
    return 1 if most == 1 else min(most, ceil(round(2 * max(forward_costs) / mean, 9)))


def sends_in_flight(slack: int) -> int:
    """Unfinished sends an edge may have before the sender waits: with two receive slots, room for slack + 1 units."""
    assert slack >= 1, slack
    return max(2, slack - 1)
