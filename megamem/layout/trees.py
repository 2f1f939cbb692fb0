"""Rows in which responses share their prompt (DESIGN section 5).

A *tree* is a prefix, computed once, and branches that see it: responses, each of which may have noisy copies that see
the clean response block by block. In the row it is

    prefix | clean 1, its noisy copies | clean 2, its noisy copies | …

Branches continue the prefix's positions, so embedding, norms, MLP, head and streams need to know nothing. The
*repeated* form of a tree has a row of its own for every branch (or for every noisy copy): `prefix | clean (| noisy)`.
Both give the same states where the prefix's do not depend on its branches.

Plain integers; a row may hold many trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megamem.layout.layout import CAUSAL, Edge, Kind, Layout, Relation, Segment, own_block, strict_block


@dataclass(frozen=True)
class Branch:
    """A response of `length` tokens, and how many noisy copies of it follow."""

    length: int
    copies: int = 0


@dataclass(frozen=True)
class Tree:
    """A prefix of `prefix` tokens (0: none) and the branches that share it."""

    prefix: int
    branches: tuple[Branch, ...]

    @property
    def length(self) -> int:
        """Tokens in the row."""
        return self.prefix + sum(b.length * (1 + b.copies) for b in self.branches)


@dataclass(frozen=True)
class PlacedBranch:
    """Row indices at which the clean response and its copies begin."""

    clean: int
    copies: tuple[int, ...]


def place(trees: Sequence[Tree]) -> list[tuple[int, tuple[PlacedBranch, ...]]]:
    """Of every tree of a row: where its prefix begins, and where its branches do."""
    placed, start = [], 0
    for tree in trees:
        first, branches = start, []
        start += tree.prefix
        for branch in tree.branches:
            starts = [start + i * branch.length for i in range(1 + branch.copies)]
            branches.append(PlacedBranch(starts[0], tuple(starts[1:])))
            start += branch.length * (1 + branch.copies)
        placed.append((first, tuple(branches)))
    return placed


def tree_layout(trees: Sequence[Tree], relation: Relation) -> Layout:
    """The row of these trees.

    Args:
        relation: how a prefix sees itself, and a branch its prefix and itself. Noisy copies need blocks: a noisy block
            sees the clean blocks before it (and the prefix by the same rule), and itself.

    Raises:
        ValueError: sharing would not be exact (a block of the branch relation joins prefix and branch), or noisy
            copies under a relation without blocks.
    """
    segments: list[Segment] = []
    edges: list[Edge] = []
    for tree in trees:
        _refuse_inexact(tree, relation)
        prefix = None
        if tree.prefix:
            prefix = len(segments)
            segments.append(Segment(segments[-1].stop if segments else 0, tree.prefix))
            edges.append(Edge(prefix, prefix, relation))
        for branch in tree.branches:
            clean = len(segments)
            for copy in range(1 + branch.copies):
                i = len(segments)
                segments.append(Segment(segments[-1].stop if segments else 0, branch.length, tree.prefix))
                sees = relation if copy == 0 else strict_block(relation.block, relation.origin)
                if prefix is not None:
                    edges.append(Edge(i, prefix, sees))
                edges.append(Edge(i, clean, sees))
                if copy:
                    edges.append(Edge(i, i, own_block(relation.block, relation.origin)))
    return Layout(tuple(segments), tuple(edges))


def shared_prefix(groups: Sequence[tuple[int, Sequence[int]]], relation: Relation = CAUSAL) -> Layout:
    """Groups of (prompt length, response lengths): every prompt once, then all its responses.

    For `FULL` the prompt sees itself only (prefix-LM): another model than the fully bidirectional one.
    """
    trees = [Tree(prompt, tuple(Branch(n) for n in responses)) for prompt, responses in groups]
    return tree_layout(trees, relation)


def block_diffusion(groups: Sequence[tuple[int, Sequence[tuple[int, int]]]], size: int, origin: int = 0) -> Layout:
    """Groups of (prompt length, (response length, noisy copies) of each response): `prompt | clean | noisy copies`.

    A noisy block sees the prompt, the clean blocks before it and itself; `size` tokens per block, from `origin`.
    """
    trees = [Tree(prompt, tuple(Branch(*b) for b in branches)) for prompt, branches in groups]
    relation = Relation(Kind.BLOCK, size, origin)
    return tree_layout(trees, relation)


def shareable(prompt: int, branch: Relation, shifted: bool) -> int:
    """How many leading tokens of a prompt its responses may share exactly; the rest belongs to each branch.

    Args:
        branch: how responses see the prompt and themselves. With blocks, the prompt's last block may hold response
            tokens, which the prompt tokens in it see.
        shifted: a token is predicted at the row before it: then the last prompt token predicts each response's first
            one, and every branch carries it.
    """
    end = prompt - shifted
    if branch.kind is Kind.BLOCK:
        end -= (end - branch.origin) % branch.block
    return max(end, 0)


def repeated(trees: Sequence[Tree]) -> list[Tree]:
    """The same responses without sharing: a tree for every branch, or for every noisy copy of one."""
    return [
        Tree(tree.prefix, (Branch(branch.length, min(branch.copies, 1)),))
        for tree in trees
        for branch in tree.branches
        for _ in range(max(branch.copies, 1))
    ]


def shared_index(trees: Sequence[Tree]) -> list[int]:
    """For every token of the row of `repeated(trees)`, its index in the row of `trees`.

    Gathering by it turns the shared form into the repeated one; adding by it turns gradients of the repeated form into
    those of the shared one.
    """
    index: list[int] = []
    for tree, (start, branches) in zip(trees, place(trees), strict=True):
        prefix = range(start, start + tree.prefix)
        for branch, placed in zip(tree.branches, branches, strict=True):
            clean = range(placed.clean, placed.clean + branch.length)
            for copy in placed.copies or (None,):
                index += [*prefix, *clean]
                if copy is not None:
                    index += range(copy, copy + branch.length)
    return index


def _refuse_inexact(tree: Tree, relation: Relation) -> None:
    blocks = relation.kind is Kind.BLOCK
    if any(b.copies for b in tree.branches) and not blocks:
        raise ValueError(f"noisy copies need a block relation, not {relation.kind.value}")
    if blocks and tree.prefix and (tree.prefix - relation.origin) % relation.block:
        raise ValueError(
            f"a prefix of {tree.prefix} tokens ends inside a block of {relation.block} (from {relation.origin}): its "
            "last tokens see the response, so sharing them is inexact"
        )
