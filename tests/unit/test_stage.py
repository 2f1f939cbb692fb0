"""The streamed schedule on one stage against plain micro-batches: log-probs, every gradient, hooks. (Stages that talk
to each other: `tests/dist/test_pipeline_ranks.py`.)

Shapes: T scored tokens.
"""

import pytest
import torch

from megamem.config.schema import ParallelConfig
from megamem.convert.weights import stage_parameters
from megamem.layout.layout import CAUSAL, rows
from megamem.models.gpt import LogitsHead
from megamem.models.row import Row
from megamem.models.runner import Runner, StreamedPipeline
from megamem.models.stage import cut_row
from megamem.platform.groups import StageLinks
from megamem.stream.layer import StreamOptions
from megamem.train.optim import wrap_for_training
from tests.tol import assert_algebra, assert_exact, assert_floor_together
from tests.unit.test_stream import (
    ARCHITECTURES,
    LAYOUTS,
    build,
    call,
    cotangent,
    each_architecture,
    each_option,
    make_row,
    plain_gradients,
)

torch.set_num_threads(1)
each_window = pytest.mark.parametrize("window", ["layer", "stage"])
each_linear = pytest.mark.parametrize("linear", [False, True], ids=["replayed", "one_pass"])


def run_streamed(model, groups, several, window, linear, buffers=True, slack=None):
    """Log-probs of every row and gradients by name."""
    pipeline = StreamedPipeline(StageLinks(), window, slack)
    runner = Runner(wrap_for_training(model, ParallelConfig()) if buffers else model, groups, "full", pipeline)
    if buffers:
        runner.model.zero_grad_buffer()
    reports = runner.forward_backward(
        several, lambda row, logp_T: ((logp_T * cotangent(logp_T)).sum(), {"logp": logp_T.detach().clone()}), linear
    )
    gradients = {n: p.main_grad if buffers else p.grad for n, p in stage_parameters(model).items()}
    return [r["logp"] for r in reports], gradients


def assert_equals_plain(groups, arch, several, options, *args, **kwargs):
    expected_logps, expected = plain_gradients(build(groups, arch), several)
    logps, found = run_streamed(build(groups, arch, options), groups, several, *args, **kwargs)
    assert found.keys() == expected.keys()
    for i, (ours, logp_T) in enumerate(zip(logps, expected_logps, strict=True)):
        if len(logp_T):
            assert_algebra(ours, logp_T, f"log-probs of row {i}")
    for name, value in expected.items():
        assert_algebra(found[name], value, name)


@each_window
@each_linear
def test_linear_layers_add_to_the_buffers_themselves(groups, window, linear):
    """In fp32; no further from fp64 than plain gradients."""
    arch, names = ARCHITECTURES["everything"], ("causal", "full", "block")

    def rows_and_model(dtype, stream=None):
        model = build(groups, arch, stream, torch.float32).to(dtype)
        model.config.params_dtype = dtype
        return model, [make_row(groups, LAYOUTS[name], "all", seed=i) for i, name in enumerate(names)]

    truth, trusted = (plain_gradients(*rows_and_model(dtype))[1] for dtype in (torch.float64, torch.float32))
    model, several = rows_and_model(torch.float32, StreamOptions(5, 4))
    found = run_streamed(model, groups, several, window, linear)[1]
    assert model.decoder.layers[0].mlp.linear_fc1.gradient_accumulation_fusion
    assert_floor_together(found, trusted, truth)


def every_layout(groups) -> list[Row]:
    scored = ("some", "all", "none", "one")
    return [make_row(groups, layout, scored[i % 4], i) for i, layout in enumerate(LAYOUTS.values())]


@each_window
@each_linear
@each_option
def test_rows_of_every_layout(groups, options, window, linear):
    assert_equals_plain(groups, ARCHITECTURES["gqa"], every_layout(groups), options, window, linear)


@each_window
@each_linear
@each_architecture
@pytest.mark.parametrize("buffers", [False, True], ids=["grad", "main_grad"])
def test_every_architecture(groups, arch, window, linear, buffers):
    several = [make_row(groups, LAYOUTS[name], "some", i) for i, name in enumerate(["prefix_causal", "packed"])]
    assert_equals_plain(groups, arch, several, StreamOptions(6, 4), window, linear, buffers)


@pytest.mark.parametrize("slack", [1, 2, 9])
def test_any_slack(groups, slack):
    assert_equals_plain(
        groups, ARCHITECTURES["gqa"], every_layout(groups), StreamOptions(5, 4), "stage", True, True, slack
    )


def test_forward_only(groups):
    """Log-probs and logits of the streamed schedule are those of the model's own forward, and of plain layers.

    The rows of both share their parameters: chunks that one head does not need are another's.
    """
    plain = build(groups, ARCHITECTURES["everything"])
    model = build(groups, ARCHITECTURES["everything"], StreamOptions(5, 4))
    several = every_layout(groups)
    several += [Row(row.ids_S, row.params, None, LogitsHead()) for row in several]
    for window in ("layer", "stage"):
        found = Runner(model, groups, "full", StreamedPipeline(StageLinks(), window)).forward(several)
        with torch.no_grad():
            for ours, row in zip(found, several, strict=True):
                assert_exact(ours, call(model, row))
                if len(ours):
                    assert_algebra(ours, call(plain, row), str(row.head))


def test_units_of_rows(groups):
    model = build(groups, ARCHITECTURES["gqa"], StreamOptions(5, 4))
    counts = {
        name: tuple(len(cut_row(model, make_row(groups, layout), window).units) for window in ("stage", "layer"))
        for name, layout in LAYOUTS.items()
    }
    assert counts["full"] == (1, 1) and counts["causal"] == (6, 1)
    short = make_row(groups, rows([3], CAUSAL))
    assert len(cut_row(model, short, "stage").units) == 1


def test_every_parameter_fires_once(groups):
    """Once per micro-batch."""
    model = build(groups, ARCHITECTURES["tied_head"], StreamOptions(5, 4))
    fired = dict.fromkeys(stage_parameters(model), 0)
    for name, parameter in stage_parameters(model).items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update({name: fired[name] + 1}))
    several = [make_row(groups, LAYOUTS[name], seed=i) for i, name in enumerate(["causal", "full", "block"])]
    run_streamed(model, groups, several, "stage", False, buffers=False)
    assert fired == dict.fromkeys(fired, 3)
