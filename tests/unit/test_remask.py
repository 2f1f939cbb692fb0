"""Remasking policies and schedules. Shapes: P candidate positions, R rows."""

import pytest
import torch

from megamem.errors import UserError
from megamem.platform.rng import generator
from megamem.rollout.remask import POLICIES, Samples, select, transfer_counts


@pytest.mark.parametrize(("masks", "steps", "counts"), [(8, 4, [2] * 4), (7, 3, [3, 2, 2]), (2, 5, [1, 1, 0, 0, 0])])
def test_schedule(masks, steps, counts):
    assert transfer_counts(masks, steps) == counts


def test_schedule_always_sums_to_the_masks():
    for masks in range(40):
        for steps in range(1, 40):
            counts = transfer_counts(masks, steps)
            assert sum(counts) == masks and len(counts) == steps
            assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
    with pytest.raises(UserError):
        transfer_counts(4, 0)


def test_policies_keep_the_surest_first():
    """Three distributions over (a, b, c), surest first by every policy."""
    prob_PV = torch.tensor([[0.9, 0.06, 0.04], [0.6, 0.3, 0.1], [0.4, 0.35, 0.25]], dtype=torch.float64)
    top_P2 = prob_PV.topk(2).values
    candidates = Samples(
        token_P=prob_PV.argmax(-1),
        prob_P=top_P2[:, 0],
        entropy_P=-(prob_PV * prob_PV.log()).sum(-1),
        margin_P=top_P2[:, 0] - top_P2[:, 1],
    )
    for name in ("low_confidence", "entropy", "margin"):
        assert POLICIES[name](candidates, None).argsort(descending=True).tolist() == [0, 1, 2], name
    uniform_P = torch.tensor([0.2, 0.9, 0.5], dtype=torch.float64)
    assert torch.equal(POLICIES["random"](candidates, uniform_P), uniform_P)


def test_policies_disagree_where_they_should():
    """Proposal 0 is likelier, but 1 has the lower entropy."""
    entropy_P = torch.tensor([2.0, 1.0], dtype=torch.float64)
    prob_P = torch.tensor([0.5, 0.4], dtype=torch.float64)
    candidates = Samples(torch.tensor([3, 4]), prob_P, entropy_P, margin_P=torch.tensor([0.1, 0.3]).double())
    best = {name: POLICIES[name](candidates, None).argmax().item() for name in ("low_confidence", "entropy", "margin")}
    assert best == {"low_confidence": 0, "entropy": 1, "margin": 1}


def test_select_takes_each_rows_best():
    score_P = torch.tensor([0.1, 0.9, 0.5, 0.8, 0.2, 0.7], dtype=torch.float64)
    row_P = torch.tensor([0, 0, 0, 2, 2, 2])
    selected_P = select(score_P, row_P, torch.tensor([2, 5, 1]))
    assert selected_P.tolist() == [False, True, True, True, False, False]


def test_ties_go_to_the_lower_position():
    row_P = torch.tensor([0, 1, 0, 1, 0, 1])
    selected_P = select(torch.zeros(6), row_P, torch.tensor([2, 1]))
    assert selected_P.tolist() == [True, True, True, False, False, False]


def test_edges():
    assert select(torch.zeros(0), torch.zeros(0, dtype=torch.long), torch.tensor([1, 2])).tolist() == []
    row_P = torch.tensor([0, 0])
    assert select(torch.zeros(2), row_P, torch.tensor([0])).tolist() == [False, False]
    assert select(torch.zeros(2), row_P, torch.tensor([9])).tolist() == [True, True]
    assert select(torch.tensor([-torch.inf, 0.0]), row_P, torch.tensor([1])).tolist() == [False, True]


def test_select_equals_a_plain_loop():
    key = generator(0)
    for _ in range(200):
        size, rows = torch.randint(1, 30, (2,), generator=key).tolist()
        score_P = torch.randint(0, 6, (size,), generator=key).double()  # many ties
        row_P = torch.randint(0, rows, (size,), generator=key)
        count_of_row = torch.randint(0, 5, (rows,), generator=key)
        kept = set()
        for row in range(rows):
            places = [p for p in range(size) if row_P[p] == row]
            kept.update(sorted(places, key=lambda p: (-score_P[p].item(), p))[: int(count_of_row[row])])
        assert set(select(score_P, row_P, count_of_row).nonzero()[:, 0].tolist()) == kept
