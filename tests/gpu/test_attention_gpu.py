"""Attention on a GPU: flash in half precision, score tiles in fp32, FlexAttention compiled. Skipped without one."""

import pytest
import torch

from megamem.layout.layout import CAUSAL, block, prefix_lm, rows
from megamem.layout.trees import Branch, Tree, tree_layout
from megamem.ops.attention import attend, naive_attend
from megamem.ops.flex import flex_attend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYOUTS = {
    "packed": rows([64, 64, 7, 1]),
    "causal": rows([65, 33], CAUSAL),
    "block": rows([50, 20], block(8)),
    "prefix": prefix_lm([(31, 12), (8, 3)]),
    "tree": tree_layout([Tree(200, (Branch(70), Branch(301), Branch(5)))], CAUSAL),
    "noisy copies": tree_layout([Tree(160, (Branch(61, 3), Branch(40, 2)))], block(8)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", [attend, flex_attend])
def test_outputs_and_gradients(name, dtype, kernel):
    """Error against fp64 at most 1.5 x that of the dense reference in the same precision (FLOOR)."""
    layout, generator = LAYOUTS[name], torch.Generator("cuda").manual_seed(0)
    shapes = [(layout.length, heads, 32) for heads in (4, 2, 2, 4)]
    exact = [torch.randn(s, dtype=torch.float64, device="cuda", generator=generator) for s in shapes]

    def run(function, to):
        q, k, v, grad = (x.to(to).detach().requires_grad_() for x in exact)
        out = function(q, k, v, layout)
        return [out, *torch.autograd.grad(out, (q, k, v), grad)]

    truth, ours, trusted = run(naive_attend, torch.float64), run(kernel, dtype), run(naive_attend, dtype)
    for t, o, r in zip(truth, ours, trusted, strict=True):
        assert (o.double() - t).norm() <= 1.5 * (r.double() - t).norm()
