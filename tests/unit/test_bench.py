"""The benchmarks at tiny sizes: what they compare is comparable, and the bars that do not depend on size."""

import json

import pytest
import torch
from typer.testing import CliRunner

from megamem.bench import bgpo, stream
from megamem.cli.main import app
from megamem.errors import UserError
from megamem.platform.device import Device
from megamem.platform.groups import process_groups
from megamem.platform.launch import Ranks
from tests.helpers import refused

torch.set_num_threads(1)
DRAWS = [1, 3, 24]
TINY_UPDATE = bgpo.Sizes(responses=2, prompt=8, response=24, layers=1, hidden=32, ffn=64, heads=2, vocab=256)
TINY_ROW = stream.Sizes(tokens=192, layers=3, hidden=32, ffn=96, heads=4, vocab=256, chunk_tokens=32, head_tokens=16)


@pytest.fixture(scope="module")
def groups():
    with process_groups(Ranks(0, 1, 0, None, "test"), Device(torch.device("cpu"), "gloo"), 1, 1) as made:
        yield made


@pytest.fixture(scope="module")
def updates(groups):
    told = []
    results = bgpo.bench_bgpo(TINY_UPDATE, DRAWS, groups, 1, told.append)
    assert any("bgpo with 24 draws" in line for line in told)
    return {(r.variant, r.draws): r for r in results}


@pytest.fixture(scope="module")
def steps(groups):
    results = stream.bench_stream(TINY_ROW, "block:4", groups, 1, lambda text: None)
    return {r.variant: r for r in results}


def test_peak_of_a_bgpo_update_is_flat_in_the_number_of_draws(updates):
    for variant in ("bgpo", "vrpo_ol"):  # 1 %: what is reported of every row (a few numbers) may remain
        one, many = (updates[variant, n].peak_bytes for n in (1, 24))
        assert many == pytest.approx(one, rel=0.01), variant


def test_peak_with_retained_graphs_grows_in_the_number_of_draws(updates):
    one, many = (updates["vrpo_ol_retained", n].peak_bytes for n in (1, 24))
    assert many > 10 * one


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("variant", ["bgpo", "vrpo_ol"])
def test_gradients_of_an_update_are_those_of_the_retained_graphs(updates, variant, draws):
    # fp32: measured 4e-7. Off-policy, so the objectives differ from each other by more.
    assert updates[variant, draws].max_rel_grad_diff < 5e-6


def test_rows_of_bgpo_as_json_and_as_a_table(updates):
    found = json.loads(json.dumps(bgpo.as_json(list(updates.values()), TINY_UPDATE)))
    assert {(row["variant"], row["draws"]) for row in found["rows"]} == {(v, n) for v in bgpo.VARIANTS for n in DRAWS}
    assert all(row["peak_bytes"] > 0 and row["seconds"] > 0 for row in found["rows"])
    assert len(bgpo.table(list(updates.values())).splitlines()) == 1 + len(updates)


def test_streamed_steps_take_less_and_differ_by_rounding(steps):
    assert list(steps) == ["plain", "recompute", "streamed", "streamed_attention", "streamed_offload"]
    order = ["plain", "recompute", "streamed_attention", "streamed", "streamed_offload"]
    peaks = [steps[name].device_peak_bytes for name in order]
    assert peaks == sorted(peaks, reverse=True), dict(zip(order, peaks, strict=True))
    assert all(r.max_rel_grad_diff < 5e-6 for r in steps.values())


def test_an_offloaded_input_is_on_the_host_and_its_copy_on_the_device(steps):
    """All layers' inputs leave the device, one at a time comes back: on a CPU both copies have to be counted."""
    layer_input = TINY_ROW.tokens * TINY_ROW.hidden * 4
    saved = steps["streamed"].device_peak_bytes - steps["streamed_offload"].device_peak_bytes
    assert saved == pytest.approx((TINY_ROW.layers - 1) * layer_input, rel=0.1)
    assert steps["streamed_offload"].peak_bytes >= steps["streamed"].peak_bytes


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1,x", "-1", "1.5"])
def test_wrong_draws_are_refused(text):
    assert "--draws" in refused(bgpo.parse_draws, text)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bgpo", "--draws", "1,none"], "--draws"),
        (["bgpo", "--heads", "3"], "--heads = 3"),
        (["stream", "--vocab", "500"], "--vocab = 500"),
        (["stream", "--attention", "block:0"], "--attention"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(arguments, named):
    caught = CliRunner().invoke(app, ["bench", *arguments]).exception
    assert isinstance(caught, UserError) and named in str(caught)
