"""Layouts and packing: pure integers, compared with the definition of each relation."""

import random

import pytest
import torch

from megamem.layout.dense import dense_mask
from megamem.layout.layout import (
    CAUSAL,
    FULL,
    Edge,
    Kind,
    Layout,
    Relation,
    Segment,
    block,
    own_block,
    prefix_lm,
    rows,
    strict_block,
)
from megamem.layout.packing import RowShape, pack, sequence_layout
from megamem.layout.shift import segment_predecessors
from tests.helpers import random_layout


def sees(relation: Relation, p: int, k: int) -> bool:
    """The definition: does a query at position p see a key at position k?"""
    query_block, key_block = ((x - relation.origin) // relation.block for x in (p, k))
    return {
        Kind.FULL: True,
        Kind.CAUSAL: k <= p,
        Kind.BLOCK: key_block <= query_block,
        Kind.STRICT_BLOCK: key_block < query_block,
        Kind.OWN_BLOCK: key_block == query_block,
    }[relation.kind]


def brute_force(layout: Layout) -> list[list[bool]]:
    owner = [i for i, s in enumerate(layout.segments) for _ in range(s.length)]
    position = layout.positions()
    relation = {(e.query, e.key): e.relation for e in layout.edges}
    return [
        [
            (owner[i], owner[j]) in relation and sees(relation[owner[i], owner[j]], position[i], position[j])
            for j in range(layout.length)
        ]
        for i in range(layout.length)
    ]


RELATIONS = {
    "full": FULL,
    "causal": CAUSAL,
    "block3": block(3),
    "block1": block(1),
    "block4_origin5": block(4, 5),
    "block_larger_than_the_row": block(100, 2),
    "strict3": strict_block(3),
    "strict4_origin5": strict_block(4, 5),
    "own3": own_block(3),
    "own4_origin5": own_block(4, 5),
}


@pytest.mark.parametrize("relation", RELATIONS.values(), ids=RELATIONS)
@pytest.mark.parametrize("query_position", [0, 2, 5, 30])
@pytest.mark.parametrize("key_position", [0, 4, 29])
def test_relation(relation, query_position, key_position):
    """Queries before, inside and behind the keys, and positions before the origin."""
    layout = Layout((Segment(0, 11, query_position), Segment(11, 7, key_position)), (Edge(0, 1, relation),))
    assert dense_mask(layout).tolist() == brute_force(layout)


def test_random_layouts():
    for seed in range(40):
        layout = random_layout(random.Random(seed))
        assert dense_mask(layout).tolist() == brute_force(layout), seed


def test_rows():
    layout = rows([3, 1, 5], CAUSAL)
    assert layout.length == 9
    assert layout.positions() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    parts = [torch.ones(n, n).tril() for n in (3, 1, 5)]
    assert torch.equal(dense_mask(layout), torch.block_diag(*parts).bool())


@pytest.mark.parametrize("suffix", [FULL, CAUSAL, block(2, 3)], ids=["full", "causal", "block"])
def test_prefix_lm(suffix):
    layout = prefix_lm([(3, 5), (1, 1)], suffix)
    assert layout.positions() == [*range(8), 0, 1]
    mask = dense_mask(layout)
    assert mask[:3, :3].all() and not mask[:3, 3:].any(), "the prefix sees itself and nothing else"
    assert mask[3:8, :3].all() and mask[9, 8:].all(), "the suffix sees its prefix"
    own = [[sees(suffix, p, k) for k in range(3, 8)] for p in range(3, 8)]
    assert mask[3:8, 3:8].tolist() == own
    assert not mask[:8, 8:].any() and not mask[8:, :8].any(), "pairs do not see each other"


def test_filled():
    layout = rows([3, 2])
    filled = layout.filled(8)
    mask = dense_mask(filled)
    assert filled.length == 8 and torch.equal(mask[:5, :5], dense_mask(layout))
    assert mask[5:, 5:].all() and not mask[:5, 5:].any() and not mask[5:, :5].any()
    assert layout.filled(5) is layout
    with pytest.raises(AssertionError, match="5 tokens cannot be filled to 4"):
        layout.filled(4)


def test_layouts_are_data():
    assert rows([3, 4]) == rows((3, 4)) and hash(rows([3, 4])) == hash(rows((3, 4)))
    assert rows([3, 4]) != rows([4, 3])
    assert Layout((), ()).length == 0


@pytest.mark.parametrize(
    ("segments", "edges", "told"),
    [
        ([Segment(1, 3)], [], "expected start 0"),
        ([Segment(0, 3), Segment(4, 2)], [], "expected start 3"),
        ([Segment(0, 3), Segment(2, 2)], [], "expected start 3"),
        ([Segment(0, 0)], [], "length >= 1"),
        ([Segment(0, 2, -1)], [], "position=-1"),
        ([Segment(0, 2)], [Edge(0, 1, FULL)], "outside 0 … 0"),
        ([Segment(0, 2)], [Edge(-1, 0, FULL)], "outside 0 … 0"),
        # Attention would count its keys twice.
        ([Segment(0, 2)], [Edge(0, 0, FULL), Edge(0, 0, CAUSAL)], "twice"),
    ],
)
def test_wrong_layouts_are_refused(segments, edges, told):
    with pytest.raises(ValueError, match=told):
        Layout(tuple(segments), tuple(edges))


def test_blocks_have_tokens():
    with pytest.raises(ValueError, match="block = 0"):
        block(0)


PAIRS = [(3, 4), (5, 2), (1, 1), (9, 9), (2, 2)]
SHAPES = {
    "all": RowShape(1000),
    "some": RowShape(14),
    "multiple": RowShape(14, multiple=4),
    "equal": RowShape(14, equal=True),
    "both": RowShape(14, multiple=4, equal=True),
    "one": RowShape(1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("attention", ["full", "causal", "prefix_lm", "block:4"])
def test_pack(attention, shape):
    packed = pack(PAIRS, attention, shape)
    assert [i for row in packed for i in row.members] == list(range(len(PAIRS))), "all, in order"
    for row in packed:
        ends = [start + sum(PAIRS[i]) for i, start in zip(row.members, row.starts, strict=True)]
        assert list(row.starts) == [0, *ends[:-1]], "without gaps"
        assert ends[-1] <= shape.tokens or len(row.members) == 1
        assert ends[-1] <= row.layout.length and row.layout.length % shape.multiple == 0
        alone = sequence_layout(attention, [PAIRS[i] for i in row.members])
        assert row.layout == alone.filled(row.layout.length)
    lengths = {row.layout.length for row in packed}
    if shape.equal:
        assert len(lengths) == 1
    else:
        assert all(row.layout.length - sum(sum(PAIRS[i]) for i in row.members) < shape.multiple for row in packed)


def test_pack_by_hand():
    """18 tokens do not fit into 14: alone. 7 + 7 fit exactly; 2 do not."""
    some = pack(PAIRS, "full", SHAPES["some"])
    assert [row.members for row in some] == [(0, 1), (2,), (3,), (4,)]
    assert [row.layout.length for row in pack(PAIRS, "full", SHAPES["multiple"])] == [16, 4, 20, 4]
    assert [row.layout.length for row in pack(PAIRS, "full", SHAPES["both"])] == [20] * 4
    assert pack([], "full", SHAPES["equal"]) == []


def test_blocks_are_counted_from_the_sequence_start():
    """A prompt of 3 and a response of 4 in blocks of 4: token 3, the response's first, is in the prompt's block."""
    seen = dense_mask(sequence_layout("block:4", [(3, 4), (1, 1)]))
    first = [[q // 4 >= k // 4 for k in range(7)] for q in range(7)]
    expected = [[*row, False, False] for row in first] + [[*[False] * 7, True, True]] * 2
    assert seen.tolist() == expected


def test_segment_predecessors():
    """Two sequences; then a prefix of 3 with suffixes at position 3, the second of which is cut; then fillers."""
    segments = (Segment(0, 4), Segment(4, 2), Segment(6, 3), Segment(9, 2, 3), Segment(11, 1, 3), Segment(12, 1, 4))
    edges = [Edge(i, i, CAUSAL) for i in range(6)] + [Edge(i, 2, CAUSAL) for i in (3, 4, 5)] + [Edge(5, 4, CAUSAL)]
    layout = Layout(segments, tuple(edges)).filled(15)
    assert segment_predecessors(layout) == [(0, 0), (4, 4), (6, 6), (9, 8), (11, 8), (12, 11), (13, 13)]
    alone = Layout((Segment(0, 2, 5),), (Edge(0, 0, CAUSAL),))
    assert segment_predecessors(alone) == [(0, -1)], "what it continues is not in this row"
