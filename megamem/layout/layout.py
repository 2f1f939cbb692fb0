"""Segments, relations and the layouts built from them (DESIGN section 1, idea 1).

One packed row of tokens (batch dimension 1) is a list of segments and of relations between a query and a key segment.
A relation is stated in *positions*, so one relation covers a whole staircase and a segment that continues another one
(a suffix) needs nothing extra. Plain Python data: hashable, comparable, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Kind(Enum):
    """How a query position p sees a key position k; `blk(x) = (x - origin) // block`."""

    FULL = "full"  # always
    CAUSAL = "causal"  # k <= p
    BLOCK = "block"  # blk(k) <= blk(p)
    STRICT_BLOCK = "strict_block"  # blk(k) < blk(p): a noisy block sees the clean blocks before it
    OWN_BLOCK = "own_block"  # blk(k) = blk(p): a noisy block sees itself


@dataclass(frozen=True)
class Relation:
    """A kind of visibility; `block` tokens per block, counted from position `origin`."""

    kind: Kind
    block: int = 1
    origin: int = 0

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block = {self.block}; a block has at least one token")

    def visible_keys(self, position: int, key: Segment) -> tuple[int, int]:
        """The tokens `[first, last)` of `key`, counted in it, that a query at `position` sees; `(0, 0)` if none."""
        first, last = key.position, key.position + key.length
        if self.kind is Kind.CAUSAL:
            last = position + 1
        elif self.kind is not Kind.FULL:
            begin = self.origin + (position - self.origin) // self.block * self.block
            last = begin if self.kind is Kind.STRICT_BLOCK else begin + self.block
            first = begin if self.kind is Kind.OWN_BLOCK else first
        first, last = max(first - key.position, 0), min(last - key.position, key.length)
        return (first, last) if first < last else (0, 0)

    def visible_pairs(self, query: Segment, key: Segment) -> int:
        """How many pairs (token of `query`, token of `key` that it sees) there are; takes a step per block."""
        if self.kind is Kind.CAUSAL:
            seen = query.position + 1 - key.position  # by the first query, were there keys on both sides without end
            return _triangle(seen + query.length - 1, key.length) - _triangle(seen - 1, key.length)
        pairs, position, stop = 0, query.position, query.position + query.length
        while position < stop:
            following = position + self.block - (position - self.origin) % self.block
            following = stop if self.kind is Kind.FULL else min(following, stop)
            first, last = self.visible_keys(position, key)
            pairs += (following - position) * (last - first)
            position = following
        return pairs


def _triangle(x: int, most: int) -> int:
    """1 + 2 + … + x, with `most` for every larger number."""
    return max(x, 0) * (max(x, 0) + 1) // 2 if x <= most else most * (most + 1) // 2 + (x - most) * most


FULL = Relation(Kind.FULL)
CAUSAL = Relation(Kind.CAUSAL)


def block(size: int, origin: int = 0) -> Relation:
    """Block-causal visibility: the own block and all before it."""
    return Relation(Kind.BLOCK, size, origin)


def strict_block(size: int, origin: int = 0) -> Relation:
    """Only the blocks before the own one."""
    return Relation(Kind.STRICT_BLOCK, size, origin)


def own_block(size: int, origin: int = 0) -> Relation:
    """The own block alone."""
    return Relation(Kind.OWN_BLOCK, size, origin)


@dataclass(frozen=True)
class Segment:
    """`length` consecutive tokens of the row from index `start`, at positions `position`, `position + 1`, …"""

    start: int
    length: int
    position: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Edge:
    """Segment `query` sees segment `key` (indices into `Layout.segments`) by `relation`."""

    query: int
    key: int
    relation: Relation


@dataclass(frozen=True)
class Layout:
    """A packed row: segments in order without gaps, and edges between them.

    Raises:
        ValueError: segments leave a gap or overlap, an edge names no segment, or two edges join the same segments.
            (That every token sees something is checked by the attention plan.)
    """

    segments: tuple[Segment, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        start = 0
        for segment in self.segments:
            if segment.start != start or segment.length < 1 or segment.position < 0:
                raise ValueError(f"{segment} does not follow the token before it (expected start {start}, length >= 1)")
            start = segment.stop
        for edge in self.edges:
            if not (0 <= edge.query < len(self.segments) and 0 <= edge.key < len(self.segments)):
                raise ValueError(f"{edge} names a segment outside 0 … {len(self.segments) - 1}")
        pairs = [(edge.query, edge.key) for edge in self.edges]
        if len(set(pairs)) < len(pairs):  # attention would count the keys twice
            pair = next(p for i, p in enumerate(pairs) if p in pairs[:i])
            raise ValueError(f"segments {pair[0]} and {pair[1]} are joined twice; one edge per (query, key)")

    @property
    def length(self) -> int:
        """Tokens in the row."""
        return self.segments[-1].stop if self.segments else 0

    def positions(self) -> list[int]:
        """The position of every token of the row, for RoPE."""
        return [s.position + i for s in self.segments for i in range(s.length)]

    def visible_pairs(self, start: int, stop: int) -> int:
        """How many (query, key) pairs of tokens see each other, of the queries `[start, stop)` of the row."""
        pairs = 0
        for edge in self.edges:
            query = self.segments[edge.query]
            first, last = max(query.start, start), min(query.stop, stop)
            if first < last:
                # Where they lie in the row does not matter; without it, equal ones are counted once.
                part = Segment(0, last - first, query.position + first - query.start)
                key = self.segments[edge.key]
                pairs += _visible_pairs(edge.relation, part, Segment(0, key.length, key.position))
        return pairs

    def filled(self, length: int) -> Layout:
        """The same row with isolated filler tokens up to `length`.

        A filler token sees only fillers, and no one else sees it; it carries no loss. It makes a row divisible by the
        tensor-parallel size, or as long as the other rows of a pipeline step.
        """
        assert length >= self.length, f"row of {self.length} tokens cannot be filled to {length}"
        if length == self.length:
            return self
        filler = len(self.segments)
        return Layout(
            (*self.segments, Segment(self.length, length - self.length)), (*self.edges, Edge(filler, filler, FULL))
        )


@lru_cache(maxsize=4096)
def _visible_pairs(relation: Relation, query: Segment, key: Segment) -> int:
    return relation.visible_pairs(query, key)


def rows(lengths: Sequence[int], relation: Relation = FULL) -> Layout:
    """Independent sequences packed without padding; each sees itself by `relation`."""
    segments, start = [], 0
    for length in lengths:
        segments.append(Segment(start, length))
        start += length
    return Layout(tuple(segments), tuple(Edge(i, i, relation) for i in range(len(segments))))


def prefix_lm(pairs: Sequence[tuple[int, int]], suffix: Relation = FULL) -> Layout:
    """Pairs of (prefix length, suffix length): the prefix sees itself, the suffix sees the prefix and itself.

    Exactly what a shared prefix needs: the prefix does not see the suffix.
    """
    segments: list[Segment] = []
    edges: list[Edge] = []
    for prefix_length, suffix_length in pairs:
        start, p = (segments[-1].stop if segments else 0), len(segments)
        if prefix_length == 0:
            segments.append(Segment(start, suffix_length))
            edges.append(Edge(p, p, suffix))
            continue
        segments += [Segment(start, prefix_length), Segment(start + prefix_length, suffix_length, prefix_length)]
        edges += [Edge(p, p, FULL), Edge(p + 1, p, FULL), Edge(p + 1, p + 1, suffix)]
    return Layout(tuple(segments), tuple(edges))
