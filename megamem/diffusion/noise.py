"""Noise plans: which response positions a draw masks, and the weight that makes its log-prob sum an ELBO estimate.

A masked dLLM bounds log p(y|x) by the ELBO (BGPO eq. 3-5). With `S(m) = sum_{i in m} log p(y_i | y masked at m, x)`,

    ELBO = E_t[ (1/t) S(m) ] = sum_{k=1..L} (1/k) * mean over masks of size k of S(m)      t ~ U(0,1), m ~ Bernoulli(t)

The second form integrates t out. Every estimator below draws masks and weights with `E[weight * S(mask)] = ELBO`:

    iid_t       the paper's: one noise level per draw. Its variance is infinite (E[S^2 / t^2] diverges at t -> 0).
    count       t integrated out: a uniform number of masked positions per draw.
    stratified  as count, and the numbers of one sample spread evenly: one shared offset.
    coupled     draws in pairs that mask complementary positions: a pair scores every token exactly once.
    full        no noise: everything masked, weight 1. Not an ELBO; the one-step likelihood of diffu-GRPO (d1).

A plan is data: drawn once per sample from a keyed generator (`megamem.platform.rng.generator`), it travels in the
batch, so that the old and the new policy are scored on the same masks (BGPO eq. 10).

Shapes: D draws of one sample, L response tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megamem.errors import UserError


@dataclass(frozen=True, eq=False)
class NoisePlan:
    """All draws of one sample.

    Attributes:
        masked_DL: bool, the response positions each draw masks.
        weight_D: float64, the factor on the sum of log-probs (nats) over the masked positions of a draw.
        level_D: float64 in [0, 1], the noise level: t, or masked positions / L.
    """

    masked_DL: Tensor
    weight_D: Tensor
    level_D: Tensor


def draw_noise(estimator: str, length: int, draws: int, key: torch.Generator) -> NoisePlan:
    """Draws the noise of one sample.

    Args:
        estimator: a name in `ESTIMATORS`.
        length: L, the number of response tokens, at least 1.
        draws: D, the number of Monte-Carlo draws (`n_t` of the paper), at least 1; even for `coupled`.
        key: a CPU generator, e.g. `generator(seed, "noise", step, sample)`; it is advanced.

    Raises:
        UserError (a ValueError): an unknown estimator, or a length or number of draws it cannot serve.
    """
    if estimator not in ESTIMATORS:
        raise UserError(f"unknown noise estimator {estimator!r}; choose one of {', '.join(ESTIMATORS)}")
    if length < 1 or draws < 1:
        raise UserError(f"a noise plan needs at least one response token and one draw, got {length} and {draws}")
    return ESTIMATORS[estimator](length, draws, key)


def mask_prompt(length: int, probability: float, generator: torch.Generator) -> Tensor:
    """Prompt positions hidden from the model, bool `[length]`: each with `probability` (diffu-GRPO in d1: 0.15)."""
    if not 0.0 <= probability <= 1.0:
        raise UserError(f"prompt mask probability must lie in [0, 1], got {probability}")
    return _uniform(length, key=generator) < probability


def stratified_counts(offset: Tensor, length: int, draws: int) -> Tensor:
    """Mask size of draw j: `1 + floor(((u + j/D) mod 1) * L)`, int64 `[..., D]`; u float64 in [0, 1), `[..., 1]`.

    With u uniform every draw alone is uniform on 1..L, for any L and D. (The rounded form in circulation is not when D
    does not divide L: half-to-even moves single counts by up to 50 %.)
    """
    spread_D = torch.arange(draws, dtype=torch.float64) / draws
    return 1 + ((offset + spread_D) % 1.0 * length).floor().long()


def _iid_t(length: int, draws: int, key: torch.Generator) -> NoisePlan:
    level_D = 1.0 - _uniform(draws, key=key)  # (0, 1]: the weight stays finite
    return NoisePlan(_uniform(draws, length, key=key) < level_D[:, None], 1.0 / level_D, level_D)


def _count(length: int, draws: int, key: torch.Generator) -> NoisePlan:
    return _counted(torch.randint(1, length + 1, (draws,), generator=key), length, key)


def _stratified(length: int, draws: int, key: torch.Generator) -> NoisePlan:
    return _counted(stratified_counts(_uniform(1, key=key), length, draws), length, key)


def _coupled(length: int, draws: int, key: torch.Generator) -> NoisePlan:
    """Pairs (2j, 2j+1) of complementary masks; k ~ U{0..L} makes both halves alike, each unbiased by itself."""
    if draws % 2:
        raise UserError(f"the coupled estimator draws pairs: the number of draws must be even, got {draws}")
    first = _mask_exactly(torch.randint(0, length + 1, (draws // 2,), generator=key), length, key)
    masked_DL = torch.stack([first, ~first], dim=1).flatten(0, 1)
    count_D = masked_DL.sum(-1).double()
    weight_D = torch.where(count_D > 0, (length + 1) / count_D.clamp(min=1), 0.0)
    return NoisePlan(masked_DL, weight_D, count_D / length)


def _full(length: int, draws: int, key: torch.Generator) -> NoisePlan:
    one_D = torch.ones(draws, dtype=torch.float64)
    return NoisePlan(torch.ones(draws, length, dtype=torch.bool), one_D, one_D)


def _counted(count_D: Tensor, length: int, key: torch.Generator) -> NoisePlan:
    level_D = count_D.double() / length
    return NoisePlan(_mask_exactly(count_D, length, key), 1.0 / level_D, level_D)


def _mask_exactly(count_D: Tensor, length: int, key: torch.Generator) -> Tensor:
    """bool `[D, L]`: a uniformly random set of `count_D` positions (sorting uniforms gives a random permutation)."""
    return _uniform(len(count_D), length, key=key).argsort(-1) < count_D[:, None]


def _uniform(*shape: int, key: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=key, dtype=torch.float64)


ESTIMATORS: dict[str, Callable[[int, int, torch.Generator], NoisePlan]] = {
    "iid_t": _iid_t,
    "count": _count,
    "stratified": _stratified,
    "coupled": _coupled,
    "full": _full,
}
