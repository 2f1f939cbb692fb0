"""The chunk grid: how a row is cut for streaming, and how sequence parallelism interleaves it (DESIGN section 3.2).

Rank r of a tensor-parallel group owns the r-th part *of every chunk*, so that gathering the ranks' parts of chunk i
gives the contiguous tokens of chunk i. The row is permuted once, before the embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkGrid:
    """A row of `length` tokens in chunks of `chunk` (the last may be shorter), shared by `parts` ranks.

    Attributes:
        length: tokens of the row.
        chunk: tokens of a chunk, a multiple of `parts`.
        parts: ranks that split the tokens; 1 without sequence parallelism.
        start: tokens before this one have run already (a prefix, `models/stage.py`): only their keys and values are
            there, and ranks own no part of them. The tokens from here on are a multiple of `parts`.
    """

    length: int
    chunk: int
    parts: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        tokens = self.length - self.start
        assert tokens % self.parts == 0 and self.chunk % self.parts == 0 and self.chunk > 0, self

    def spans(self) -> list[tuple[int, int]]:
        """Row ranges `[start, stop)` of the chunks."""
        return [(start, min(start + self.chunk, self.length)) for start in range(self.start, self.length, self.chunk)]

    def local(self, span: tuple[int, int]) -> slice:
        """Where a chunk lies in a rank's own tokens."""
        return slice((span[0] - self.start) // self.parts, (span[1] - self.start) // self.parts)

    def order(self) -> list[int]:
        """Place among the tokens that run of every token in the order in which ranks own them (rank by rank, chunk by
        chunk)."""
        return [
            start - self.start + rank * width + i
            for rank in range(self.parts)
            for start, stop in self.spans()
            for width in [(stop - start) // self.parts]
            for i in range(width)
        ]


def chunk_units(seen: Sequence[Sequence[tuple[int, int]]], spans: Sequence[tuple[int, int]]) -> list[range]:
    """Runs of chunks that can go through layers one after the other: no unit sees a later one (DESIGN section 3.4).

    Chunks that see each other both ways are one unit: a causal row has as many units as chunks, a bidirectional one
    has one. Units run forward in order and backward in reverse: once a unit has run its backward, every query that
    sees its keys has, and the gradient of its keys is complete.

    Args:
        seen: of every query chunk, the key ranges its queries see.
        spans: row ranges of the chunks.

    Returns:
        Indices of the chunks of every unit.
    """
    units, first, reach = [], 0, 0
    for chunk, ranges in enumerate(seen):
        reach = max([reach, *(last for _, last in ranges)])
        if reach <= spans[chunk][1]:
            units.append(range(first, chunk + 1))
            first = chunk + 1
    return units
