"""One run, many layouts (DESIGN section 6): the same gradients, the same parameters, the same rollouts.

Rollouts are recorded once, on one process in fp32, and replayed everywhere else: a single argmax flipped by rounding
would change everything after it.
"""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from megamem.convert.source import RandomSource
from megamem.convert.weights import load_weights
from megamem.objectives.reduction import sample_weights
from megamem.platform.rng import generator
from megamem.rollout.rollout import Request
from megamem.rollout.sampler import sample
from megamem.train.draws import DrawRows
from megamem.train.experience import group_ids
from megamem.train.step import (
    _drop_silent,
    learn_from_answers,
    learn_from_rollouts,
    make_sample,
    make_updates,
    train_step,
)
from megamem.train.update import Update, backward
from tests.dist.harness import (
    Altered,
    Cases,
    Grid,
    Outcome,
    PlainAdam,
    build,
    distance,
    exported,
    exported_gradients,
    relative,
    run_ranks,
    tiny_config,
    tiny_model,
)
from tests.tol import assert_floor

STEPS = 20
# DESIGN section 6: fp64 over layouts. Sums are split over ranks and so added in another order: 1e-16 times the
# condition of a sum, far below 1e-9; a wrong factor, a lost or doubled term is above 1e-3.
GRADIENT = 1e-9
# Errors without a common direction: their mean over N entries has a standard deviation of rms / sqrt(N); 4 of those.
# (Measured: below 1.) A drift, such as a learning rate that is a little off, adds up instead.
DRIFT = 4.0

ONE = Grid()
GRIDS = [
    Grid(tensor=2, pipeline=2),
    Grid(tensor=2, data=2, sequence=True),
    Grid(tensor=2),
    Grid(tensor=2, sequence=True),
    Grid(pipeline=2),
    Grid(data=2),
]
FOR_TRAINING = [ONE, *(grid for grid in GRIDS if grid.world == 2)]
FOR_SAMPLING = [*FOR_TRAINING, Grid(tensor=2, data=2, sequence=True)]
FOR_VARIANTS = [ONE, Grid(tensor=2, sequence=True), Grid(pipeline=2), Grid(data=2)]

OBJECTIVES = {
    "bgpo": ("train.updates=2",),
    "vrpo_ol": ("objective.name=vrpo_ol", "train.updates=2"),
    "diffu_grpo": ("objective.name=diffu_grpo", "noise.estimator=full", "train.updates=2", "objective.clip_low=0.5"),
    "sft": ("objective.name=sft",),
}
# Settings that must not change a gradient, or change it alike on every layout: (settings, settings of its reference).
_EOS = ("objective.score_eos=first", "rollout.prompts=4")
VARIANTS = {
    "recompute": (("train.recompute=full",), ()),
    "short rows": (("train.row_tokens=40",), ()),
    "long rows": (("train.row_tokens=1000",), ()),
    "token mean": ((*_EOS, "objective.reduction=token"), (*_EOS, "objective.reduction=token")),
    "group mean": ((*_EOS, "objective.reduction=group"), (*_EOS, "objective.reduction=group")),
    "length norm": ((*_EOS, "objective.length_norm=true"), (*_EOS, "objective.length_norm=true")),
}
OTHER_ROWS = "train, recompute and short rows"
DECODINGS = {
    "low_confidence": {},
    "random": {"remasking": "random"},
    "entropy": {"remasking": "entropy"},
    "margin, greedy": {"remasking": "margin", "temperature": 0.0},
    "eos last": {"eos": "last"},
    "eos forbidden": {"eos": "forbidden"},
    "no early stop": {"stop_at_eos": False},
    "one block": {"block_length": 16},
}


def parallel(grid: Grid) -> list[str]:
    return [
        f"parallel.tensor={grid.tensor}",
        f"parallel.pipeline={grid.pipeline}",
        f"parallel.sequence={str(grid.sequence).lower()}",
    ]


# --- what runs on the processes -------------------------------------------------------------------------------------


def job(ranks, folder):
    cases = Cases(ranks)
    untied, replay = folder / "untied", [f"rollout.replay={folder}/rollouts"]
    cases.run(ONE, {"record": (train, (untied, folder / "record", [f"rollout.record={folder}/rollouts"]))})
    for grid in [ONE, *GRIDS]:
        cases.run(grid, {f"{name} {grid}": case for name, case in cases_of(grid, folder, replay)})
    return cases.results, cases.errors, cases.seconds


def cases_of(grid, folder, replay):
    """(name, case) of everything that one layout computes."""
    untied, out = folder / "untied", folder / "runs" / str(grid)
    settings = [*replay, *parallel(grid)]
    for name, changes in OBJECTIVES.items():
        yield name, (gradients, (untied, out / name, [*settings, *changes]))
    yield "tied head", (gradients, (folder / "tied", out / "tied", settings))
    if grid in FOR_VARIANTS:
        for name, (changes, reference) in VARIANTS.items():
            yield name, (gradients, (untied, out / name, [*settings, *changes]))
            if grid == ONE:
                yield f"reference of {name}", (gradients, (untied, out / f"ref {name}", [*settings, *reference]))
    if grid == Grid(data=2):
        yield "uneven shares", (uneven_gradients, (untied, out / "uneven", settings))
    if grid in FOR_TRAINING:
        yield "train", (train, (untied, out / "train", settings))
    if grid in FOR_SAMPLING:
        yield "sample", (responses, (untied, out / "sample", parallel(grid), 256))
    if grid == ONE:
        yield "first weights", (first_weights, (untied, out / "first"))
        yield "train in fp64", (train_in_fp64, (untied, out / "fp64", settings))
        other = [*settings, "train.recompute=full", "train.row_tokens=96"]
        yield OTHER_ROWS, (train, (untied, out / "other", other))
        yield "sample, short rows", (responses, (untied, out / "short", [], 64))
        yield "sample, subset", (responses, (untied, out / "subset", [], 256, 3))


def train(groups, model, out, settings):
    """Parameters after 20 steps, and each step's metrics."""
    run = build(tiny_config(model, out, f"train.steps={STEPS}", *settings), groups)
    metrics = [train_step(run, step) for step in range(STEPS)]
    kept = ("reward", "elbo", "grad_norm", "loss")
    return {"weights": exported(run), "metrics": [{name: m[name] for name in kept} for m in metrics]}


def first_weights(groups, model, out):
    return exported(build(tiny_config(model, out), groups))


def train_in_fp64(groups, model, out, settings):
    run = build(tiny_config(model, out, "model.dtype=float64", f"train.steps={STEPS}", *settings), groups)
    adam, norms = PlainAdam(run), []
    for step in range(STEPS):
        (update,) = make_updates(run, learn_from_rollouts(run, step), step)
        run.trainer.model.zero_grad_buffer()
        backward(run.trainer, update, run.prepared.objective, length_norm=False)
        norms.append(adam.step())
    return {"weights": exported(run), "norms": norms}


def gradients(groups, model, out, settings):
    """Gradient of the last update of step 0 in fp64; off-policy if there are two: the model has moved in between."""
    config = tiny_config(model, out, "model.dtype=float64", *settings)
    run = build(config, groups)
    batch = (learn_from_answers if config.objective.name == "sft" else learn_from_rollouts)(run, 0)
    update = make_updates(run, batch, 0)[-1]
    assert (update.old is not None) == (config.train.updates == 2)
    move(run)
    run.trainer.model.zero_grad_buffer()
    sums = backward(run.trainer, update, run.prepared.objective, config.objective.length_norm)
    return {"gradient": exported_gradients(run), "rows": len(update.rows), "ratio": float(sums["ratio"])}


def move(run):
    """Another policy than the one that was scored: every weight a little off, the same on every layout."""
    folder = run.prepared.model
    maps = folder.spec.tensor_maps(folder.arch)

    def shifted(name, tensor):
        noise = torch.randn(tensor.shape, generator=generator(7, "move", name), dtype=torch.float64)
        return tensor + 0.01 * noise

    source = Altered(RandomSource(maps, folder.arch, run.prepared.config.seed), shifted)
    load_weights(run.model, maps, folder.arch, source, run.groups)


def uneven_gradients(groups, model, out, settings):
    """Three samples on one data-parallel rank, the others on the second."""
    config = tiny_config(model, out, "model.dtype=float64", "objective.reduction=token", *_EOS, *settings)
    run = build(config, groups)
    alone = dataclasses.replace(groups.dp, rank=0, size=1)
    whole = dataclasses.replace(run, groups=dataclasses.replace(groups, dp=alone))
    batch, ids = learn_from_rollouts(whole, 0), group_ids(config, whole.groups).tolist()
    rated = zip(batch.rollouts, batch.advantage_N.tolist(), ids, strict=True)
    samples = [make_sample(config, *one, 0, run.prepared.model.arch.eos_id) for one in rated]
    mine = samples[:3] if groups.dp.rank == 0 else samples[3:]
    tokens_B = torch.tensor([s.scored_tokens for s in mine])
    groups_B = torch.tensor([s.group for s in mine])
    draws = config.noise.draws
    weight_B = sample_weights("token", tokens_B, groups_B, draws, "draw", groups.sum_over_data)
    mine, weight_B = _drop_silent(mine, weight_B)
    shape = run.trainer.row_shape(config.train.row_tokens)
    rows = DrawRows(mine, run.drawn_model, shape, groups.device.torch)
    move(run)
    run.trainer.model.zero_grad_buffer()
    backward(run.trainer, Update(mine, weight_B, rows), run.prepared.objective, length_norm=False)
    return {"gradient": exported_gradients(run), "rows": len(rows)}


def responses(groups, model, out, settings, row_tokens, every=1):
    """Responses of all DECODINGS by "problem sample", of every `every`-th request."""
    config = tiny_config(model, out, *settings)

    def eager_to_end(name, tensor):  # the EOS row of the output matrix: large, so that EOS is sampled often
        if name.endswith("transformer.ff_out.weight"):
            tensor = tensor.clone()
            tensor[1] *= 8
        return tensor

    run = build(config, groups, eager_to_end)
    assert run.prepared.model.arch.eos_id == 1
    requests = [Request(p.problem.key, i, p.ids) for p in run.prompts[:4] for i in range(4)][::every]
    base = run.decoding(3, training=True)
    base = dataclasses.replace(base, row_tokens=row_tokens, block_length=4, steps=8)
    found = {}
    for name, changes in DECODINGS.items():
        decoding = dataclasses.replace(base, **changes)
        rollouts = sample(run.sampler, requests[groups.dp.rank :: groups.dp.size], decoding)
        parts = [None] * groups.dp.size
        dist.all_gather_object(parts, rollouts, group=groups.dp.group)
        found[name] = {f"{r.problem} {r.sample}": list(r.response) for r in itertools.chain(*parts)}
    return found


# --- what must hold -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equivalence")
    tiny_model(folder / "untied")
    tiny_model(folder / "tied", weight_tying=True)
    return Outcome(run_ranks(job, 4, folder))


def assert_same_gradient(found, reference):
    assert found["gradient"].keys() == reference["gradient"].keys()
    for name, expected in reference["gradient"].items():
        assert expected.norm() > 0, f"{name} has no gradient: the case says nothing about it"
        assert relative(found["gradient"][name], expected) < GRADIENT, name


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", [*OBJECTIVES, "tied head"])
def test_gradient_does_not_depend_on_the_layout(outcome, name, grid):
    assert_same_gradient(outcome[f"{name} {grid}"], outcome[f"{name} {ONE}"])


@pytest.mark.parametrize("name", ["bgpo", "vrpo_ol", "diffu_grpo"])
def test_off_policy_cases_are_off_policy(outcome, name):
    # Otherwise old log-probs and couplings would not be looked at.
    assert abs(outcome[f"{name} {ONE}"]["ratio"]) > 1e-2


@pytest.mark.parametrize("grid", FOR_VARIANTS, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_gradient_does_not_depend_on_rows_and_recompute(outcome, name, grid):
    assert_same_gradient(outcome[f"{name} {grid}"], outcome[f"reference of {name} {ONE}"])


def test_row_lengths_do_differ(outcome):
    rows = [outcome[f"{name} {ONE}"]["rows"] for name in ("long rows", "reference of long rows", "short rows")]
    assert rows[0] < rows[1] < rows[2]


def test_uneven_data_parallel_shares_give_the_same_gradient(outcome):
    assert_same_gradient(outcome[f"uneven shares {Grid(data=2)}"], outcome[f"token mean {ONE}"])


def test_replaying_the_recorded_rollouts_repeats_the_run(outcome):
    recorded, replayed = outcome["record"], outcome[f"train {ONE}"]
    assert recorded["metrics"] == replayed["metrics"]
    assert all(torch.equal(recorded["weights"][name], w) for name, w in replayed["weights"].items())


@pytest.mark.parametrize("case", [*(f"train {grid}" for grid in FOR_TRAINING[1:]), f"{OTHER_ROWS} {ONE}"])
def test_parameters_after_twenty_steps_stay_at_the_noise_floor(outcome, case):
    truth, trusted = outcome[f"train in fp64 {ONE}"]["weights"], outcome[f"train {ONE}"]["weights"]
    found = outcome[case]["weights"]
    assert found.keys() == trusted.keys() == truth.keys()
    for name in truth:
        assert_floor(found[name], trusted[name], truth[name], name)
    for error in (distance(found, truth), distance(found, trusted)):
        assert abs(error.mean()) <= DRIFT * error.square().mean().sqrt() / error.numel() ** 0.5


def test_training_has_moved_every_parameter(outcome):
    # So that the floor above is not that of a run that stands still.
    before, after = outcome[f"first weights {ONE}"], outcome[f"train {ONE}"]["weights"]
    for name, weight in after.items():
        assert relative(weight, before[name]) > 1e-3, name


@pytest.mark.parametrize("grid", FOR_SAMPLING[1:], ids=str)
def test_sampling_does_not_depend_on_the_layout(outcome, grid):
    assert outcome[f"sample {grid}"] == outcome[f"sample {ONE}"]


def test_sampling_does_not_depend_on_packing(outcome):
    assert outcome[f"sample, short rows {ONE}"] == outcome[f"sample {ONE}"]


def test_sampling_of_a_subset_gives_the_same_responses(outcome):
    everything, subset = outcome[f"sample {ONE}"], outcome[f"sample, subset {ONE}"]
    for name, found in subset.items():
        assert 0 < len(found) < len(everything[name])
        assert found.items() <= everything[name].items()


def test_decodings_differ_from_each_other(outcome):
    everything = outcome[f"sample {ONE}"]
    for one, other in itertools.combinations(everything, 2):
        assert everything[one] != everything[other], (one, other)


def test_eos_rules_are_kept(outcome):
    everything, eos = outcome[f"sample {ONE}"], 1

    def early(name):
        """Responses whose second block of four ends in EOS."""
        return [r for r in everything[name].values() if r[7] == eos]

    assert not any(eos in r for r in everything["eos forbidden"].values())
    assert early("low_confidence"), "no response stopped early: the case says nothing"
    assert all(token == eos for r in early("low_confidence") for token in r[8:])
    assert any(token != eos for r in early("no early stop") for token in r[8:])
