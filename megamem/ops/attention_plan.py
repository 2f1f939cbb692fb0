"""From a layout to flash calls: pure integers, no tensors.

Every relation but `own_block` shows a query a prefix of the key segment, so an edge is a staircase. It is cut into
`Tile`s, the two shapes that a flash kernel serves without a mask: rectangles (every query sees every key) and aligned
squares with a causal triangle. Tiles of one shape at one spacing become one batched `Call`.

A block relation has one step per block. Steps are cut into rectangles in one of two ways, and a plan takes the one with
fewer calls:

    _rectangles  every step over all it sees: n calls for n steps, nothing to merge
    _halves      the later half of the steps over the keys of the earlier half, then both halves the same way;
                 rectangles of one size are one call: about log2(n) calls, whatever the block size

Measured on one CPU core, 4096 tokens, 8 heads, fp32, forward and backward, rectangles against halves: 9.2 s and 1.2 s
for 1024 steps of 4, 2.2 s and 1.3 s for 128 steps of 32 (a causal row: 1.3 s). A third way, causal squares of every
block-th query and key, one call per offset in a block, took 1.9 s and 4.1 s and had to copy the queries.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from megamem.layout.layout import Kind, Layout, Relation, Segment

# An edge whose segments need not lie in one row: the first counts from the first query of a plan, the second from the
# first key; positions are those of the sequence in both.
LooseEdge = tuple[Segment, Segment, Relation]


@dataclass(frozen=True)
class Tile:
    """Queries `[q, q + q_len)` of the row see keys `[k, k + k_len)`; if `causal`, q_len = k_len and i sees j <= i."""

    q: int
    q_len: int
    k: int
    k_len: int
    causal: bool


@dataclass(frozen=True)
class Call:
    """`count` equal tiles whose starts advance by `q_stride` and `k_stride` tokens: one batched kernel call."""

    first: Tile
    count: int
    q_stride: int
    k_stride: int

    def tiles(self) -> list[Tile]:
        """All of them."""
        f = self.first
        return [replace(f, q=f.q + i * self.q_stride, k=f.k + i * self.k_stride) for i in range(self.count)]


@dataclass(frozen=True)
class Plan:
    """All calls of some queries (a row, a chunk of it, new tokens) over keys (the row's, or the slots of a cache).

    Attributes:
        queries: number of queries; `Call.first.q` counts from the first of them.
        keys: number of keys, seen or not.
        merge: some query meets more than one call, so results merge by log-sum-exp.
    """

    queries: int
    keys: int
    calls: tuple[Call, ...]
    merge: bool


@dataclass(frozen=True)
class _Step:
    """Queries `[q, q + q_len)` that see the same keys: tokens `[first, seen)` of a segment."""

    q: int
    q_len: int
    first: int
    seen: int


def _causal_tiles(query: Segment, key: Segment) -> list[Tile]:
    """Key j is seen by query i iff j <= i + offset: keys before the diagonal, the square on it, rows past it."""
    offset = query.position - key.position
    skip = max(-offset, 0)  # queries that lie before the first key
    before = min(max(offset, 0), key.length)
    q, q_len = query.start + skip, query.length - skip
    k, k_len = key.start + before, key.length - before
    square = min(q_len, k_len)
    tiles = [
        Tile(q, q_len, key.start, before, False),
        Tile(q, square, k, square, square > 1),
        Tile(q + square, q_len - square, k, square, False),
    ]
    return [tile for tile in tiles if tile.q_len > 0 and tile.k_len > 0]


def _steps(query: Segment, key: Segment, relation: Relation) -> list[_Step]:
    """One per run of queries that see the same keys (at most one per block), without those that see none."""
    steps, i = [], 0
    while i < query.length:
        seen, j = relation.visible_keys(query.position + i, key), i + 1
        while j < query.length and relation.visible_keys(query.position + j, key) == seen:
            j += 1
        if seen != (0, 0):
            steps.append(_Step(query.start + i, j - i, *seen))
        i = j
    return steps


def _flights(steps: list[_Step], size: int) -> Iterator[list[_Step]]:
    """Longest runs of even steps: `size` queries each, and `size` more keys than the step before.

    A ragged step (of a block that a segment or a chunk cuts) is alone.
    """
    flight: list[_Step] = []
    for step in steps:
        follows = flight and step.seen == flight[-1].seen + size and step.q_len == flight[-1].q_len == size
        if flight and not (follows and flight[0].seen >= size):
            yield flight
            flight = []
        flight.append(step)
    if flight:
        yield flight


def _rectangles(flight: list[_Step], k: int) -> list[Tile]:
    """One per step. Keys start at `k`."""
    return [Tile(step.q, step.q_len, k + step.first, step.seen - step.first, False) for step in flight]


def _halves(flight: list[_Step], k: int) -> list[Tile]:
    """Keys that all steps see, then halves. Keys start at `k`."""

    def cut(first: int, last: int, base: int) -> list[Tile]:
        """Steps `[first, last)` over the keys from `base`, of which the first step sees one step's."""
        if last - first == 1:
            return [Tile(flight[first].q, size, k + base, size, False)]
        # A power of two of steps in the earlier half: rectangles of one size are then equally spaced.
        middle = first + (1 << ((last - first - 1).bit_length() - 1))
        keys = (middle - first) * size
        later = Tile(flight[middle].q, (last - middle) * size, k + base, keys, False)
        return [*cut(first, middle, base), later, *cut(middle, last, base + keys)]

    if len(flight) == 1:
        return _rectangles(flight, k)
    size, base = flight[0].q_len, flight[0].seen - flight[0].q_len
    before = [Tile(flight[0].q, len(flight) * size, k, base, False)] if base else []
    return [*before, *cut(0, len(flight), base)]


def _clipped(segment: Segment, start: int, stop: int) -> Segment:
    """Its tokens in `[start, stop)`, counted from `start`; without any its length is not positive."""
    first = max(segment.start, start)
    return Segment(first - start, min(segment.stop, stop) - first, segment.position + first - segment.start)


def _tiles(edges: Sequence[LooseEdge], cut: Callable[[list[_Step], int], list[Tile]]) -> list[Tile]:
    tiles: list[Tile] = []
    for query, key, relation in edges:
        if relation.kind is Kind.CAUSAL:
            tiles += _causal_tiles(query, key)
        elif relation.kind is Kind.OWN_BLOCK:
            tiles += _rectangles(_steps(query, key, relation), key.start)
        else:
            for flight in _flights(_steps(query, key, relation), relation.block):
                tiles += cut(flight, key.start)
    return tiles


def _join_adjacent_keys(tiles: list[Tile]) -> list[Tile]:
    """Rectangles over the same queries whose keys touch become one: a suffix and its prefix need no merge."""
    by_queries: dict[tuple[int, int], list[Tile]] = defaultdict(list)
    for tile in tiles:
        by_queries[tile.q, tile.q_len].append(tile)
    joined: list[Tile] = []
    for group in by_queries.values():
        for tile in sorted(group, key=lambda t: t.k):
            last = joined[-1] if joined else None
            touches = last and (last.q, last.q_len) == (tile.q, tile.q_len) and last.k + last.k_len == tile.k
            if touches and not tile.causal and not last.causal:
                joined[-1] = Tile(last.q, last.q_len, last.k, last.k_len + tile.k_len, False)
            else:
                joined.append(tile)
    return joined


def _join_adjacent_queries(tiles: list[Tile]) -> list[Tile]:
    """Rectangles over the same keys whose queries touch become one: all suffixes of a prefix meet it in one call."""
    by_keys: dict[tuple[int, int, bool], list[Tile]] = defaultdict(list)
    for tile in tiles:
        by_keys[tile.k, tile.k_len, tile.causal].append(tile)
    joined: list[Tile] = []
    for (_, _, causal), group in by_keys.items():
        for i, tile in enumerate(sorted(group, key=lambda t: t.q)):
            last = joined[-1] if i and not causal else None
            if last is not None and last.q + last.q_len == tile.q:
                joined[-1] = replace(last, q_len=last.q_len + tile.q_len)
            else:
                joined.append(tile)
    return joined


def _batch(tiles: list[Tile]) -> list[Call]:
    """Greedy runs of equal tiles at equal spacing."""
    by_shape: dict[tuple[int, int, bool], list[Tile]] = defaultdict(list)
    for tile in tiles:
        by_shape[tile.q_len, tile.k_len, tile.causal].append(tile)
    calls: list[Call] = []
    for group in by_shape.values():
        group.sort(key=lambda t: (t.q, t.k))
        i = 0
        while i < len(group):
            run, q_stride, k_stride = 1, 0, 0
            if i + 1 < len(group):
                q_stride, k_stride = group[i + 1].q - group[i].q, group[i + 1].k - group[i].k
            # Overlapping queries in one call would collide when its results are written.
            if q_stride >= group[i].q_len and k_stride >= group[i].k_len:
                while i + run < len(group) and (
                    group[i + run].q - group[i + run - 1].q,
                    group[i + run].k - group[i + run - 1].k,
                ) == (q_stride, k_stride):
                    run += 1
            calls.append(Call(group[i], run, q_stride if run > 1 else 0, k_stride if run > 1 else 0))
            i += run
    return calls


def _coverage(tiles: list[Tile], queries: int) -> list[int]:
    """How many tiles each query meets."""
    steps = [0] * (queries + 1)
    for tile in tiles:
        steps[tile.q] += 1
        steps[tile.q + tile.q_len] -= 1
    return list(accumulate(steps[:-1]))


@lru_cache(maxsize=4096)
def plan_attention(layout: Layout, start: int = 0, stop: int | None = None) -> Plan:
    """The flash calls of the queries `[start, stop)` of a layout (all of them by default) over all its keys.

    Raises:
        ValueError: one of these tokens sees nothing (its output would be undefined).
    """
    stop = layout.length if stop is None else stop
    edges = [
        (_clipped(layout.segments[edge.query], start, stop), layout.segments[edge.key], edge.relation)
        for edge in layout.edges
    ]
    return plan_edges([edge for edge in edges if edge[0].length > 0], stop - start, layout.length, start)


def plan_edges(edges: Sequence[LooseEdge], queries: int, keys: int, first: int = 0) -> Plan:
    """The flash calls of `queries` queries over `keys` keys, which need not be of one row.

    Args:
        edges: no two may join the same query and key.
        first: number of the first query, in messages.

    Raises:
        ValueError: a query sees nothing (its output would be undefined).
    """
    plans = []
    for cut in (_rectangles, _halves):
        tiles = _join_adjacent_queries(_join_adjacent_keys(_tiles(edges, cut)))
        covered = _coverage(tiles, queries)
        if 0 in covered:
            raise ValueError(f"token {first + covered.index(0)} of the row sees no token")
        plans.append(Plan(queries, keys, tuple(_batch(tiles)), merge=max(covered, default=0) > 1))
    return min(plans, key=lambda plan: len(plan.calls))


def keys_seen(plan: Plan) -> list[tuple[int, int]]:
    """Key ranges `[first, last)` that the queries of a plan see, one per tile."""
    return [(tile.k, tile.k + tile.k_len) for call in plan.calls for tile in call.tiles()]


def split_keys(call: Call, size: int) -> list[Call]:
    """The same pairs of tokens in calls over at most `size` keys each (causal squares stay whole)."""
    tile = call.first
    if tile.causal or tile.k_len <= size:
        return [call]
    return [
        replace(call, first=replace(tile, k=tile.k + begin, k_len=min(size, tile.k_len - begin)))
        for begin in range(0, tile.k_len, size)
    ]
