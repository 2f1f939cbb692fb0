"""`megamem bench prefix` at tiny sizes: all variants compute one gradient, and operations are those that run."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from megamem.bench import flops, prefix, prefix_peer
from megamem.cli.main import app
from megamem.errors import UserError
from megamem.layout.dense import dense_mask
from tests.helpers import refused
from tests.tol import assert_algebra

torch.set_num_threads(1)

CAUSAL = prefix.Sizes(
    prefix=48, suffix=6, group=4, layers=2, hidden=32, ffn=40, heads=4, kv_heads=2, vocab=200, chunk_tokens=16,
    head_tokens=5,
)  # fmt: skip
BLOCK = replace(CAUSAL, prefix=50, suffix=8, group=3, draws=3, block=4, row_tokens=200)
OURS = list(prefix.VARIANTS)
needs_package = pytest.mark.skipif(not prefix_peer.installed(), reason=prefix_peer.INSTALL)


def measured(sizes, groups):
    """(results by variant, what was told)."""
    told = []
    results = prefix.bench_prefix(sizes, groups, 1, told.append, dtype=torch.float64)
    return {r.variant: r for r in results}, told


@pytest.fixture(scope="module")
def causal(groups):
    return measured(CAUSAL, groups)


@pytest.fixture(scope="module")
def block(groups):
    return measured(BLOCK, groups)


def test_all_variants_have_one_gradient(causal, block):
    for results, _ in (causal, block):
        assert set(OURS) <= set(results) <= {*OURS, prefix.PEER}
        assert max(r.max_rel_grad_diff for r in results.values()) <= 1e-12


def test_repeated_is_every_sequence_alone():
    """Rows and loss of `repeated` against the sequences themselves, without any layout of ours."""
    group = prefix._Group(CAUSAL)
    (row,) = group.rows("none", CAUSAL.architecture(), torch.device("cpu"))
    length = CAUSAL.prefix + CAUSAL.suffix
    expected_SS = torch.block_diag(*[torch.ones(length, length).tril()] * CAUSAL.group).bool()
    assert torch.equal(dense_mask(row.params.layout), expected_SS)
    ids_GS = row.ids_S.view(CAUSAL.group, length)
    assert torch.equal(ids_GS[:, : CAUSAL.prefix], group.prompt_P.expand(CAUSAL.group, -1))
    assert torch.equal(ids_GS[:, CAUSAL.prefix :], group.response_GR)
    assert torch.equal(row.ids_S[row.position_T], row.head.target_T)
    assert torch.equal(row.head.target_T, group.response_GR.flatten())
    logp_T = torch.randn(row.head.target_T.shape, dtype=torch.float64)
    assert_algebra(group.loss(row, logp_T)[0], (group.coefficient_GDR.double().flatten() * logp_T).sum(), "loss")


def test_repeated_draws_have_a_prompt_and_a_clean_response_each():
    rows = prefix._Group(BLOCK).rows("none", BLOCK.architecture(), torch.device("cpu"))
    assert sum(len(row.ids_S) for row in rows) == 3 * 3 * (50 + 8 + 2 + 8)  # 2: the prompt's part of a shared block
    assert len(rows) > 1 and all(len(row.ids_S) <= BLOCK.row_tokens for row in rows)


def test_shared_variants_take_less(causal, block):
    for name in OURS[1:]:  # the repeated draws of `block` are in several rows
        assert causal[0][name].peak_bytes < causal[0]["repeated"].peak_bytes, name
    for results, _ in (causal, block):
        assert results["grouped"].flops < results["repeated"].flops
        assert results["grouped_streamed"].peak_bytes < results["grouped"].peak_bytes
        assert results["grouped_handle"].flops < results["grouped_streamed"].flops  # no forward again of the prompt


def test_counted_operations_are_the_predicted_ones(causal, block):
    for (results, _), sizes in ((causal, CAUSAL), (block, BLOCK)):
        expected = prefix.count(sizes)
        assert expected.keys() - {prefix.PEER} == {"repeated", "grouped"}
        for name in expected.keys() & results.keys():
            assert results[name].flops == expected[name], name


def test_linear_operations_are_those_of_torch(groups):
    """torch's own counter sees everything but attention on a CPU."""
    step = prefix._Ours(prefix.VARIANTS["grouped"], prefix._Group(CAUSAL), groups, torch.float64)
    with FlopCounterMode(display=False) as counter:
        step.run()
    tokens = CAUSAL.prefix - 1 + CAUSAL.group * (CAUSAL.suffix + 1)
    assert counter.get_total_flops() == flops.predicted(CAUSAL.architecture(), tokens, 24, pairs=0)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_operations_are_those_of_its_formula(causal):
    """Seven products over the pairs that are seen."""
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    k, v = (torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(2))

    def run():
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        attend(q, k, v, 0.0, causal)[0].sum().backward()

    pairs = 2 * (21 if causal else 36)  # of two rows
    products = 2 + 5  # scores, output; scores again, dv, dp, dq, dk
    assert flops.counted(run) == products * 2 * pairs * 4 * 8


def test_operations_at_the_size_of_the_bar():
    sizes = prefix.Sizes(prefix=16384, suffix=512, group=16)
    found = prefix.count(sizes)
    assert found["grouped"] / found["repeated"] <= 0.12
    assert found["grouped"] < found[prefix.PEER]


@needs_package
def test_the_package_has_our_gradient_and_takes_more(causal):
    results, _ = causal
    assert results[prefix.PEER].max_rel_grad_diff <= 1e-12
    assert results[prefix.PEER].peak_bytes > results["grouped_handle"].peak_bytes


def test_a_missing_package_is_named_and_has_no_row(groups, monkeypatch):
    monkeypatch.setattr(prefix, "installed", lambda: False)
    results, told = measured(replace(CAUSAL, prefix=8, layers=1), groups)
    assert list(results) == OURS
    assert prefix_peer.INSTALL in told and "pip install" in prefix_peer.INSTALL


def test_others_are_compared_with_the_first(groups):
    results = prefix.bench_prefix(BLOCK, groups, 1, lambda text: None, prefix.parse_variants("grouped_handle, grouped"))
    assert [r.variant for r in results] == ["grouped_handle", "grouped"]
    assert results[0].max_rel_grad_diff == 0 < results[1].max_rel_grad_diff < 5e-6  # fp32


def test_no_names_are_all_variants():
    assert prefix.parse_variants("") == list(prefix.ALL) and set(prefix.ALL) == {*OURS, prefix.PEER}


def test_bottom_right_mask():
    seen = prefix_peer.bottom_right(3, 5, torch.zeros(1)) == 0
    assert torch.equal(seen, torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool())


def test_time_per_draw_and_output(causal, block):
    results = block[0]
    for r in results.values():
        assert r.seconds_per_draw == pytest.approx(r.seconds / 9)
    found = json.loads(json.dumps(prefix.as_json(list(causal[0].values()), CAUSAL)))
    keys = {"variant", "flops", "peak_bytes", "seconds", "max_rel_grad_diff"}
    assert all(keys <= row.keys() and row["seconds"] > 0 and row["peak_bytes"] > 0 for row in found["rows"])
    assert found["sizes"]["prefix"] == 48
    assert len(prefix.table(list(results.values())).splitlines()) == 1 + len(OURS)


def test_the_command_counts_without_running():
    arguments = ["bench", "prefix", "--prefix", "64", "--suffix", "8", "--group", "2", "--draws", "2", "--count-only"]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert found["sizes"]["block"] == 32 and [row["variant"] for row in found["rows"]] == ["repeated", "grouped"]
    assert "TFLOP" in CliRunner().invoke(app, arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--heads", "3"], "--heads = 3"),
        (["--variants", "grouped,none"], "--variants = 'grouped,none'"),
        (["--variants", "prefix_grouper,grouped"], "--variants"),
        (["--kv-heads", "3"], "--kv-heads = 3"),
        (["--draws", "2", "--block", "0"], "--draws = 2"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(arguments, named):
    caught = CliRunner().invoke(app, ["bench", "prefix", *arguments]).exception
    assert isinstance(caught, UserError) and named in str(caught)


def test_wrong_sizes_are_refused():
    assert "--kv-heads" in refused(replace, CAUSAL, kv_heads=3)
