"""FlexAttention over layouts against the dense reference. torch refuses a backward on the CPU, although its dense path
has one: here it is let through. The compiled kernel is in tests/gpu."""

import random

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

from megamem.layout.dense import dense_mask
from megamem.layout.layout import CAUSAL, own_block, rows
from megamem.layout.trees import Branch, Tree, tree_layout
from megamem.ops.attention import naive_attend
from megamem.ops.flex import flex_attend, sees, tiles
from tests.helpers import random_layout, value_and_gradients
from tests.tol import assert_algebra
from tests.unit.test_attention import LAYOUTS

torch.set_num_threads(1)

CPU = torch.device("cpu")
ALL = LAYOUTS | {"own_block": rows([9, 4], own_block(4))}
ALL |= {f"random_{seed}": random_layout(random.Random(seed)) for seed in range(20)}


def qkv(layout, heads, groups):
    key = torch.Generator().manual_seed(0)
    return [torch.randn(layout.length, n, 16, generator=key, dtype=torch.float64) for n in (heads, groups, groups)]


@pytest.mark.parametrize("layout", ALL.values(), ids=ALL)
def test_pairs_are_those_of_the_dense_mask(layout):
    predicate, zero = sees(layout, CPU), torch.zeros((), dtype=torch.long)
    index = torch.arange(layout.length)
    found = predicate(zero, zero, index[:, None], index[None, :])
    assert torch.equal(found, dense_mask(layout))


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("layout", ALL.values(), ids=ALL)
def test_output_and_gradients(monkeypatch, layout, heads, groups):
    monkeypatch.setattr(torchs, "_validate_device", lambda *tensors: None)
    inputs = qkv(layout, heads, groups)
    found = value_and_gradients(lambda *x: flex_attend(*x, layout), *inputs)
    expected = value_and_gradients(lambda *x: naive_attend(*x, layout), *inputs)
    assert found[0].is_contiguous()
    assert_algebra(found[0], expected[0], "out")
    # Together: the gradient of a query that sees one key is 0.
    assert_algebra(*(torch.cat([x.flatten() for x in side[1:]]) for side in (found, expected)), "dq, dk, dv")


@pytest.mark.parametrize(
    "layout",
    [rows([256, 256]), rows([300, 90, 1], CAUSAL), tree_layout([Tree(200, (Branch(70), Branch(300)))], CAUSAL)],
    ids=["equal", "odd", "tree"],
)
def test_tiles_are_those_of_torch(layout):
    size = layout.length
    expected = torchs.create_block_mask(sees(layout, CPU), None, None, size, size, CPU)
    found = tiles(layout, CPU)
    assert torch.equal(found.to_dense(), expected.to_dense()) and found.sparsity() == expected.sparsity()
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert tiles(layout, CPU) is found and 0 < found.sparsity() < 100
