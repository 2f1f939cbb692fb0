"""Objectives, advantages and the reduction, on a toy masked model whose full loss autograd can differentiate.

Shapes: N cases, B samples, D draws, U units, T scored tokens, L response tokens, V vocabulary.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from megamem.diffusion.elbo import elbo_terms
from megamem.diffusion.noise import draw_noise
from megamem.errors import UserError
from megamem.objectives.advantages import ADVANTAGES, loo, mean, mean_std
from megamem.objectives.base import RatioLimits, bounded_exp, clipped, coefficients, k3
from megamem.objectives.reduction import sample_weights
from megamem.objectives.registry import FACTORIES, build_objective
from megamem.platform.rng import generator

DRAWS, VOCABULARY, LONGEST = 4, 5, 6


def config(name, clip_low=None, clip_high=None, dual_clip=None, exponent_limit=20.0, kl=0.0):
    return SimpleNamespace(
        name=name, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, exponent_limit=exponent_limit, kl=kl
    )


def normal(*shape, key):
    return torch.randn(shape, generator=generator(0, key), dtype=torch.float64)


# --- the toy model: logits of a position are linear in the mask; samples differ in length and target ------------------


def make_samples(estimator):
    samples = []
    for index, (length, adv) in enumerate([(6, 1.3), (2, -0.7), (5, 0.4), (3, -1.9), (6, 0.0), (4, -0.2)]):
        key = generator(0, "sample", index)
        target_L = torch.randint(0, VOCABULARY, (length,), generator=key)
        plan = draw_noise(estimator, length, DRAWS, key)
        samples.append(SimpleNamespace(target_L=target_L, plan=plan, adv=adv, length=length))
    return samples


def make_theta(key, size=0.4):
    return (size * normal(LONGEST + 1, LONGEST, VOCABULARY, key=key)).requires_grad_()


REFERENCE = make_theta("reference").detach()


def token_logp(theta, sample, masked_DL):
    weights = theta[: sample.length, : sample.length]
    logits_DLV = theta[-1, : sample.length] + torch.einsum("dl,lmv->dmv", masked_DL.double(), weights)
    return logits_DLV.log_softmax(-1)[:, torch.arange(sample.length), sample.target_L]


def draw_elbos(theta, sample):
    """ELBO estimates of the draws, `[D]`."""
    masked_DL = sample.plan.masked_DL
    logp_T = token_logp(theta, sample, masked_DL)[masked_DL]
    return elbo_terms(logp_T, masked_DL.nonzero()[:, 0], sample.plan.weight_D)


def token_units(theta, sample):
    return token_logp(theta, sample, torch.ones(1, sample.length, dtype=torch.bool))[0]


UNITS = {"token": token_units, "draw": draw_elbos, "sample": draw_elbos}
JOIN = {"token": torch.cat, "draw": torch.cat, "sample": torch.stack}


def engine_loss(objective, theta, old_theta, samples, weight_B):
    """What a training step does with one micro-batch."""
    join = JOIN[objective.level]
    with torch.no_grad():
        old = join([UNITS[objective.level](old_theta, sample) for sample in samples])
        ref = join([UNITS[objective.level](REFERENCE, sample) for sample in samples]) if objective.penalty else None
    units = [UNITS[objective.level](theta, sample) for sample in samples]
    new = join(units)
    size_B = torch.tensor([len(unit) for unit in units])
    adv_B = torch.tensor([sample.adv for sample in samples], dtype=torch.float64)
    if objective.level == "sample":
        adv, weight = adv_B, weight_B[:, None]
    else:
        adv, weight = adv_B.repeat_interleave(size_B), weight_B.repeat_interleave(size_B)
    with torch.no_grad():
        c = coefficients(objective, new, old, adv, ref=ref)
    assert c.shape == new.shape and not c.requires_grad and c.dtype == torch.float64
    return (weight * c * new).sum()


def weights(samples, kind, level, all_reduce=lambda x: x, groups=None):
    tokens_B = torch.tensor([sample.length for sample in samples])
    groups_B = torch.tensor(groups if groups is not None else [0] * len(samples), dtype=torch.long)
    return sample_weights(kind, tokens_B, groups_B, DRAWS, level, all_reduce, longest=LONGEST)


# The loss of one sample as the papers write it, for autograd to differentiate whole.


def bgpo_formula(theta, old_theta, sample):
    d_D = draw_elbos(theta, sample) - draw_elbos(old_theta, sample).detach()
    return -((1 + d_D) if sample.adv >= 0 else d_D.exp()).mean() * sample.adv


def vrpo_formula(theta, old_theta, sample):
    return -(draw_elbos(theta, sample).mean() - draw_elbos(old_theta, sample).mean().detach()).exp() * sample.adv


def sft_formula(theta, old_theta, sample):
    return -draw_elbos(theta, sample).mean() * sample.adv


def diffu_grpo_formula(theta, old_theta, sample):
    ratio_T = (token_units(theta, sample) - token_units(old_theta, sample).detach()).exp()
    return -torch.min(ratio_T * sample.adv, ratio_T.clamp(0.8, 1.3) * sample.adv).mean()


def grpo_formula(theta, old_theta, sample, kl=0.3):
    """arXiv 2402.03300 eq. 3 and 4, with DAPO's uneven clip and a dual clip at 3."""
    new_T, ref_T = token_units(theta, sample), token_units(REFERENCE, sample)
    ratio_T = (new_T - token_units(old_theta, sample).detach()).exp()
    value_T = torch.min(ratio_T * sample.adv, ratio_T.clamp(0.8, 1.3) * sample.adv)
    if sample.adv < 0:
        value_T = torch.max(value_T, torch.full_like(value_T, 3 * sample.adv))
    return -(value_T - kl * ((ref_T - new_T).exp() - (ref_T - new_T) - 1)).mean()


FORMULAS = {
    "bgpo": (config("bgpo"), bgpo_formula),
    "vrpo_ol": (config("vrpo_ol"), vrpo_formula),
    "sft": (config("sft"), sft_formula),
    "diffu_grpo": (config("diffu_grpo", clip_low=0.2, clip_high=0.3), diffu_grpo_formula),
    "grpo": (config("grpo", clip_low=0.2, clip_high=0.3, dual_clip=3.0, kl=0.3), grpo_formula),
}


def gradient(loss, theta):
    return torch.autograd.grad(loss, theta)[0]


def assert_same(actual, expected, bar=1e-12):
    assert (actual - expected).abs().max() <= bar * expected.abs().max(), (actual - expected).abs().max()


# --- gradients ----------------------------------------------------------------------------------------------------


def test_every_objective_is_tested_against_its_formula():
    assert FORMULAS.keys() == FACTORIES.keys()


@pytest.mark.parametrize("estimator", ["count", "iid_t"])
@pytest.mark.parametrize("name", FORMULAS)
def test_off_policy_gradient_is_that_of_the_full_formula(name, estimator):
    options, formula = FORMULAS[name]
    objective, samples = build_objective(options), make_samples(estimator)
    theta, old_theta = make_theta("new"), make_theta("old")
    loss = engine_loss(objective, theta, old_theta, samples, weights(samples, "sequence", objective.level))
    expected = sum(formula(theta, old_theta, sample) for sample in samples) / len(samples)
    assert_same(gradient(loss, theta), gradient(expected, theta))


@pytest.mark.parametrize("estimator", ["count", "stratified", "coupled"])
def test_on_policy_bgpo_vrpo_and_elbo_gradients_agree(estimator):
    """BGPO eq. 15-17: at theta = theta_old all are A * grad ELBO estimate."""
    samples, theta = make_samples(estimator), make_theta("new")
    expected = gradient(sum(sft_formula(theta, theta, sample) for sample in samples) / len(samples), theta)
    for name in ("bgpo", "vrpo_ol"):
        objective = build_objective(config(name))
        loss = engine_loss(objective, theta, theta, samples, weights(samples, "sequence", objective.level))
        assert_same(gradient(loss, theta), expected, bar=1e-8)


@pytest.mark.parametrize("kind", ["sequence", "token", "group", "constant"])
@pytest.mark.parametrize("name", FORMULAS)
def test_unequal_micro_batches_give_the_full_batch_gradient(name, kind):
    objective, samples = build_objective(FORMULAS[name][0]), make_samples("count")
    theta, old_theta = make_theta("new"), make_theta("old")
    weight_B = weights(samples, kind, objective.level, groups=[0, 0, 0, 9, 9, 4])
    whole = gradient(engine_loss(objective, theta, old_theta, samples, weight_B), theta)
    for begin, end in [(0, 1), (1, 4), (4, 6)]:
        engine_loss(objective, theta, old_theta, samples[begin:end], weight_B[begin:end]).backward()
    assert_same(theta.grad, whole)


@pytest.mark.parametrize("index", [0, 3])  # a positive and a negative advantage
def test_draws_accumulated_one_backward_each_equal_one_backward(index):
    """The point of BGPO: draw by draw, each graph freed before the next is built."""
    objective, sample = build_objective(config("bgpo")), make_samples("stratified")[index]
    theta, old_theta = make_theta("new"), make_theta("old")
    old_D = draw_elbos(old_theta, sample).detach()
    for draw in range(DRAWS):
        ell = draw_elbos(theta, sample)[draw : draw + 1]
        c = coefficients(objective, ell, old_D[draw : draw + 1], torch.tensor([sample.adv], dtype=torch.float64))
        (c * ell / DRAWS).sum().backward()
    assert_same(theta.grad, gradient(bgpo_formula(theta, old_theta, sample), theta))


def test_scale_is_part_of_the_log_ratio():
    objective = build_objective(config("bgpo"))
    new_U, old_U = normal(3, key="a"), normal(3, key="b")
    adv_U, scale_U = torch.tensor([-1.0, -2.0, 3.0]).double(), torch.tensor([0.5, 0.1, 0.2]).double()
    expected_U = -scale_U * adv_U * torch.where(adv_U < 0, ((new_U - old_U) * scale_U).exp(), 1.0)
    assert_same(coefficients(objective, new_U, old_U, adv_U, scale_U), expected_U)


# --- surrogates ---------------------------------------------------------------------------------------------------


def test_bgpo_is_a_lower_bound_of_vrpo_ol():
    d_ND = 2 * normal(10_000, DRAWS, key="d") * torch.rand(10_000, 1, generator=generator(1))
    adv_N = normal(10_000, key="adv")
    assert (adv_N > 0).sum() > 4000 and (adv_N < 0).sum() > 4000
    bgpo, vrpo = build_objective(config("bgpo")), build_objective(config("vrpo_ol"))
    bound_N = bgpo.surrogate(d_ND.flatten(), adv_N.repeat_interleave(DRAWS)).view(-1, DRAWS).mean(-1)
    exact_N = vrpo.surrogate(d_ND, adv_N)
    assert torch.all(bound_N <= exact_N + 1e-12 * exact_N.abs())
    assert (exact_N - bound_N).max() > 0.1  # not by being equal


@pytest.mark.parametrize("clip", [{}, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}])
@pytest.mark.parametrize("name", FACTORIES)
def test_finite_for_any_log_ratio(name, clip):
    objective = build_objective(config(name, **({} if name == "sft" else clip)))
    for d, adv in itertools.product([-1e4, -30.0, -1.0, 0.0, 19.9, 20.0, 30.0, 1e4], [-2.0, 0.0, 2.0]):
        new = torch.full((1, 2), d) if objective.level == "sample" else torch.tensor([d])
        adv_1 = torch.tensor([adv])
        assert objective.surrogate(new, adv_1).isfinite().all(), (d, adv)
        c = coefficients(objective, new, torch.zeros_like(new), adv_1)
        assert c.isfinite().all() and c.float().isfinite().all() and torch.all(c * adv <= 0), (d, adv, c)


def test_beyond_the_exponent_limit_the_slope_stays():
    """A draw that is far too likely under a negative advantage is still pushed down, with coefficient e^limit |A|."""
    objective = build_objective(config("bgpo", exponent_limit=3.0))
    new_U, adv_U = torch.tensor([2.0, 3.0, 4.0, 1e4]).double(), torch.full((4,), -2.0).double()
    slope_U = 2 * torch.tensor([2.0, 3.0, 3.0, 3.0]).double().exp()
    assert_same(coefficients(objective, new_U, torch.zeros(4), adv_U), slope_U)
    x = torch.linspace(-5, 3, 50).double()
    assert torch.equal(bounded_exp(x, 3.0), x.exp())


def test_clip_stops_the_gradient_on_the_profitable_side_only():
    ratio = torch.tensor([0.5, 0.9, 1.1, 1.5, 5.0], dtype=torch.float64)
    limits = RatioLimits(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    for adv, value, slope in [
        (2.0, [1.0, 1.8, 2.2, 2.6, 2.6], [2.0, 2.0, 2.0, 0.0, 0.0]),
        (-2.0, [-1.6, -1.8, -2.2, -3.0, -6.0], [0.0, -2.0, -2.0, -2.0, 0.0]),
    ]:
        leaf = ratio.clone().requires_grad_()
        result = clipped(leaf, torch.full_like(ratio, adv), limits)
        assert result.tolist() == pytest.approx(value)
        assert gradient(result.sum(), leaf).tolist() == slope


def test_clip_may_be_one_sided_or_off():
    ratio, adv = torch.tensor([0.1, 9.0], dtype=torch.float64), torch.tensor([-1.0, 1.0], dtype=torch.float64)
    assert clipped(ratio, adv, RatioLimits()).tolist() == [-0.1, 9.0]
    assert clipped(ratio, adv, RatioLimits(clip_low=0.2)).tolist() == [-0.8, 9.0]
    assert clipped(ratio, adv, RatioLimits(clip_high=0.2)).tolist() == [-0.1, 1.2]


def test_clip_reaches_bgpo_through_the_config():
    objective = build_objective(config("bgpo", clip_low=0.2, clip_high=0.2))
    new_U, adv_U = torch.tensor([0.5, -0.5, -5.0]).double(), torch.tensor([1.0, -1.0, 1.0]).double()
    assert coefficients(objective, new_U, torch.zeros(3), adv_U).tolist() == [0.0, 0.0, -1.0]


def test_coefficients_ignore_the_callers_graph_and_precision():
    objective = build_objective(config("vrpo_ol"))
    new_BD = torch.randn(3, 2, generator=generator(2)).bfloat16().requires_grad_()
    c = coefficients(objective, new_BD, new_BD.detach(), torch.ones(3))
    assert c.dtype == torch.float64 and not c.requires_grad and new_BD.grad is None
    assert torch.equal(c, torch.full((3, 2), -0.5).double())
    assert coefficients(objective, torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0)).shape == (0, 2)


@pytest.mark.parametrize(
    "options",
    [
        config("ppo"),
        config("bgpo", clip_low=1.5),
        config("bgpo", clip_high=-0.1),
        config("bgpo", dual_clip=0.5),
        config("bgpo", exponent_limit=100.0),
        config("sft", clip_low=0.2),
        config("bgpo", kl=0.1),
    ],
)
def test_mistakes_are_named(options):
    with pytest.raises(UserError):
        build_objective(options)


def test_only_sft_does_without_old_log_probs():
    uses_old = {name: build_objective(options).uses_old for name, (options, _) in FORMULAS.items()}
    assert uses_old == {"bgpo": True, "vrpo_ol": True, "diffu_grpo": True, "grpo": True, "sft": False}


# --- the KL term -----------------------------------------------------------------------------------------------------


def test_kl_pulls_towards_the_reference():
    """Coefficient of the KL term alone: kl (1 - ref / new), zero where the policies agree."""
    objective = build_objective(config("grpo", kl=0.5))
    new_T, ref_T = torch.tensor([-1.0, -1.0, -1.0]).double(), torch.tensor([-1.0, -2.0, -0.5]).double()
    c_T = coefficients(objective, new_T, new_T, torch.zeros(3), ref=ref_T)
    assert_same(c_T, 0.5 * (1 - (ref_T - new_T).exp()))
    assert c_T[0] == 0 and c_T[1] > 0 > c_T[2]  # loss = c * new: a token that got too likely goes down


def test_kl_is_the_divergence_in_expectation():
    """k3 under the new policy averages to KL(new || ref)."""
    new_V, ref_V = normal(VOCABULARY, key="new").log_softmax(-1), normal(VOCABULARY, key="ref").log_softmax(-1)
    exact = (new_V.exp() * (new_V - ref_V)).sum()
    assert_same((new_V.exp() * k3(new_V - ref_V, 20.0)).sum(), exact)
    assert (k3(torch.linspace(-100, 100, 999).double(), 20.0) >= 0).all()


def test_kl_is_finite_and_needs_a_reference():
    objective = build_objective(config("grpo", clip_low=0.2, clip_high=0.2, kl=0.1))
    far_T = torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4])
    c_T = coefficients(objective, far_T, torch.zeros(5), torch.ones(5), ref=torch.zeros(5))
    assert c_T.float().isfinite().all() and objective.value(far_T, torch.ones(5), far_T).isfinite().all()
    with pytest.raises(AssertionError, match="reference"):
        coefficients(objective, far_T, far_T, torch.ones(5))


def test_on_policy_grpo_is_the_policy_gradient():
    """d = 0: clips never act; only the KL term depends on the log-probs."""
    new_T, adv_T = normal(5, key="new"), normal(5, key="adv")
    limits = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert torch.equal(coefficients(build_objective(config("grpo", **limits)), new_T, new_T, adv_T), -adv_T)
    c_T = coefficients(build_objective(config("grpo", kl=0.1, **limits)), new_T, new_T, adv_T, ref=new_T + 1)
    assert_same(c_T, -adv_T + 0.1 * (1 - torch.tensor(1.0).double().exp()))


def test_grpo_at_its_clip_boundaries():
    objective = build_objective(config("grpo", clip_low=0.2, clip_high=0.28, dual_clip=3.0))
    for ratio, adv, slope in [
        (1.2799, 1.0, 1.2799), (1.2801, 1.0, 0.0), (0.1, 1.0, 0.1),
        (0.8001, -1.0, 0.8001), (0.7999, -1.0, 0.0), (2.9999, -1.0, 2.9999), (3.0001, -1.0, 0.0),
    ]:  # fmt: skip
        new = torch.tensor([ratio], dtype=torch.float64).log()
        c = coefficients(objective, new, torch.zeros(1), torch.tensor([adv]))
        assert c.item() == pytest.approx(-slope * adv, abs=1e-12), (ratio, adv)


# --- advantages -----------------------------------------------------------------------------------------------------


def test_advantages_by_hand():
    rewards_BG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [4.0, 0.0, 2.0, 2.0]])
    assert mean(rewards_BG).tolist() == [[0.5, -0.5, -0.5, 0.5], [2.0, -2.0, 0.0, 0.0]]
    others_BG = (rewards_BG.sum(-1, keepdim=True) - rewards_BG).double() / 3
    assert torch.allclose(loo(rewards_BG), rewards_BG.double() - others_BG)
    expected_BG = mean(rewards_BG) / (rewards_BG.double().std(-1, keepdim=True) + 1e-6)
    assert torch.allclose(mean_std(rewards_BG), expected_BG, rtol=1e-14)


@pytest.mark.parametrize("advantage", ADVANTAGES.values(), ids=ADVANTAGES)
def test_groups_without_variance_have_no_advantage(advantage):
    rewards_BG = torch.tensor([[0.1] * 3, [0.7] * 3, [0.0] * 3, [0.0, 0.0, 1.0]], dtype=torch.float64)
    adv_BG = advantage(rewards_BG)
    assert adv_BG.dtype == torch.float64 and adv_BG.isfinite().all()
    assert torch.all(adv_BG[:3] == 0) and torch.all(adv_BG[3] != 0)
    assert advantage(torch.tensor([[0.3], [5.0]])).tolist() == [[0.0], [0.0]]
    assert advantage(torch.zeros(0, 4)).shape == (0, 4)
    with pytest.raises(UserError):
        advantage(torch.tensor([[1.0, torch.nan]]))


# --- reduction ------------------------------------------------------------------------------------------------------

TOKENS = [3, 5, 1, 7, 2, 4]
LIMIT = 10  # of a sample's tokens
GROUPS = [7, 7, 7, 7, 3, 3]
UNITS_OF_LEVEL = {"token": lambda tokens: tokens, "draw": lambda tokens: DRAWS, "sample": lambda tokens: 1}
MEANS = {
    "sequence": [1 / 6] * 6,
    "token": [tokens / 22 for tokens in TOKENS],
    "group": [1 / 8] * 4 + [1 / 4] * 2,
    "constant": [tokens / LIMIT / 6 for tokens in TOKENS],
}


def reduce(kind, level, members, all_reduce=lambda x: x):
    tokens_B = torch.tensor([TOKENS[b] for b in members], dtype=torch.long)
    groups_B = torch.tensor([GROUPS[b] for b in members], dtype=torch.long)
    return sample_weights(kind, tokens_B, groups_B, DRAWS, level, all_reduce, LIMIT)


def on_ranks(call, ranks):
    """Runs `call(rank, all_reduce)` as lock-step ranks would: once to see what each sends, once with the sums."""
    sent = [[] for _ in range(ranks)]
    for rank in range(ranks):
        call(rank, lambda x, log=sent[rank]: log.append(x.clone()) or x)
    sums = [torch.stack(values).sum(0) for values in zip(*sent, strict=True)]
    replies = [iter(sums) for _ in range(ranks)]
    return [call(rank, lambda x, rank=rank: next(replies[rank])) for rank in range(ranks)]


@pytest.mark.parametrize("level", UNITS_OF_LEVEL)
@pytest.mark.parametrize("kind", MEANS)
def test_weights_make_a_mean(kind, level):
    weight_B = reduce(kind, level, range(6))
    units = [UNITS_OF_LEVEL[level](tokens) for tokens in TOKENS]
    expected = [share / count for share, count in zip(MEANS[kind], units, strict=True)]
    assert weight_B.dtype == torch.float64 and weight_B.tolist() == pytest.approx(expected, rel=1e-15)
    assert (weight_B * torch.tensor(units)).sum().item() == pytest.approx(sum(MEANS[kind]), rel=1e-15)
    assert sum(MEANS[kind]) == pytest.approx(1.0) or kind == "constant"


def test_constant_gives_every_token_one_weight():
    """Dr. GRPO: 1 / (samples x longest), whatever the length."""
    assert reduce("constant", "token", range(6)).tolist() == pytest.approx([1 / (6 * LIMIT)] * 6)


@pytest.mark.parametrize("level", UNITS_OF_LEVEL)
@pytest.mark.parametrize("kind", MEANS)
def test_ranks_see_the_global_batch(kind, level):
    """Unequal ranks, one of them empty; groups stay whole."""
    shards = [[4, 5], [], [0, 1, 2, 3]]
    weights_of_rank = on_ranks(lambda rank, all_reduce: reduce(kind, level, shards[rank], all_reduce), len(shards))
    whole_B = reduce(kind, level, range(6))
    for members, weight_B in zip(shards, weights_of_rank, strict=True):
        assert torch.equal(weight_B, whole_B[members])


@pytest.mark.parametrize("name", ["bgpo", "vrpo_ol", "diffu_grpo", "grpo"])
def test_gradients_of_ranks_add_up(name):
    objective, samples = build_objective(FORMULAS[name][0]), make_samples("count")
    theta, old_theta = make_theta("new"), make_theta("old")
    shards = [samples[:1], samples[1:]]
    weight_of_rank = on_ranks(lambda rank, reduce_: weights(shards[rank], "token", objective.level, reduce_), 2)
    whole = engine_loss(objective, theta, old_theta, samples, weights(samples, "token", objective.level))
    for shard, weight_B in zip(shards, weight_of_rank, strict=True):
        engine_loss(objective, theta, old_theta, shard, weight_B).backward()
    assert_same(theta.grad, gradient(whole, theta))


@pytest.mark.parametrize("level", UNITS_OF_LEVEL)
@pytest.mark.parametrize("kind", MEANS)
def test_samples_without_tokens_are_not_counted(kind, level):
    tokens_B, groups_B = torch.tensor([3, 0, 5, 0]), torch.tensor([0, 0, 1, 2])
    weight_B = sample_weights(kind, tokens_B, groups_B, DRAWS, level, lambda x: x, LIMIT)
    counted_B = sample_weights(kind, tokens_B[::2], groups_B[::2], DRAWS, level, lambda x: x, LIMIT)
    assert weight_B[1::2].tolist() == [0.0, 0.0] and torch.equal(weight_B[::2], counted_B)
    empty = torch.zeros(0, dtype=torch.long)
    assert sample_weights(kind, empty, empty, DRAWS, level, lambda x: x, LIMIT).shape == (0,)
    assert sample_weights(kind, tokens_B * 0, groups_B, DRAWS, level, lambda x: x, LIMIT).tolist() == [0.0] * 4


def test_unknown_reduction_is_named():
    with pytest.raises(UserError, match="sequence"):
        sample_weights("batch", torch.ones(1), torch.zeros(1).long(), DRAWS, "draw", lambda x: x)
