"""ELBO estimates from selected log-probs, and the exact ELBO by enumeration for small responses.

Shapes: U units (here: draws of any mixture of samples), L response tokens, T scored tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def elbo_terms(logp_T: Tensor, draw_T: Tensor, weight_U: Tensor) -> Tensor:
    """ELBO estimate of every draw: `weight_u * sum of logp over the masked tokens of draw u` (BGPO eq. 4).

    Args:
        logp_T: log-probs (nats) of the masked tokens of all draws, any order, any float dtype; differentiable.
        draw_T: int64, the draw in 0..U-1 each token belongs to. A draw without tokens gets 0.
        weight_U: float64 `NoisePlan.weight_D` of the draws.

    Returns:
        `[U]` in nats, in the wider of the two dtypes: with float64 weights the order of a GPU's atomic adds stays below
        any precision the model itself has.
    """
    dtype = torch.promote_types(logp_T.dtype, weight_U.dtype)
    sum_U = torch.zeros(weight_U.shape, dtype=dtype, device=logp_T.device).index_add(0, draw_T, logp_T.to(dtype))
    return weight_U * sum_U


def enumerated_elbo(logp_of_mask: Callable[[Tensor], Tensor], length: int) -> float:
    """The exact ELBO in nats: `sum_k (1/k) * mean over masks of size k of sum_{masked} log p`, all 2^L - 1 masks.

    It is BGPO eq. 3 with t integrated out: a mask of size k has weight `int t^(k-1) (1-t)^(L-k) dt = 1/(k * C(L,k))`.

    Args:
        logp_of_mask: from masked positions (bool `[L]`) to log-probs `[L]`; unmasked entries are not read.
        length: L, at most 20.
    """
    assert 1 <= length <= 20, f"2^{length} masks cannot be enumerated"
    bit_L = 2 ** torch.arange(length)
    total = 0.0
    for code in range(1, 2**length):
        masked_L = (code & bit_L) > 0
        size = code.bit_count()
        total += logp_of_mask(masked_L)[masked_L].double().sum().item() / (size * math.comb(length, size))
    return total
