"""Floating-point operations of a step: torch's own formulas over the operators that run, and one for CPU attention.

(`FlopCounterMode` itself also tracks modules, which streamed backwards do not survive, and knows no CPU attention.)
Attention counts 4 D operations for every query head and pair of tokens forward, and 10 D backward (scores again, and
four products), as torch's own formulas do for other kernels; of a causal tile only the pairs that are seen, as flash
kernels compute them. A tile under an explicit mask counts whole: that is what its kernel computes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megamem.config.architecture import Architecture
from megamem.layout.layout import Layout
from megamem.models.flops import model_flops

FORWARD, BACKWARD = 4, 10  # per pair of tokens and element of a query head


def counted(run: Callable[[], None]) -> int:
    """Operations that `run` executes."""
    with _Counter() as counter:
        run()
    return counter.flops


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        formula = _FLASH.get(function._overloadpacket) or flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def predicted(arch: Architecture, tokens: int, scored: int, pairs: int) -> int:
    """What `counted` gives for a forward and backward without recomputation (tests compare the two).

    Args:
        tokens: through the layers.
        scored: through the head.
        pairs: (query, key) pairs that one layer's attention computes.
    """
    recomputed = 2 * arch.heads * arch.head_dim * pairs  # scores, in the backward of a flash kernel
    return model_flops(arch, tokens, scored, pairs) + arch.layers * recomputed


def pairs_of(layouts: Sequence[Layout]) -> int:
    """(query, key) pairs that attention computes in these rows."""
    return sum(layout.visible_pairs(0, layout.length) for layout in layouts)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, **_) -> int:
    return FORWARD * _products(q, k, causal)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, causal: bool, **_
) -> int:
    return BACKWARD * _products(q, k, causal)


def _products(q: Tensor, k: Tensor, causal: bool) -> int:
    """Pairs that are seen times elements of a query; causal tiles are squares here."""
    batch, heads, queries, dim = q.shape
    pairs = queries * (queries + 1) // 2 if causal else queries * k.size(2)
    return batch * heads * dim * pairs


_FLASH: dict[Callable[..., Tensor], Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
}
