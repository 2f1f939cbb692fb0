"""From a layout to flash calls: pure integers, no tensors.

Every relation shows a query a prefix of the key segment, so an edge is a staircase. It is cut into `Tile`s, the two
shapes that a flash kernel serves without a mask: rectangles (every query sees every key) and aligned squares with a
causal triangle. Tiles of one shape at one spacing become one batched `Call`.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from megamem.layout.layout import Kind, Layout, Relation, Segment


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


@dataclass(frozen=True)
class Plan:
    """All calls of a range of queries (a whole row, or a chunk of it) over the row's keys.

    Attributes:
        queries: number of queries; `Call.first.q` counts from the first of them.
        keys: tokens of the row.
        merge: some query meets more than one call, so results merge by log-sum-exp.
    """

    queries: int
    keys: int
    calls: tuple[Call, ...]
    merge: bool


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
        Tile(q, square, k, square, True),
        Tile(q + square, q_len - square, k, square, False),
    ]
    return [tile for tile in tiles if tile.q_len > 0 and tile.k_len > 0]


def _staircase_tiles(query: Segment, key: Segment, relation: Relation) -> list[Tile]:
    """One rectangle per run of queries that see the same keys: at most one per block."""
    tiles, i = [], 0
    while i < query.length:
        seen, j = relation.visible_keys(query.position + i, key), i + 1
        while j < query.length and relation.visible_keys(query.position + j, key) == seen:
            j += 1
        if seen:
            tiles.append(Tile(query.start + i, j - i, key.start, seen, False))
        i = j
    return tiles


def _tiles(layout: Layout) -> list[Tile]:
    tiles: list[Tile] = []
    for edge in layout.edges:
        query, key = layout.segments[edge.query], layout.segments[edge.key]
        causal = edge.relation.kind is Kind.CAUSAL
        tiles += _causal_tiles(query, key) if causal else _staircase_tiles(query, key, edge.relation)
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


def _restrict(tile: Tile, start: int, stop: int) -> list[Tile]:
    """The part of a tile whose queries lie in `[start, stop)`, with queries counted from `start`.

    Rows of a causal square see a rectangle (the keys before them) and a smaller square.
    """
    first, last = max(tile.q, start), min(tile.q + tile.q_len, stop)
    if first >= last:
        return []
    if not tile.causal:
        return [Tile(first - start, last - first, tile.k, tile.k_len, False)]
    before, rows = first - tile.q, last - first
    square = Tile(first - start, rows, tile.k + before, rows, True)
    return [Tile(first - start, rows, tile.k, before, False), square] if before else [square]


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
    tiles = _join_adjacent_keys([part for tile in _tiles(layout) for part in _restrict(tile, start, stop)])
    covered = _coverage(tiles, stop - start)
    if 0 in covered:
        raise ValueError(f"token {start + covered.index(0)} of the row sees no token")
    return Plan(stop - start, layout.length, tuple(_batch(tiles)), merge=max(covered) > 1)


def keys_seen(plan: Plan) -> list[tuple[int, int]]:
    """Key ranges `[first, last)` that the queries of a plan see, one per tile."""
    return [
        (c.first.k + i * c.k_stride, c.first.k + i * c.k_stride + c.first.k_len)
        for c in plan.calls
        for i in range(c.count)
    ]


def split_keys(call: Call, size: int) -> list[Call]:
    """The same pairs of tokens in calls over at most `size` keys each (causal squares stay whole)."""
    tile = call.first
    if tile.causal or tile.k_len <= size:
        return [call]
    return [
        replace(call, first=replace(tile, k=tile.k + begin, k_len=min(size, tile.k_len - begin)))
        for begin in range(0, tile.k_len, size)
    ]
