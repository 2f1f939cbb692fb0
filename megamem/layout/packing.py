"""Sequences (prompt and response) into packed rows: pure integers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megamem.layout.layout import CAUSAL, FULL, Layout, prefix_lm, rows

Pair = tuple[int, int]  # prompt tokens, response tokens

# How a sequence of prompt and response attends, by name.
SEQUENCE_LAYOUTS: dict[str, Callable[[Sequence[Pair]], Layout]] = {
    "full": lambda pairs: rows([p + r for p, r in pairs], FULL),
    "causal": lambda pairs: rows([p + r for p, r in pairs], CAUSAL),
    "prefix_lm": lambda pairs: prefix_lm(pairs),
}


@dataclass(frozen=True)
class RowShape:
    """What rows must look like on this process grid.

    Attributes:
        tokens: a row holds at most this many, or one longer sequence alone.
        multiple: row lengths are multiples of this (the tensor-parallel size under sequence parallelism).
        equal: all rows of a call have one length (pipeline stages of a stock schedule exchange one shape).
    """

    tokens: int
    multiple: int = 1
    equal: bool = False


@dataclass(frozen=True)
class PackedRow:
    """Sequences `members` (indices) packed in order; member i begins at row index `starts[i]`."""

    members: tuple[int, ...]
    starts: tuple[int, ...]
    layout: Layout


def pack(pairs: Sequence[Pair], attention: str, shape: RowShape) -> list[PackedRow]:
    """Fill rows with sequences in their order; isolated filler tokens make up required lengths."""
    members: list[list[int]] = []
    filled = 0
    for i, (prompt, response) in enumerate(pairs):
        length = prompt + response
        if not members or filled + length > shape.tokens:
            members.append([])
            filled = 0
        members[-1].append(i)
        filled += length
    lengths = [sum(sum(pairs[i]) for i in row) for row in members]
    lengths = [-(-n // shape.multiple) * shape.multiple for n in lengths]
    if shape.equal and lengths:
        lengths = [max(lengths)] * len(lengths)
    packed = []
    for row, length in zip(members, lengths, strict=True):
        starts, start = [], 0
        for i in row:
            starts.append(start)
            start += sum(pairs[i])
        layout = SEQUENCE_LAYOUTS[attention]([pairs[i] for i in row]).filled(length)
        packed.append(PackedRow(tuple(row), tuple(starts), layout))
    return packed
