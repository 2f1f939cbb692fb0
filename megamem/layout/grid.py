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
        length: tokens of the row, a multiple of `parts`.
        chunk: tokens of a chunk, a multiple of `parts`.
        parts: ranks that split the tokens; 1 without sequence parallelism.
    """

    length: int
    chunk: int
    parts: int = 1

    def __post_init__(self) -> None:
        assert self.length % self.parts == 0 and self.chunk % self.parts == 0 and self.chunk > 0, self

    def spans(self) -> list[tuple[int, int]]:
        """Row ranges `[start, stop)` of the chunks."""
        return [(start, min(start + self.chunk, self.length)) for start in range(0, self.length, self.chunk)]

    def local(self, span: tuple[int, int]) -> slice:
        """Where a chunk lies in a rank's own tokens."""
        return slice(span[0] // self.parts, span[1] // self.parts)

    def order(self) -> list[int]:
        """Row index of every token in the order in which ranks own them (rank by rank, chunk by chunk)."""
        return [
            start + rank * width + i
            for rank in range(self.parts)
            for start, stop in self.spans()
            for width in [(stop - start) // self.parts]
            for i in range(width)
        ]


def chunk_readers(seen: Sequence[Sequence[tuple[int, int]]], spans: Sequence[tuple[int, int]]) -> list[set[int]]:
    """For every key chunk, the query chunks that see some of it, and itself.

    Args:
        seen: of every query chunk, the key ranges its queries see.
        spans: row ranges of the chunks.

    The gradient of a key chunk is complete once all of its readers have run their backward.
    """
    readers: list[set[int]] = [{i} for i in range(len(spans))]
    for query, ranges in enumerate(seen):
        for key, (start, stop) in enumerate(spans):
            if any(first < stop and start < last for first, last in ranges):
                readers[key].add(query)
    return readers
