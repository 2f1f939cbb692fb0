"""Sequences (prompt and response) into packed rows: pure integers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megamem.layout.layout import CAUSAL, FULL, Layout, Relation, block, prefix_lm, rows
from megamem.layout.trees import Branch, Tree, shareable, tree_layout

Pair = tuple[int, int]  # prompt tokens, response tokens
Share = Literal["none", "row", "handle"]

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
class DrawRules:
    """How draws become rows under one way of attending (see `draws`).

    Attributes:
        relation: who sees whom in a tree (`trees.tree_layout`).
        prefix: prompt length -> tokens of it that a tree's branches share; the rest belongs to each branch.
        copies: a draw is a noisy copy beside the clean response (block-causal); else it is a branch itself.
        share: whether draws of one group have their prompt in common: in one tree per row; or, as a handle, in a row of
            its own that all rows of the group see.
    """

    relation: Relation
    prefix: Callable[[int], int]
    copies: bool
    share: Share


def draws(attention: str, shifted: bool, share: Share) -> DrawRules:
    """How draws of a model become rows.

    Args:
        attention: a name of `SEQUENCE_LAYOUTS`, with its length after a colon where it has one.
        shifted: a token is predicted at the row before it.
        share: see `DrawRules`. A fully bidirectional prompt depends on its response: there is nothing to share.
    """
    name, _, length = attention.partition(":")
    relation = {"full": FULL, "prefix_lm": FULL, "causal": CAUSAL}.get(name) or block(int(length))
    if name == "full":
        assert share == "none", "refused by config/rules.py"
        return DrawRules(FULL, lambda prompt: 0, copies=False, share="none")
    return DrawRules(relation, lambda prompt: shareable(prompt, relation, shifted), name == "block", share)


@dataclass(frozen=True)
class PackedDraws:
    """A row of draws.

    Attributes:
        trees: of the row; those of `members` in order.
        members: of every tree, of every branch, the draws (indices of units) it stands for: its noisy copies, or the
            one it is.
        prompts: of every tree, a unit that has its prompt.
        layout: of the row, filled to the length it must have.
        prefix: index of the row that has computed the tree's prefix; the row then runs the tokens behind it only.
    """

    trees: tuple[Tree, ...]
    members: tuple[tuple[tuple[int, ...], ...], ...]
    prompts: tuple[int, ...]
    layout: Layout
    prefix: int | None = None

    @property
    def start(self) -> int:
        """The first token that the row runs."""
        return 0 if self.prefix is None else self.trees[0].prefix

    @property
    def tokens(self) -> int:
        """Tokens that the row runs, without fillers."""
        return sum(tree.length for tree in self.trees) - self.start

    def visible_pairs(self) -> int:
        """(query, key) pairs of tokens that see each other, of the tokens that the row runs."""
        return self.layout.visible_pairs(self.start, self.start + self.tokens)


def pack_draws(units: Sequence[Unit], how: DrawRules, shape: RowShape) -> list[PackedDraws]:
    """Fill rows with draws in their order; a tree grows while its row has room, and is begun again in the next."""
    packed: list[list[list[list[int]]]] = []  # rows, trees, branches, units
    length = 0
    for i, unit in enumerate(units):
        prefix = how.prefix(unit.prompt)
        copy = unit.prompt - prefix + unit.response
        last = units[packed[-1][-1][-1][-1]] if packed else None
        same_tree = how.share != "none" and last is not None and last.group == unit.group
        same_branch = same_tree and how.copies and last.sample == unit.sample
        whole = copy * (1 + how.copies) + (0 if how.share == "handle" else prefix)
        grows = copy if same_branch else copy * (1 + how.copies) if same_tree else whole
        if not packed or length + grows > shape.tokens or (how.share == "handle" and not same_tree):
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
    rows_of_trees = [tuple(_tree(branches, units, how) for branches in row) for row in packed]
    if how.share == "handle":
        return _with_prefix_rows(rows_of_trees, packed, units, how, shape)
    lengths = _row_lengths([sum(tree.length for tree in trees) for trees in rows_of_trees], shape)
    return [
        PackedDraws(trees, _frozen(row), _first(row), tree_layout(trees, how.relation).filled(length))
        for trees, row, length in zip(rows_of_trees, packed, lengths, strict=True)
    ]


Branches = Sequence[Sequence[int]]


def _tree(branches: Branches, units: Sequence[Unit], how: DrawRules) -> Tree:
    prefix = how.prefix(units[branches[0][0]].prompt)
    lengths = [units[branch[0]].prompt - prefix + units[branch[0]].response for branch in branches]
    copies = [len(branch) * how.copies for branch in branches]
    return Tree(prefix, tuple(Branch(n, c) for n, c in zip(lengths, copies, strict=True)))


def _frozen(row: Sequence[Branches]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(tuple(branch) for branch in branches) for branches in row)


def _first(row: Sequence[Branches]) -> tuple[int, ...]:
    return tuple(branches[0][0] for branches in row)


def _with_prefix_rows(
    rows_of_trees: Sequence[tuple[Tree, ...]],
    packed: Sequence[Sequence[Branches]],
    units: Sequence[Unit],
    how: DrawRules,
    shape: RowShape,
) -> list[PackedDraws]:
    """Rows of one tree each, every group's behind a row of its prefix."""
    found: list[PackedDraws] = []
    group = handle = None
    for (tree,), row in zip(rows_of_trees, packed, strict=True):
        first = row[0][0][0]
        if group != units[first].group:
            group, handle = units[first].group, None
            if tree.prefix:
                alone = (Tree(tree.prefix, ()),)
                (length,) = _row_lengths([tree.prefix], shape)
                layout = tree_layout(alone, how.relation).filled(length)
                handle = len(found)
                found.append(PackedDraws(alone, ((),), (first,), layout))
        (length,) = _row_lengths([tree.length - tree.prefix], shape)
        layout = tree_layout((tree,), how.relation).filled(tree.prefix + length)
        found.append(PackedDraws((tree,), _frozen(row), (first,), layout, handle))
    return found


def _row_lengths(lengths: Sequence[int], shape: RowShape) -> list[int]:
    rounded = [-(-n // shape.multiple) * shape.multiple for n in lengths]
    return [max(rounded)] * len(rounded) if shape.equal and rounded else rounded
