"""The chunk grid, its readers, and attention over chunks of queries against the whole row.

Shapes: S tokens, N query heads, G key/value heads, D head dim.
"""

import random

import pytest
import torch

from megamem.layout.dense import dense_mask
from megamem.layout.grid import ChunkGrid, chunk_units
from megamem.layout.layout import CAUSAL, FULL, Layout, block, rows
from megamem.ops.attention import attention_backward, attention_forward, key_gradients
from megamem.ops.attention_plan import keys_seen, plan_attention
from tests.helpers import random_layout
from tests.tol import assert_algebra
from tests.unit.test_attention import LAYOUTS, assert_equal_or_zero, each_layout, random_qkv

torch.set_num_threads(1)

# (length, chunk, parts): chunks that divide, leave a tail, are the row, are longer than it.
GRIDS = [
    (length * parts, chunk * parts, parts)
    for parts in (1, 2, 4)
    for length, chunk in [(12, 4), (13, 4), (7, 1), (1, 1), (9, 8), (9, 9), (9, 10), (5, 40)]
]
each_grid = pytest.mark.parametrize("grid", [ChunkGrid(*sizes) for sizes in GRIDS], ids=str)


@each_grid
def test_spans_cut_the_row(grid):
    spans = grid.spans()
    assert [i for span in spans for i in range(*span)] == list(range(grid.length))
    assert all(stop - start == grid.chunk for start, stop in spans[:-1])
    assert 0 < spans[-1][1] - spans[-1][0] <= grid.chunk


@each_grid
def test_gathered_parts_of_a_chunk_are_contiguous(grid):
    """Every rank holds `length / parts` tokens in `order`; its `local` part of each chunk, rank after rank, is it."""
    order, share = grid.order(), grid.length // grid.parts
    assert sorted(order) == list(range(grid.length))
    for span in grid.spans():
        gathered = [i for r in range(grid.parts) for i in order[r * share : (r + 1) * share][grid.local(span)]]
        assert gathered == list(range(*span))


@each_grid
def test_local_parts_of_the_chunks_cut_a_rank_s_tokens(grid):
    share = list(range(grid.length // grid.parts))
    assert [i for span in grid.spans() for i in share[grid.local(span)]] == share


def test_one_rank_keeps_the_order():
    assert ChunkGrid(13, 4).order() == list(range(13))


@pytest.mark.parametrize("sizes", [(13, 4, 2), (12, 3, 2), (12, 0, 1), (12, 0, 4)])
def test_uneven_parts_are_refused(sizes):
    with pytest.raises(AssertionError):
        ChunkGrid(*sizes)


def random_spans(length: int, rng: random.Random) -> list[tuple[int, int]]:
    """Uneven chunks: plans of query ranges know no grid."""
    inner = rng.sample(range(1, length), rng.randint(0, min(5, length - 1)))
    cuts = [0, *sorted(inner), length]
    return list(zip(cuts, cuts[1:], strict=False))


def all_spans(layout: Layout) -> list[list[tuple[int, int]]]:
    rng = random.Random(layout.length)
    even = [ChunkGrid(layout.length, chunk).spans() for chunk in (1, 3, layout.length)]
    return [*even, *(random_spans(layout.length, rng) for _ in range(3))]


def assert_units(layout: Layout) -> None:
    """Units in order, none sees a later one, and none could be cut in two."""
    mask_SS = dense_mask(layout)
    for spans in all_spans(layout):
        units = chunk_units([keys_seen(plan_attention(layout, *span)) for span in spans], spans)
        assert [i for unit in units for i in unit] == list(range(len(spans)))
        closed = {unit[-1] for unit in units}
        for i, (_, stop) in enumerate(spans):
            assert (i in closed) == (not mask_SS[:stop, stop:].any()), (spans, i)


@each_layout
def test_units_are_those_of_the_mask(layout):
    assert_units(layout)


def test_units_of_random_layouts():
    for seed in range(80):
        assert_units(random_layout(random.Random(seed)))


@pytest.mark.parametrize(("relation", "count"), [(CAUSAL, 7), (block(3), 7), (block(6), 4), (FULL, 1)], ids=str)
def test_how_many_units(relation, count):
    """Causal: every chunk; block-causal: every chunk that ends at a block boundary; bidirectional: the row."""
    spans = ChunkGrid(20, 3).spans()
    plans = [plan_attention(rows([20], relation), *span) for span in spans]
    assert len(chunk_units([keys_seen(plan) for plan in plans], spans)) == count


def assert_plan_covers(layout: Layout, spans: list[tuple[int, int]]) -> None:
    """Every visible pair of the chunk's queries in exactly one tile, nothing else in any."""
    mask_SS = dense_mask(layout).long()
    for start, stop in spans:
        plan = plan_attention(layout, start, stop)
        assert (plan.queries, plan.keys) == (stop - start, layout.length)
        count_QS = torch.zeros(plan.queries, plan.keys, dtype=torch.int64)
        for call in plan.calls:
            for tile in call.tiles():
                ones = torch.ones(tile.q_len, tile.k_len, dtype=torch.int64)
                seen = count_QS[tile.q : tile.q + tile.q_len, tile.k : tile.k + tile.k_len]
                seen += ones.tril() if tile.causal else ones
        assert torch.equal(count_QS, mask_SS[start:stop]), (start, stop)


def test_plans_of_query_ranges_cover_the_mask():
    for layout in [*LAYOUTS.values(), *(random_layout(random.Random(seed)) for seed in range(60))]:
        for spans in all_spans(layout):
            assert_plan_covers(layout, spans)


def assert_chunks_equal_the_row(layout: Layout, heads: int, kv_heads: int, dim: int, seed: int) -> None:
    """Chunks in a random order share dk and dv."""
    q, k, v = random_qkv(layout.length, heads, kv_heads, dim)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = plan_attention(layout)
    out, lse = attention_forward(q, k, v, whole)
    expected = {"out": out, "lse": lse, "dk": key_gradients(k), "dv": key_gradients(v)}
    expected["dq"] = attention_backward(grad, q, k, v, out, lse, whole, expected["dk"], expected["dv"])
    rng = random.Random(seed)
    spans = random_spans(layout.length, rng)
    rng.shuffle(spans)
    found = {name: torch.full_like(x, torch.nan) for name, x in expected.items()}
    found |= {"dk": key_gradients(k), "dv": key_gradients(v)}
    for span in spans:
        rows_Q, plan = slice(*span), plan_attention(layout, *span)
        out, lse = attention_forward(q[rows_Q], k, v, plan)
        found["out"][rows_Q], found["lse"][rows_Q] = out, lse
        found["dq"][rows_Q] = attention_backward(
            grad[rows_Q], q[rows_Q], k, v, out, lse, plan, found["dk"], found["dv"]
        )
    for name in ("out", "lse"):
        assert_algebra(found[name], expected[name], name)
    for name in ("dq", "dk", "dv"):
        assert_equal_or_zero(name, found[name], expected[name], layout)


@each_layout
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 8), (6, 2, 5), (4, 1, 16)], ids=["mha", "gqa", "mqa"])
def test_chunks_of_queries_equal_the_whole_row(layout, heads, kv_heads, dim):
    for seed in range(3):
        assert_chunks_equal_the_row(layout, heads, kv_heads, dim, seed)


@pytest.mark.parametrize("seed", range(40))
def test_chunks_of_random_layouts_equal_the_whole_row(seed):
    assert_chunks_equal_the_row(random_layout(random.Random(seed)), 4, 2, 6, seed)


def test_chunks_longer_than_a_kernel_block():
    """The CPU kernel works in blocks of 32 to 512 tokens."""
    for seed in range(2):
        assert_chunks_equal_the_row(rows([415, 130], CAUSAL), 2, 1, 8, seed)
