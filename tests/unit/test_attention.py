"""Partitioned attention against the dense reference: output, dq, dk, dv.

Shapes: S tokens, N query heads, G key/value heads, D head dim.
"""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megamem.layout.dense import dense_mask
from megamem.layout.layout import CAUSAL, FULL, Edge, Layout, Segment, block, prefix_lm, rows, strict_block
from megamem.layout.trees import Branch, Tree, tree_layout
from megamem.ops import attention
from megamem.ops.attention import attend, naive_attend
from megamem.ops.attention_plan import plan_attention
from tests.helpers import random_layout, value_and_gradients
from tests.tol import assert_algebra, assert_exact, assert_floor

torch.set_num_threads(1)


def block_diffusion(prompt: int, response: int, size: int, copies: int) -> Layout:
    """`prompt | clean | noisy copies`, blocks counted from the response: a noisy block sees the prompt, the clean
    blocks before it, and itself."""
    segments = [Segment(0, prompt), Segment(prompt, response, prompt)]
    edges = [Edge(0, 0, FULL), Edge(1, 0, FULL), Edge(1, 1, block(size, prompt))]
    for _ in range(copies):
        for begin in range(0, response, size):
            i = len(segments)
            segments.append(Segment(segments[-1].stop, min(size, response - begin), prompt + begin))
            edges += [Edge(i, 0, FULL), Edge(i, 1, strict_block(size, prompt)), Edge(i, i, FULL)]
    return Layout(tuple(segments), tuple(edges))


def shared_prefix(prefix: int, suffixes: list[int]) -> Layout:
    """One causal prompt and many causal responses (autoregressive GRPO)."""
    segments, edges = [Segment(0, prefix)], [Edge(0, 0, CAUSAL)]
    for i, length in enumerate(suffixes, 1):
        segments.append(Segment(segments[-1].stop, length, prefix))
        edges += [Edge(i, 0, CAUSAL), Edge(i, i, CAUSAL)]
    return Layout(tuple(segments), tuple(edges))


def two_segments(keys: int, key_position: int, queries: int, query_position: int, size: int, origin: int) -> Layout:
    """The second segment sees the blocks of the first before its own, and itself by blocks."""
    segments = (Segment(0, keys, key_position), Segment(keys, queries, query_position))
    own, before = block(size, origin), strict_block(size, origin)
    return Layout(segments, (Edge(0, 0, own), Edge(1, 0, before), Edge(1, 1, own)))


LAYOUTS = {
    "one_token": rows([1]),
    "single_tokens": rows([1, 1, 1]),
    "odd_rows": rows([7, 1, 13, 2]),
    "equal_rows": rows([5, 5, 5]),
    "equal_rows_then_other": rows([5, 5, 3, 5, 5]),
    "causal": rows([17, 1, 6], CAUSAL),
    "equal_causal": rows([6, 6, 6], CAUSAL),
    "block_with_remainder": rows([11, 4, 1, 3], block(4)),
    "block_origin": rows([11], block(4, 3)),
    "equal_blocks": rows([8, 8], block(4)),
    "prefix_lm_full": prefix_lm([(3, 5), (1, 1), (4, 7), (4, 7)]),
    "prefix_lm_causal": prefix_lm([(3, 5), (1, 1), (6, 2)], CAUSAL),
    "prefix_lm_block": prefix_lm([(5, 7)], block(3, 5)),
    "shared_prefix": shared_prefix(5, [3, 3, 3, 4, 1]),
    "block_diffusion": block_diffusion(5, 11, 4, 2),
    "block_diffusion_one_copy": block_diffusion(1, 6, 3, 1),
    # Enough steps to be halved: even ones, cut ones, keys before the first step, equal rows.
    "many_blocks": rows([32], block(2)),
    "many_blocks_with_remainder": rows([31], block(3, 2)),
    "many_blocks_of_a_suffix": prefix_lm([(5, 23)], block(2, 4)),
    "many_blocks_in_equal_rows": rows([16, 16, 3], block(2)),
    "many_strict_blocks": two_segments(19, 1, 26, 4, 3, 2),
    "tree": tree_layout([Tree(4, (Branch(6, 3), Branch(2, 1))), Tree(0, (Branch(5, 2),))], block(4)),
    "many_noisy_blocks": tree_layout([Tree(8, (Branch(21, 2), Branch(20, 2)))], block(2)),
    "fillers": prefix_lm([(3, 4), (2, 2)], CAUSAL).filled(16),
    # Queries before, among and behind the keys of another segment.
    "causal_offsets": Layout(
        (Segment(0, 5, 4), Segment(5, 6, 6), Segment(11, 3, 2)),
        (*(Edge(i, i, CAUSAL) for i in range(3)), Edge(0, 1, CAUSAL), Edge(1, 0, CAUSAL), Edge(2, 1, CAUSAL)),
    ),
    # Later keys only, earlier keys only.
    "cross_only": Layout((Segment(0, 4), Segment(4, 3)), (Edge(0, 1, FULL), Edge(1, 0, FULL))),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def random_qkv(length: int, heads: int, kv_heads: int, dim: int, seed: int = 0) -> list[torch.Tensor]:
    key = torch.Generator().manual_seed(seed)
    return [torch.randn(length, n, dim, generator=key, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]


def assert_equals_naive(layout: Layout, heads: int, kv_heads: int, dim: int) -> None:
    qkv = random_qkv(layout.length, heads, kv_heads, dim)
    ours = value_and_gradients(lambda *x: attend(*x, layout), *qkv)
    reference = value_and_gradients(lambda *x: naive_attend(*x, layout), *qkv)
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, reference, strict=True):
        assert_equal_or_zero(name, a, b, layout)


def assert_equal_or_zero(name: str, actual: torch.Tensor, expected: torch.Tensor, layout: Layout) -> None:
    if name in ("dq", "dk") and (dense_mask(layout).sum(-1) == 1).all():
        # Where every token sees one token the softmax is constant: the true gradient is 0 and both have rounding only.
        assert actual.abs().max() < 1e-14 and expected.abs().max() < 1e-14
    else:
        assert_algebra(actual, expected, name)


@each_layout
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 8), (6, 2, 5), (4, 1, 16)], ids=["mha", "gqa", "mqa"])
def test_equals_naive(layout, heads, kv_heads, dim):
    assert_equals_naive(layout, heads, kv_heads, dim)


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts_equal_naive(seed):
    assert_equals_naive(random_layout(random.Random(seed)), 4, 2, 6)


@pytest.mark.parametrize("seed", range(40))
def test_many_blocks_equal_naive(seed):
    """Long staircases of any block, origin and offset: most are halved."""
    rng = random.Random(seed)
    sizes = rng.randint(1, 90), rng.randint(0, 20), rng.randint(1, 90), rng.randint(0, 20)
    assert_equals_naive(two_segments(*sizes, rng.randint(1, 9), rng.randint(0, 12)), 4, 2, 6)


def test_rows_longer_than_a_kernel_block():
    """The CPU kernel works in blocks of 32 to 512 tokens; remainders on both sides."""
    assert_equals_naive(prefix_lm([(130, 415), (33, 1)], CAUSAL), 2, 1, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["odd_rows", "prefix_lm", "many_blocks", "many_suffixes"])
def test_low_precision(dtype, name):
    """No further from the truth than torch's own attention with a mask, in the same dtype."""
    layout = {
        "odd_rows": rows([70, 1, 131]),
        "prefix_lm": prefix_lm([(50, 77), (3, 90)], CAUSAL),
        # dk and dv of the first keys are sums over 64 calls: a bf16 sum would show.
        "many_blocks": rows([256], block(4)),
        "many_suffixes": shared_prefix(9, [4] * 64),
    }[name]
    low = [x.to(dtype) for x in random_qkv(layout.length, 4, 2, 32)]
    mask_SS = dense_mask(layout)

    def sdpa(*qkv):
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_SS, enable_gqa=True)
        return out[0].transpose(0, 1)

    truth = value_and_gradients(lambda *x: naive_attend(*x, layout), *(x.double() for x in low))
    ours = value_and_gradients(lambda *x: attend(*x, layout), *low)
    trusted = value_and_gradients(sdpa, *low)
    for what, a, b, c in zip(("out", "dq", "dk", "dv"), ours, trusted, truth, strict=True):
        assert_floor(a, b, c, f"{name} {what}")


@each_layout
def test_views_of_a_mixed_qkv(layout):
    """megatron-core hands over k and v as views into one tensor; gradients flow back into it."""
    mixed = random_qkv(layout.length, 2, 1, 40)[0]  # [S, G = 2, (2 + 1 + 1) * 10]

    def split(function):
        def run(mixed_SGX):
            q, k, v = mixed_SGX.split([20, 10, 10], -1)
            assert not v.is_contiguous()
            return function(q.reshape(-1, 4, 10), k, v, layout)

        return run

    ours = value_and_gradients(split(attend), mixed)
    reference = value_and_gradients(split(naive_attend), mixed)
    assert ours[0].is_contiguous()
    for what, a, b in zip(("out", "dmixed"), ours, reference, strict=True):
        assert_algebra(a, b, what)


@pytest.mark.parametrize("name", ["equal_rows", "prefix_lm_causal", "shared_prefix"])
def test_strided_inputs_and_gradient(name):
    """Heads before tokens in memory, one key/value head expanded to two, and the expanded gradient of a sum."""
    layout = LAYOUTS[name]
    q, k, v = random_qkv(layout.length, 4, 1, 6)
    q = q.transpose(0, 1).contiguous().transpose(0, 1)

    def total(function):
        return lambda *qkv: function(qkv[0], *(x.expand(-1, 2, -1) for x in qkv[1:]), layout).sum(0).sum(0)

    results = [value_and_gradients(total(f), q, k, v) for f in (attend, naive_attend)]
    for what, a, b in zip(("sum", "dq", "dk", "dv"), *results, strict=True):
        assert_algebra(a, b, what)


@each_layout
def test_tiles_without_flash(layout, monkeypatch):
    """The `_dense_*` tiles keep the contract of the flash calls: merged forward and backward agree."""
    qkv = random_qkv(layout.length, 6, 2, 5)
    flash = value_and_gradients(lambda *x: attend(*x, layout), *qkv)

    def swapped(function):
        return lambda *x: tuple(y.transpose(1, 2) for y in function(*(z.transpose(1, 2) for z in x[:-1]), x[-1]))

    monkeypatch.setattr(attention, "_flash_forward", swapped(attention._dense_forward))
    monkeypatch.setattr(attention, "_flash_backward", swapped(attention._dense_backward))
    dense = value_and_gradients(lambda *x: attend(*x, layout), *qkv)
    for what, a, b in zip(("out", "dq", "dk", "dv"), dense, flash, strict=True):
        assert_equal_or_zero(what, a, b, layout)


@pytest.mark.parametrize("causal", [False, True])
def test_one_dense_tile_equals_one_flash_call(causal):
    """Output, lse, and the backward with an lse that other keys have raised."""
    key = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(2, 6, 7, 5, generator=key, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 3, 7 if causal else 11, 5, generator=key, dtype=torch.float64) for _ in range(2))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    dense = attention._dense_forward(q, k, v, causal)
    for what, a, b in zip(("out", "lse"), dense, flash, strict=True):
        assert_algebra(a, b, what)
    out, lse = flash[0] * 0.7, flash[1] + 0.3
    expected = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    parts = attention._dense_backward(grad, q, k, v, out, lse, causal)
    for what, a, b in zip(("dq", "dk", "dv"), parts, expected, strict=True):
        assert_algebra(a, b, what)


def assert_plan_covers(layout: Layout) -> None:
    """Every visible pair in exactly one tile, nothing else in any."""
    count_SS = torch.zeros(layout.length, layout.length, dtype=torch.int64)
    plan = plan_attention(layout)
    for call in plan.calls:
        tiles = call.tiles()
        for before, after in zip(tiles, tiles[1:], strict=False):
            assert before.q + before.q_len <= after.q and before.k + before.k_len <= after.k, "tiles of a call overlap"
        for tile in tiles:
            ones = torch.ones(tile.q_len, tile.k_len, dtype=torch.int64)
            assert not tile.causal or tile.q_len == tile.k_len
            count_SS[tile.q : tile.q + tile.q_len, tile.k : tile.k + tile.k_len] += ones.tril() if tile.causal else ones
    assert torch.equal(count_SS, dense_mask(layout).long())


@each_layout
def test_plan_covers_the_mask(layout):
    assert_plan_covers(layout)


def test_plan_covers_random_masks():
    for seed in range(200):
        assert_plan_covers(random_layout(random.Random(seed)))


@pytest.mark.parametrize(
    ("layout", "calls", "merge"),
    [
        (rows([5] * 7), 1, False),
        (rows([5] * 7, CAUSAL), 1, False),
        (rows([5, 5, 3, 5, 5]), 3, False),  # two runs of fives at one spacing, and the three
        (rows([12], block(4)), 3, False),  # one call per block: keys grow
        (rows([12] * 5, block(4)), 3, False),  # not one per block and row
        (rows([4096], block(4)), 11, True),  # 1024 steps: one call for each size of half, one for first steps
        (rows([4096], block(32)), 8, True),
        (rows([4094], block(32)), 15, True),  # 127 even steps leave a smaller half at most sizes; the ragged one
        (rows([1024] * 4, block(32)), 6, True),  # halves of a power of two of steps are batched over rows as well
        (rows([100] * 9, block(4)), 25, False),  # here rectangles are fewer
        (prefix_lm([(3, 5)]), 2, False),  # prefix and suffix keys touch: no merge
        (prefix_lm([(3, 5)] * 4), 2, False),
        (prefix_lm([(3, 5)] * 4, CAUSAL), 2, True),  # prefix and suffix on prefix, suffix triangle
    ],
)
def test_number_of_calls(layout, calls, merge):
    plan = plan_attention(layout)
    assert (len(plan.calls), plan.merge) == (calls, merge), plan


def test_equal_rows_give_bit_equal_results():
    """One call for all of them: a sequence does not feel its neighbours."""
    layout = rows([9, 9, 9])
    q, k, v = (x[:9].repeat(3, 1, 1) for x in random_qkv(9, 4, 2, 8))
    out = attend(q, k, v, layout)
    assert_exact(out[:9], out[18:])


class _Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation returned."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.entries = max([self.entries, *sizes])
        return result


LONG = 40_000


@pytest.mark.parametrize(
    "layout",
    [
        rows([LONG]),
        rows([LONG], CAUSAL),
        rows([LONG // 8] * 8, block(1000)),
        prefix_lm([(LONG // 2, LONG // 2)], CAUSAL),
    ],
    ids=["full", "causal", "blocks", "prefix_lm"],
)
def test_no_buffer_of_length_squared(layout):
    """Forward and backward of a long row under fake tensors: nothing exceeds `S * N * D`."""
    with FakeTensorMode(), _Largest() as largest:
        q, k, v = (torch.empty(LONG, n, 8, requires_grad=True) for n in (4, 2, 2))
        out = attend(q, k, v, layout)
        out.sum().backward()
    assert out.shape == q.grad.shape == (LONG, 4, 8) and k.grad.shape == v.grad.shape == (LONG, 2, 8)
    assert largest.entries == q.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["flash", "dense"])
def test_meta_tensors(dtype):
    """Shapes and dtypes on another device than the CPU: its flash call, and the tiles for what flash does not serve."""
    layout = LAYOUTS["prefix_lm_causal"]
    q, k, v = (torch.empty(layout.length, n, 8, device="meta", dtype=dtype) for n in (4, 2, 2))
    for got, like in zip(value_and_gradients(lambda *x: attend(*x, layout), q, k, v), (q, q, k, v), strict=True):
        assert (got.shape, got.dtype, got.device.type) == (like.shape, like.dtype, "meta")


@pytest.mark.parametrize(
    ("layout", "token"),
    [
        (Layout((Segment(0, 3), Segment(3, 2)), (Edge(0, 0, FULL),)), 3),
        (rows([5], strict_block(2)), 0),
        (Layout((Segment(0, 3), Segment(3, 2, 1)), (Edge(0, 1, CAUSAL), Edge(1, 1, FULL))), 0),
    ],
    ids=["no_edge", "first_strict_block", "keys_later"],
)
def test_a_token_that_sees_nothing_is_refused(layout, token):
    with pytest.raises(ValueError, match=f"token {token} of the row sees no token"):
        attend(*random_qkv(layout.length, 2, 2, 4), layout)


def test_wrong_length_is_refused():
    with pytest.raises(AssertionError):
        attend(*random_qkv(6, 2, 2, 4), rows([5]))


def test_keys_are_split_without_a_difference(monkeypatch):
    """Backward in blocks of keys (as long rows run it) against one call per tile."""
    layout = prefix_lm([(29, 18), (7, 3)])
    shapes = [(layout.length, heads, 8) for heads in (4, 2, 2)]
    seeds = [torch.Generator().manual_seed(i) for i in range(3)]
    inputs = [torch.randn(s, generator=g, dtype=torch.float64) for s, g in zip(shapes, seeds, strict=True)]
    whole = value_and_gradients(lambda q, k, v: attend(q, k, v, layout), *inputs)
    monkeypatch.setattr(attention, "KEYS_AT_ONCE", 5)
    for ours, theirs in zip(value_and_gradients(lambda q, k, v: attend(q, k, v, layout), *inputs), whole, strict=True):
        assert_algebra(ours, theirs)
