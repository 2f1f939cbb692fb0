"""How the bytes of a step grow with its size, from a few small steps. Pure numbers, no tensors.

Every place that allocates (`step.Footprint.peaks`) is described alone, because a maximum over places bends where
another one overtakes. At a place, bytes are, with S tokens of a row, L layers on the stage and k rows in flight,

    f(S, L, k) = g(S) + S * (layer * (L - base) + (row + row_layer * (L - base)) * (k - 1) + steady)

where g is piecewise linear and soon straight (a chunk's own buffers stay, the row's grow), and `steady` counts what
neighbouring pipeline stages send ahead once there are more rows than may be in flight. `base` is two layers: the first
layer of a stage is not like those after it. Below the first measured length, f is that of the first.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from megamem.plan.step import Footprint, Place

Name = Place | str  # a place, or another number of a footprint


def numbers(found: Footprint) -> dict[Name, int]:
    """What of a footprint grows."""
    return {"saved": found.saved, "host": found.host, **found.peaks}


@dataclass(frozen=True)
class Growth:
    """One such f, in bytes (per token where it says so).

    Attributes:
        points: (tokens, bytes) of `base` layers and one row, ascending.
        base: layers.
        layer, row, row_layer, steady: per token, as above.
    """

    points: tuple[tuple[int, float], ...]
    base: int
    layer: float = 0.0
    row: float = 0.0
    row_layer: float = 0.0
    steady: float = 0.0

    def at(self, tokens: int, layers: int, in_flight: int = 1, more_rows: bool = False) -> float:
        """Bytes of a step; `more_rows`: the step has more rows than are in flight."""
        tokens = max(tokens, self.points[0][0])
        more = layers - self.base
        per_token = self.layer * more + (self.row + self.row_layer * more) * (in_flight - 1)
        return self._straight(tokens) + tokens * (per_token + self.steady * more_rows)

    def _straight(self, tokens: int) -> float:
        if len(self.points) == 1:
            return self.points[0][1]
        i = min(bisect_right([s for s, _ in self.points], tokens), len(self.points) - 1)
        (s0, f0), (s1, f1) = self.points[i - 1 : i + 1]
        return f0 + (f1 - f0) * (tokens - s0) / (s1 - s0)


def fit(
    measure: Callable[[int, int, int], Footprint], lengths: Sequence[int], layers: int, in_flight: int, rows: int
) -> dict[Name, Growth]:
    """Measure small steps and describe how each of `numbers` grows.

    Args:
        measure: (tokens of a row, layers on the stage, rows) -> what was found; with a pipeline, one of two stages.
        lengths: row lengths, ascending, at least two; from the last but one on, g should be straight.
        layers: on the stage.
        in_flight: rows that the stage may hold at a time (1 on the last stage and without a pipeline).
        rows: rows of the step; more than 1 only matters to a pipeline.
    """
    measure = cache(measure)
    base, short, middle = min(2, layers), lengths[0], lengths[-2]
    alone = {s: numbers(measure(s, base, 1)) for s in lengths}
    deeper = numbers(measure(middle, base + 1, 1)) if layers > base else alone[middle]
    pair = (
        [numbers(measure(short, base + more, 2)) for more in (0, layers > base)] if min(in_flight, rows) > 1 else None
    )
    # Two stages hold at most two rows; two more rows show what is sent ahead.
    stream = numbers(measure(short, base, min(in_flight, 2) + 2)) if rows > in_flight else None

    def growth(name: Name) -> Growth:
        points = tuple((s, float(n[name])) for s, n in alone.items() if name in n)
        at_short = alone[short].get(name, points[0][1])

        def more(than: float, found: Mapping[Name, int] | None, tokens: int) -> float:
            return (found[name] - than) / tokens if found and name in found else 0.0

        layer = more(alone[middle].get(name, 0), deeper, middle)
        row = more(at_short, pair and pair[0], short)
        row_layer = more(pair[0][name], pair[1], short) - layer if pair and name in pair[0] and layers > base else 0.0
        steady = more(at_short, stream, short) - row * (min(in_flight, 2) - 1) if stream else 0.0
        return Growth(points, base, layer, row, row_layer, steady)

    return {name: growth(name) for name in alone[lengths[-1]]}
