"""Sequences (prompt and response) into packed rows: pure integers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megamem.layout.layout import CAUSAL, FULL, Layout, block, prefix_lm, rows
from megamem.layout.trees import Branch, Sight, Tree, shareable, tree_layout

Pair = tuple[int, int]  # prompt tokens, response tokens

# How a sequence of prompt and response attends, by name. The name of a block-causal one carries its length: "block:4".
# Its blocks are counted from the sequence's start, as SDAR does: the prompt's last one may end in the response.
SEQUENCE_LAYOUTS: dict[str, Callable[..., Layout]] = {
    "full": lambda pairs: rows([p + r for p, r in pairs], FULL),
    "causal": lambda pairs: rows([p + r for p, r in pairs], CAUSAL),
    "prefix_lm": lambda pairs: prefix_lm(pairs),
    "block": lambda pairs, length: rows([p + r for p, r in pairs], block(length)),
}


def sequence_layout(attention: str, pairs: Sequence[Pair]) -> Layout:
    """Sequences packed without padding.

    Args:
        attention: a name of `SEQUENCE_LAYOUTS`, with its length after a colon where it has one.
    """
    name, _, length = attention.partition(":")
    return SEQUENCE_LAYOUTS[name](pairs, *([int(length)] if length else []))


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
    lengths = _row_lengths([sum(sum(pairs[i]) for i in row) for row in members], shape)
    packed = []
    for row, length in zip(members, lengths, strict=True):
        starts, start = [], 0
        for i in row:
            starts.append(start)
            start += sum(pairs[i])
        layout = sequence_layout(attention, [pairs[i] for i in row]).filled(length)
        packed.append(PackedRow(tuple(row), tuple(starts), layout))
    return packed


@dataclass(frozen=True)
class Unit:
    """One draw of a response, as packing sees it.

    Attributes:
        group: responses of one group have the same prompt.
        sample: which response.
        prompt, response: tokens.
    """

    group: int
    sample: int
    prompt: int
    response: int


@dataclass(frozen=True)
class Draws:
    """How draws become rows under one way of attending (see `draws`).

    Attributes:
        sight: who sees whom.
        prefix: prompt length -> tokens of it that a tree's branches share; the rest belongs to each branch.
        copies: a draw is a noisy copy beside the clean response (block-causal); else it is a branch itself.
        share: draws of one group may be in one tree.
    """

    sight: Sight
    prefix: Callable[[int], int]
    copies: bool
    share: bool


def draws(attention: str, shifted: bool, share: bool) -> Draws:
    """How draws of a model become rows.

    Args:
        attention: a name of `SEQUENCE_LAYOUTS`, with its length after a colon where it has one.
        shifted: a token is predicted at the row before it.
        share: compute a prompt that several draws have in common once. A fully bidirectional prompt depends on its
            response: there is nothing to share.
    """
    name, _, length = attention.partition(":")
    relation = {"full": FULL, "prefix_lm": FULL, "causal": CAUSAL}.get(name) or block(int(length))
    if name == "full":
        assert not share, "refused by config/rules.py"
        return Draws(Sight(FULL, FULL), lambda prompt: 0, copies=False, share=False)
    return Draws(Sight(relation, relation), lambda prompt: shareable(prompt, relation, shifted), name == "block", share)


@dataclass(frozen=True)
class PackedDraws:
    """A row of draws.

    Attributes:
        trees: of the row; those of `members` in order.
        members: of every tree, of every branch, the draws (indices of units) it stands for: its noisy copies, or the
            one it is.
        layout: of the row, filled to the length it must have.
    """

    trees: tuple[Tree, ...]
    members: tuple[tuple[tuple[int, ...], ...], ...]
    layout: Layout


def pack_draws(units: Sequence[Unit], how: Draws, shape: RowShape) -> list[PackedDraws]:
    """Fill rows with draws in their order; a tree grows while its row has room, and is begun again in the next."""
    packed: list[list[list[list[int]]]] = []  # rows, trees, branches, units
    length = 0
    for i, unit in enumerate(units):
        prefix = how.prefix(unit.prompt)
        copy = unit.prompt - prefix + unit.response
        last = units[packed[-1][-1][-1][-1]] if packed else None
        same_tree = how.share and last is not None and last.group == unit.group
        same_branch = same_tree and how.copies and last.sample == unit.sample
        whole = prefix + copy * (1 + how.copies)
        grows = copy if same_branch else copy * (1 + how.copies) if same_tree else whole
        if not packed or length + grows > shape.tokens:
            packed.append([[[i]]])
            length = whole
            continue
        length += grows
        if same_branch:
            packed[-1][-1][-1].append(i)
        elif same_tree:
            packed[-1][-1].append([i])
        else:
            packed[-1].append([[i]])
    return _finished(packed, units, how, shape)


def _finished(
    packed: Sequence[Sequence[Sequence[Sequence[int]]]], units: Sequence[Unit], how: Draws, shape: RowShape
) -> list[PackedDraws]:
    def tree(branches: Sequence[Sequence[int]]) -> Tree:
        prefix = how.prefix(units[branches[0][0]].prompt)
        lengths = [units[branch[0]].prompt - prefix + units[branch[0]].response for branch in branches]
        copies = [len(branch) * how.copies for branch in branches]
        return Tree(prefix, tuple(Branch(n, c) for n, c in zip(lengths, copies, strict=True)))

    rows_of_trees = [tuple(tree(branches) for branches in row) for row in packed]
    lengths = _row_lengths([sum(tree.length for tree in trees) for trees in rows_of_trees], shape)
    return [
        PackedDraws(
            trees,
            tuple(tuple(tuple(branch) for branch in branches) for branches in row),
            tree_layout(trees, how.sight).filled(length),
        )
        for trees, row, length in zip(rows_of_trees, packed, lengths, strict=True)
    ]


def _row_lengths(lengths: Sequence[int], shape: RowShape) -> list[int]:
    rounded = [-(-n // shape.multiple) * shape.multiple for n in lengths]
    return [max(rounded)] * len(rounded) if shape.equal and rounded else rounded
