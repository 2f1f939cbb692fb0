"""Which ranks are slow: their own seconds in phases that all ranks end together, and a fixed piece of work.

A replica with longer responses is slow by right; the probe tells that from slow hardware.
"""

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamem.platform.device import Device
from megamem.platform.groups import Groups

_SIZE, _REPEATS = 512, 8  # a few milliseconds on a CPU core; a GPU's queue is long enough to see its clock


@dataclass(frozen=True)
class RankTimes:
    """One rank's own seconds by phase, and its `probe`."""

    host: str
    seconds: Mapping[str, float]


def straggler_report(times: Sequence[RankTimes]) -> str:
    """For every phase the slowest rank against the median of all.

    Args:
        times: of each rank; all know the same phases.
    """
    parts = []
    for phase in times[0].seconds:
        seconds = [t.seconds[phase] for t in times]
        median = statistics.median(seconds)
        slowest = max(range(len(times)), key=seconds.__getitem__)
        ratio = seconds[slowest] / max(median, 1e-9)
        parts.append(f"{phase} rank {slowest} ({times[slowest].host}) {ratio:.2f} x of {median:.3g} s")
    return "; ".join(parts)


def gather_times(own: Mapping[str, float], groups: Groups) -> list[RankTimes]:
    """Every rank's times; a collective call."""
    mine = RankTimes(socket.gethostname(), {**own, "probe": probe(groups.device)})
    times = [mine] * groups.world
    if groups.world > 1:
        dist.all_gather_object(times, mine)
    return times


def probe(device: Device) -> float:
    """Seconds of the same matrix products on every rank."""
    x_NN = torch.ones(_SIZE, _SIZE, device=device.torch)
    x_NN @ x_NN  # the first one sets up
    started = device.time()
    for _ in range(_REPEATS):
        x_NN @ x_NN
    return device.time() - started
