"""Noise plans and ELBO estimates against enumeration. Shapes: D draws, L response tokens, N independent plans."""

import math

import numpy
import pytest
import torch

from megamem.diffusion.elbo import elbo_terms, enumerated_elbo
from megamem.diffusion.noise import ESTIMATORS, draw_noise, mask_prompt, stratified_counts
from megamem.errors import UserError
from megamem.platform.rng import generator

LENGTH = 5
BIT_L = 2 ** torch.arange(LENGTH)
ELBO_ESTIMATORS = [name for name in ESTIMATORS if name != "full"]


@pytest.fixture(scope="module")
def table():
    """An arbitrary 'model': log-probs of every position under every mask, `[2^L, L]`."""
    return -3 * torch.rand(2**LENGTH, LENGTH, generator=generator(0, "table"), dtype=torch.float64)


@pytest.fixture(scope="module")
def exact(table):
    return enumerated_elbo(lambda masked_L: table[(masked_L * BIT_L).sum()], LENGTH)


def masked_sum_of_code(table):
    """S(m) of every mask code, `[2^L]`, and its size."""
    masked = (torch.arange(2**LENGTH)[:, None] & BIT_L) > 0
    return (table * masked).sum(-1), masked.sum(-1).double()


def estimates(masked_UL, weight_U, table):
    logp_UL = table[(masked_UL * BIT_L).sum(-1)]
    return elbo_terms(logp_UL[masked_UL], masked_UL.nonzero()[:, 0], weight_U)


def test_enumeration_equals_the_time_integral(table, exact):
    sum_code, size_code = masked_sum_of_code(table)
    nodes, weights = numpy.polynomial.legendre.leggauss(LENGTH)  # exact: the integrand is a polynomial of degree L - 1
    integral = 0.0
    for t, w in zip((nodes + 1) / 2, weights / 2, strict=True):
        probability_code = t**size_code * (1 - t) ** (LENGTH - size_code)
        integral += w * (probability_code * sum_code).sum().item() / t
    assert integral == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("estimator", ELBO_ESTIMATORS)
def test_mean_is_the_elbo(estimator, table, exact):
    """D = 4 does not divide L = 5. Plans are independent, draws within one need not be."""
    key = generator(1, estimator)
    plans = [draw_noise(estimator, LENGTH, 4, key) for _ in range(4000)]
    ell_U = estimates(torch.cat([p.masked_DL for p in plans]), torch.cat([p.weight_D for p in plans]), table)
    mean_N = ell_U.view(-1, 4).mean(-1)
    standard_error = mean_N.std() / math.sqrt(len(mean_N))
    assert abs(mean_N.mean() - exact) < 5 * standard_error
    assert standard_error < 0.02 * abs(exact)


@pytest.mark.parametrize(
    ("estimator", "sizes"),
    [("count", range(1, LENGTH + 1)), ("stratified", range(1, LENGTH + 1)), ("coupled", range(LENGTH + 1))],
)
def test_weight_of_each_size_makes_the_mean_exact(estimator, sizes, table, exact):
    """Sizes uniform on `sizes` and masks uniform given their size; the weights are read off the plan."""
    plan = draw_noise(estimator, LENGTH, 400, generator(2))
    weight_of_size = dict(zip(plan.masked_DL.sum(-1).tolist(), plan.weight_D.tolist(), strict=True))
    assert sorted(weight_of_size) == list(sizes)
    sum_code, size_code = masked_sum_of_code(table)
    expected = sum(weight_of_size[k] * sum_code[size_code == k].mean().item() for k in sizes) / len(sizes)
    assert expected == pytest.approx(exact, rel=1e-12)
    assert torch.equal(plan.level_D, plan.masked_DL.sum(-1).double() / LENGTH)


def test_sizes_and_masks_are_uniform():
    for estimator, sizes in [("count", LENGTH), ("stratified", LENGTH), ("coupled", LENGTH + 1)]:
        masks = draw_noise(estimator, LENGTH, 8000, generator(3, estimator)).masked_DL[::2]  # one of each coupled pair
        size_N = masks.sum(-1)
        for size in range(LENGTH + 1 - sizes, LENGTH + 1):
            chosen = size_N == size
            assert abs(chosen.double().mean() - 1 / sizes) < 5 * math.sqrt(1 / sizes / 4000)
            bar = 5 * math.sqrt(0.25 / chosen.sum())
            assert (masks[chosen].double().mean(0) - size / LENGTH).abs().max() < bar


def test_iid_t_masks_at_its_level():
    plan = draw_noise("iid_t", LENGTH, 40_000, generator(4))
    assert torch.allclose(plan.weight_D * plan.level_D, torch.ones(()).double(), rtol=1e-15)
    assert abs(plan.level_D.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 40_000)
    low_D = plan.level_D < 0.5
    for part, level in [(low_D, 0.25), (~low_D, 0.75)]:
        assert (plan.masked_DL[part].double().mean(0) - level).abs().max() < 5 * math.sqrt(0.25 / part.sum())


@pytest.mark.parametrize(("length", "draws"), [(5, 4), (24, 16), (7, 16), (100, 16), (1, 3), (512, 16)])
def test_stratified_marginals_are_exactly_uniform(length, draws):
    """Every draw, over a grid of offsets that meets each interval of constant counts equally often."""
    cells = length * draws
    offset_N1 = ((torch.arange(cells, dtype=torch.float64) + 0.5) / cells)[:, None]
    count_ND = stratified_counts(offset_N1, length, draws)
    for count_N in count_ND.T:
        assert count_N.bincount(minlength=length + 1).tolist() == [0] + [draws] * length


def test_stratified_spreads_and_stays_in_range():
    assert stratified_counts(torch.zeros(1).double(), 8, 4).tolist() == [1, 3, 5, 7]
    largest = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    for length in range(1, 3000, 7):
        assert stratified_counts(largest, length, 1).item() == length


def test_coupled_pairs_are_complements():
    plan = draw_noise("coupled", 6, 200, generator(5))
    assert torch.equal(plan.masked_DL[0::2], ~plan.masked_DL[1::2])
    count_D = plan.masked_DL.sum(-1)
    assert {0, 6} <= set(count_D.tolist())
    assert torch.all(plan.weight_D[count_D == 0] == 0)
    assert plan.weight_D[count_D == 6].tolist() == pytest.approx([7 / 6] * int((count_D == 6).sum()))
    with pytest.raises(ValueError, match="even"):
        draw_noise("coupled", 6, 3, generator(5))


def test_full_masks_everything():
    plan = draw_noise("full", 4, 2, generator(6))
    assert plan.masked_DL.all() and plan.masked_DL.shape == (2, 4)
    assert plan.weight_D.tolist() == plan.level_D.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_plan_is_a_function_of_its_key(estimator):
    plans = [draw_noise(estimator, 64, 8, generator(7, "noise", 3, sample)) for sample in (11, 11, 12)]
    for field in ("masked_DL", "weight_D", "level_D"):
        assert torch.equal(getattr(plans[0], field), getattr(plans[1], field))
    assert torch.equal(plans[0].masked_DL, plans[2].masked_DL) == (estimator == "full")
    assert plans[0].masked_DL.dtype == torch.bool
    assert plans[0].weight_D.dtype == plans[0].level_D.dtype == torch.float64


def test_mask_prompt():
    masked = mask_prompt(20_000, 0.15, generator(8))
    assert masked.dtype == torch.bool and masked.shape == (20_000,)
    assert abs(masked.double().mean() - 0.15) < 5 * math.sqrt(0.15 * 0.85 / 20_000)
    assert not mask_prompt(100, 0.0, generator(8)).any() and mask_prompt(100, 1.0, generator(8)).all()
    assert len(mask_prompt(0, 0.15, generator(8))) == 0


@pytest.mark.parametrize(("estimator", "length", "draws"), [("gauss", 4, 2), ("count", 0, 2), ("count", 4, 0)])
def test_mistakes_are_named(estimator, length, draws):
    with pytest.raises(UserError):
        draw_noise(estimator, length, draws, generator(9))


def test_elbo_terms_is_a_differentiable_segment_sum():
    logp_T = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    weight_U = torch.tensor([10.0, 100.0, 1000.0], dtype=torch.float64)
    ell_U = elbo_terms(logp_T, torch.tensor([2, 0, 2]), weight_U)
    assert ell_U.tolist() == [-20.0, 0.0, -5000.0] and ell_U.dtype == torch.float64
    ell_U.sum().backward()
    assert logp_T.grad.tolist() == [1000.0, 10.0, 1000.0]
    assert elbo_terms(torch.zeros(0), torch.zeros(0, dtype=torch.long), weight_U).tolist() == [0.0, 0.0, 0.0]
