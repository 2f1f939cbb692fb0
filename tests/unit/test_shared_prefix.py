"""Draws that share their prompt against the same draws each with a prompt of its own: loss and every gradient, fp64.

Shapes: L response tokens, D draws, T scored tokens.
"""

import pytest
import torch

from megamem.convert.weights import stage_parameters
from megamem.diffusion.noise import NoisePlan
from megamem.layout.packing import RowShape
from megamem.models.runner import Runner, StreamedPipeline
from megamem.platform.groups import StageLinks
from megamem.stream.layer import StreamOptions
from megamem.train.draws import DrawnModel, DrawRows, Sample
from tests.tol import assert_algebra
from tests.unit.test_stream import architecture, build

torch.set_num_threads(1)

MASK = 60
# Attention, and whether a token is predicted at the row before it.
MODELS = {
    "causal": ("causal", True),
    "prefix_lm": ("prefix_lm", False),
    "block": ("block:4", False),
    "shifted block": ("block:4", True),
}
WAYS = {
    "plain": (None, None),
    "streamed layers": (StreamOptions(5, 4), None),
    "streamed rows": (StreamOptions(5, 4, "input+attention"), StreamedPipeline(StageLinks(), "stage")),
    "layer by layer": (StreamOptions(8, 3), StreamedPipeline(StageLinks(), "layer")),
}


def samples(attention: str) -> list[Sample]:
    """Two groups of three responses; three draws each (one, with everything scored, of a causal model)."""
    key = torch.Generator().manual_seed(0)
    found = []
    for group, prompt in enumerate((9, 6)):
        prompt_P = torch.randint(0, 59, (prompt,), generator=key)
        for length in (7, 3, 7):
            draws = 1 if attention == "causal" else 3
            masked_DL = torch.rand(draws, length, generator=key) < 0.6
            masked_DL[:, -1] = True
            if attention == "causal":
                masked_DL[:] = True
            weight_D = torch.rand(draws, generator=key, dtype=torch.float64)
            response_L = torch.randint(0, 59, (length,), generator=key)
            plan = NoisePlan(masked_DL, weight_D, level_D=weight_D)
            found.append(Sample(prompt_P, response_L, plan, 1.0, group))
    return found


def draw_loss(row, logp_T):
    """A sum of ELBOs, each with a coefficient of its own; reports them by sample and draw."""
    terms_T = logp_T * row.weight_U[row.unit_T]
    elbo_U = torch.zeros(len(row.weight_U), dtype=logp_T.dtype).index_add_(0, row.unit_T, terms_T)
    coefficient_U = (1.0 + row.sample_U * 3 + row.draw_U).cos()
    units = zip(row.sample_U.tolist(), row.draw_U.tolist(), strict=True)
    return (coefficient_U * elbo_U).sum(), dict(zip(units, elbo_U.detach().clone(), strict=True))


def run(groups, attention, shifted, share, way, row_tokens):
    """(tokens of all rows, ELBO by sample and draw, gradients)."""
    stream, pipeline = WAYS[way]
    model = build(groups, architecture(qk_norm=True, qkv_bias=True, shifted_logits=shifted), stream)
    drawn = DrawnModel(attention, shifted, None if attention == "causal" else MASK, share)
    rows = DrawRows(samples(attention), drawn, RowShape(row_tokens), groups.device.torch)

    runner = Runner(model, groups, "full", pipeline)
    reports = runner.forward_backward(rows, draw_loss)
    elbo = {unit: value for report in reports for unit, value in report.items()}
    without_gradient = torch.cat(runner.forward(rows))
    assert without_gradient.numel() == sum(int(s.plan.masked_DL.sum()) for s in samples(attention))
    elbo["mean log-prob"] = without_gradient.mean()
    return rows.tokens, elbo, {n: p.grad for n, p in stage_parameters(model).items()}


@pytest.mark.parametrize(("way", "share"), [*[(way, "row") for way in WAYS], ("streamed rows", "handle")])
@pytest.mark.parametrize(("attention", "shifted"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("row_tokens", [10**6, 60], ids=["one_row", "rows"])
def test_grouped_equals_repeated(groups, attention, shifted, way, share, row_tokens):
    alone_tokens, expected_elbo, expected = run(groups, attention, shifted, "none", "plain", row_tokens)
    tokens, elbo, found = run(groups, attention, shifted, share, way, row_tokens)
    assert tokens < alone_tokens and elbo.keys() == expected_elbo.keys()
    for unit, value in expected_elbo.items():
        assert_algebra(elbo[unit], value, f"ELBO of {unit}")
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        assert_algebra(found[name], value, name)
