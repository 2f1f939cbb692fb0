"""The planner against a real step on two ranks: tensor and sequence parallelism exist there only with neighbours."""

import pytest
import torch

from megamem.config.architecture import Architecture
from megamem.config.schema import ParallelConfig
from megamem.plan.estimate import PARTS, estimate, stage_static
from megamem.plan.step import Job, WatchedStep
from megamem.plan.variants import variants
from megamem.stream.layer import StreamOptions
from tests.dist.harness import Cases, Grid, Outcome, run_ranks

ARCH = Architecture(
    layers=2, hidden=64, ffn=160, heads=4, kv_heads=2, head_dim=16, vocab_rows=500, max_positions=4096,
    mask_id=0, eos_id=1, pad_id=1,
)  # fmt: skip
JOB = Job(ARCH, torch.bfloat16, ParallelConfig(tensor=2, sequence=True), "full", prompt=48)
STREAM = StreamOptions(chunk_tokens=64, head_tokens=32)
ROWS = {"plain": 192, "recompute": 192, "streamed": 192, "streamed_offload": 128}


# --- what runs on the processes -------------------------------------------------------------------------------------


def job(ranks):
    cases = Cases(ranks)
    # A grid of its own for each: megatron-core's buffer of gathered activations lives as long as its groups.
    for name, tokens in ROWS.items():
        cases.run(Grid(tensor=2, sequence=True), {name: (measured, (name, tokens))})
    return cases.results, cases.errors, cases.seconds


def measured(groups, name, tokens):
    """Bytes of a real step, weights zero."""
    step = WatchedStep(JOB, variants(STREAM)[name], groups)
    for parameter in step.model.parameters():
        parameter.data.zero_()
    found = step.run(tokens)
    return {
        "static": found.parameters + found.gradients,
        "peak": found.peak(),
        "saved": found.saved,
        "host": found.host,
    }


# --- what must hold -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome():
    return Outcome(run_ranks(job, 2))


@pytest.fixture(scope="module")
def static():
    return stage_static(JOB, 0, data=1)


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """Rows are short here; so are those that are faked."""
    monkeypatch.setattr("megamem.plan.estimate._WHOLE_ROWS", (128, 256))
    monkeypatch.setattr("megamem.ops.attention.KEYS_AT_ONCE", 64)


@pytest.mark.parametrize("name", ROWS)
def test_planned_is_measured_on_two_ranks(outcome, static, name):
    tokens, real = ROWS[name], outcome[name]
    found = estimate(JOB, variants(STREAM)[name], static, 0, 1, tokens)
    assert static.parameters + static.gradients == real["static"]
    assert max(found.grown(part, tokens) for part in PARTS) == pytest.approx(real["peak"], rel=0.05)
    assert found.grown("saved", tokens) == pytest.approx(real["saved"], rel=0.05)
    assert found.grown("host", tokens) == pytest.approx(real["host"], rel=0.01)
