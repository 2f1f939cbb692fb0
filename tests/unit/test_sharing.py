"""Which form of a shared prompt runs: what is counted against the rows that training builds, and who decides."""

import pytest
import torch

from megamem.config.load import parse
from megamem.diffusion.noise import NoisePlan
from megamem.layout.dense import dense_mask
from megamem.layout.packing import RowShape
from megamem.models.flops import model_flops
from megamem.train.draws import DrawnModel, DrawRows, Sample
from megamem.train.sharing import Sharing, cheaper, choose_share, compare_forms
from tests.unit.test_stream import architecture

BY_UNIT = ("stream.layers=true", "pipeline.schedule=streamed", "stream.window=stage")
ATTENTION = {"causal": "causal", "prefix_lm": "prefix_lm", "block": "block:4"}


def config(*overrides):
    base = {"out": "run", "model": {"path": "model"}, "task": "countdown", "prefix": {"share": True}}
    small = ("rollout.group=3", "rollout.gen_length=8", "rollout.block_length=4", "noise.draws=4")
    return parse(base, [*small, "train.row_tokens=60", *overrides], "test")


def rows(settings, attention, prompts, share):
    """What a step builds for these prompts where every response token is scored."""
    draws, length = settings.noise.draws, settings.rollout.gen_length
    plan = NoisePlan(torch.ones(draws, length, dtype=torch.bool), torch.ones(draws), torch.ones(draws))
    samples = [
        Sample(torch.zeros(prompt, dtype=torch.long), torch.zeros(length, dtype=torch.long), plan, 1.0, group)
        for group, prompt in enumerate(prompts)
        for _ in range(settings.rollout.group)
    ]
    shape = RowShape(settings.train.row_tokens)
    return DrawRows(samples, DrawnModel(attention, False, 1, share), shape, torch.device("cpu"))


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("prompts", [[21], [21, 9, 30]], ids=str)
def test_operations_are_those_of_the_rows_that_run(attention, prompts):
    settings, arch = config(), architecture()
    found = compare_forms(settings, arch, attention, prompts)
    scored = len(prompts) * settings.rollout.group * settings.noise.draws * settings.rollout.gen_length
    for form in ("row", "handle"):
        built = list(rows(settings, attention, prompts, form))
        tokens = sum(len(row.ids_S) for row in built)  # no row has fillers here
        pairs = sum(int(dense_mask(row.params.layout)[-len(row.ids_S) :].sum()) for row in built)
        assert (found[form].operations, found[form].rows) == (model_flops(arch, tokens, scored, pairs), len(built))


def test_reference_answers_come_one_to_a_prompt():
    sft = config("objective.name=sft", "rollout.group=1")
    assert compare_forms(config("objective.name=sft"), architecture(), "block:4", [9]) == compare_forms(
        sft, architecture(), "block:4", [9]
    )


def test_a_handle_is_cheaper_once_a_group_takes_several_rows():
    arch, prompts = architecture(), [24]
    costs = {size: compare_forms(config(f"train.row_tokens={size}"), arch, "block:4", prompts) for size in (60, 10**4)}
    assert costs[60]["row"].rows > 1 and cheaper(costs[60]) == "handle"
    assert costs[10**4]["row"].rows == 1 and cheaper(costs[10**4]) == "row"
    assert costs[10**4]["row"].operations == costs[10**4]["handle"].operations  # nothing is computed twice either way


def test_kept_bytes_are_keys_values_and_their_gradients():
    """A prompt of 24 tokens, then 3 responses of 8, each with 4 noisy copies. In rows of 60: the prompt and a response
    with 3 copies (56), …; behind a handle all but the prompt, of which such a row has a copy."""
    arch = architecture().model_copy(update={"layers": 4})
    per_token = arch.layers * 2 * arch.kv_heads * arch.head_dim * (4 + 4)
    for size, kept in ((60, {"row": 56, "handle": 24 + 80}), (10**4, {"row": 144, "handle": 24 + 144})):
        costs = compare_forms(config(f"train.row_tokens={size}"), arch, "block:4", [24])
        assert {form: cost.kept_bytes for form, cost in costs.items()} == {f: n * per_token for f, n in kept.items()}
    half = compare_forms(config("train.row_tokens=10000", "model.dtype=bfloat16"), arch, "block:4", [24])
    assert half["row"].kept_bytes == 144 * per_token * 6 // 8
    split = compare_forms(
        config("train.row_tokens=10000", "parallel.tensor=2", "parallel.pipeline=2"), arch, "block:4", [24]
    )
    assert split["row"].kept_bytes == 144 * per_token // 4  # one row, although two stages have room for two
    assert split["handle"].kept_bytes == (24 + 2 * 144) * per_token // 4
    shared = compare_forms(config("train.row_tokens=10000", "parallel.tensor=4"), arch, "block:4", [24])
    assert shared["row"].kept_bytes == 144 * per_token // arch.kv_heads  # ranks that share a head have it each


def test_hardly_fewer_operations_are_not_worth_the_bytes():
    assert cheaper({"row": Sharing(1000, 2, 1), "handle": Sharing(991, 3, 2)}) == "row"
    assert cheaper({"row": Sharing(1000, 2, 1), "handle": Sharing(980, 3, 2)}) == "handle"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("prefix.share=false", *BY_UNIT), "none"),
        ((), "row"),  # the schedule has no handle
        (BY_UNIT, "handle"),
        ((*BY_UNIT, "train.row_tokens=10000"), "row"),
        ((*BY_UNIT, "prefix.form=row"), "row"),
        ((*BY_UNIT, "prefix.form=handle", "train.row_tokens=10000"), "handle"),
        ((*BY_UNIT[:2], "stream.window=layer"), "row"),
    ],
)
def test_the_user_decides_or_the_numbers_do(overrides, expected):
    assert choose_share(config(*overrides), architecture(), "block:4", [24, 30]) == expected
