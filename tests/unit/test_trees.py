"""Rows in which responses share their prompt: who sees whom, index maps, and packed draws against unshared ones.

Shapes: S row tokens, N heads, G key/value heads, D head dim.
"""

import random

import pytest
import torch

from megamem.layout.dense import dense_mask
from megamem.layout.layout import CAUSAL, FULL, block
from megamem.layout.packing import RowShape, Unit, draws, pack_draws
from megamem.layout.trees import (
    Branch,
    Tree,
    block_diffusion,
    place,
    repeated,
    shareable,
    shared_index,
    shared_prefix,
    tree_layout,
)
from megamem.ops.attention import attend, naive_attend
from megamem.ops.attention_plan import plan_attention
from tests.tol import assert_algebra
from tests.unit.test_attention import random_qkv

TREES = {
    "one_of_each": ([Tree(4, (Branch(3, 2), Branch(5, 1), Branch(2, 3))), Tree(8, (Branch(4, 1),))], block(4)),
    "no_prefix": ([Tree(0, (Branch(7, 2),)), Tree(2, (Branch(1, 1), Branch(6, 2)))], block(2)),
    "causal": ([Tree(6, (Branch(3), Branch(1), Branch(4))), Tree(1, (Branch(2), Branch(2)))], CAUSAL),
    "prefix_lm": ([Tree(6, (Branch(3), Branch(3))), Tree(2, (Branch(5),))], FULL),
}
each_tree = pytest.mark.parametrize(("trees", "relation"), TREES.values(), ids=TREES)


def sees(trees, relation) -> list[list[bool]]:
    """By definition: token by token, from (tree, branch or None, copy or None, position)."""
    tokens = []
    for t, tree in enumerate(trees):
        tokens += [(t, None, None, i) for i in range(tree.prefix)]
        for b, branch in enumerate(tree.branches):
            for copy in [None, *range(branch.copies)]:
                tokens += [(t, b, copy, tree.prefix + i) for i in range(branch.length)]

    def by_blocks(p: int, k: int, noisy: bool) -> bool:
        if relation is FULL:
            return True
        if relation is CAUSAL:
            return k <= p
        return k // relation.block < p // relation.block + (not noisy)

    def pair(query, key) -> bool:
        (tq, bq, cq, p), (tk, bk, ck, k) = query, key
        if tq != tk or (bk is not None and bk != bq):
            return False  # another prompt; another response, or a prompt token that looks at one
        if ck is not None:  # a noisy key: its own copy's, in its own block
            return cq == ck and k // relation.block == p // relation.block
        return by_blocks(p, k, cq is not None)

    return [[pair(query, key) for key in tokens] for query in tokens]


@each_tree
def test_who_sees_whom(trees, relation):
    assert dense_mask(tree_layout(trees, relation)).tolist() == sees(trees, relation)


def test_factories():
    causal = tree_layout([Tree(5, (Branch(3), Branch(2)))], CAUSAL)
    assert shared_prefix([(5, [3, 2])]) == causal
    assert causal.positions() == [*range(5), 5, 6, 7, 5, 6]
    noisy = tree_layout([Tree(4, (Branch(3, 2),))], block(2))
    assert block_diffusion([(4, [(3, 2)])], 2) == noisy


@each_tree
def test_index_maps(trees, relation):
    """Positions and visibility of the repeated form are those of the shared one, token by token."""
    sight = relation
    shared, alone, index = tree_layout(trees, sight), tree_layout(repeated(trees), sight), shared_index(trees)
    assert len(index) == alone.length and set(index) == set(range(shared.length))
    assert alone.positions() == [shared.positions()[i] for i in index]
    whole, part = dense_mask(shared), dense_mask(alone)
    assert torch.equal(part, part & whole[index][:, index]), "nothing new is seen"
    assert part.sum(1).tolist() == [int(whole[i].sum()) for i in index], "and as much"


@each_tree
def test_attention_of_both_forms(trees, relation):
    """Outputs, and gradients added up over the repeated tokens."""
    sight, index = relation, torch.tensor(shared_index(trees))
    shared, alone = tree_layout(trees, sight), tree_layout(repeated(trees), sight)
    leaves = [x.requires_grad_() for x in random_qkv(shared.length, 4, 2, 8)]
    grad = torch.randn(alone.length, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = attend(*leaves, shared)
    theirs = naive_attend(*(x[index] for x in leaves), alone)
    assert_algebra(ours[index], theirs, "output")
    expected = torch.autograd.grad(theirs, leaves, grad)
    found = torch.autograd.grad(ours, leaves, torch.zeros_like(ours).index_add_(0, index, grad))
    for name, a, b in zip("qkv", found, expected, strict=True):
        assert_algebra(a, b, f"d{name}")


def test_all_suffixes_meet_the_prefix_in_one_call():
    calls = plan_attention(shared_prefix([(2048, [64] * 8)])).calls
    found = sorted((c.count, c.first.q_len, c.first.k_len) for c in calls)
    assert found == [
        (1, 512, 2048),
        (1, 2048, 2048),
        (8, 64, 64),
    ]


@pytest.mark.parametrize(
    ("prompt", "relation", "shifted", "expected"),
    [
        (7, CAUSAL, True, 6),
        (7, FULL, False, 7),
        (7, block(4), False, 4),
        (8, block(4), False, 8),
        (8, block(4), True, 4),
        (3, block(4), False, 0),
        (0, CAUSAL, True, 0),
    ],
)
def test_shareable(prompt, relation, shifted, expected):
    assert shareable(prompt, relation, shifted) == expected


@pytest.mark.parametrize(
    ("tree", "relation", "told"),
    [
        (Tree(5, (Branch(3),)), block(4), "ends inside a block of 4"),
        (Tree(5, (Branch(3, 1),)), CAUSAL, "block relation"),
    ],
)
def test_inexact_trees_are_refused(tree, relation, told):
    with pytest.raises(ValueError, match=told):
        tree_layout([tree], relation)


@pytest.mark.parametrize("share", ["none", "row"])
@pytest.mark.parametrize("attention", ["full", "prefix_lm", "causal", "block:4"])
def test_pack_draws(attention, share):
    """All units in order, every row as full as it may be, and every branch in the tree of its own prompt."""
    if attention == "full" and share == "row":
        pytest.skip("refused")
    rng = random.Random(0)
    prompts = [rng.randint(1, 9) for _ in range(4)]
    samples = [(g, prompts[g], rng.randint(1, 9)) for g in range(4) for _ in range(3)]
    units = [Unit(g, b, p, r) for b, (g, p, r) in enumerate(samples) for _ in range(3)]
    how = draws(attention, attention == "causal", share)
    for tokens in (1, 20, 60, 10**6):
        packed = pack_draws(units, how, RowShape(tokens, multiple=2))
        found = [u for row in packed for branches in row.members for drawn in branches for u in drawn]
        assert found == list(range(len(units)))
        for row in packed:
            for tree, branches in zip(row.trees, row.members, strict=True):
                groups = {units[u].group for drawn in branches for u in drawn}
                assert len(groups) == 1 and tree.prefix == how.prefix(prompts[groups.pop()])
                for branch, drawn in zip(tree.branches, branches, strict=True):
                    assert len({units[u].sample for u in drawn}) == 1
                    assert branch.copies == len(drawn) * how.copies and (how.copies or len(drawn) == 1)
                    assert tree.prefix + branch.length == units[drawn[0]].prompt + units[drawn[0]].response
                assert share == "row" or sum(map(len, branches)) == 1
            used = sum(tree.length for tree in row.trees)
            assert used <= tokens or sum(len(d) for b in row.members for d in b) == 1
            assert 0 <= row.layout.length - used < 2
            assert len(place(row.trees)) == len(row.trees)
        if tokens == 10**6:
            assert len(packed) == 1 and len(packed[0].trees) == (4 if share == "row" else len(units))
