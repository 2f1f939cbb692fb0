"""The order of a stage's units, against the stock order and the properties that its proof needs."""

import random

import pytest

from megamem.stream.schedule import Op, choose_slack, sends_in_flight, stage_order

RNG = random.Random(7)
RAGGED = [[RNG.randint(1, 8) for _ in range(RNG.randint(1, 10))] for _ in range(40)]
SHAPES = [(units, RNG.randint(1, 8), RNG.randint(1, 5)) for units in RAGGED]  # (units, stages, slack)
each_shape = pytest.mark.parametrize(("units", "stages", "slack"), SHAPES)


def forwards_before_backwards(order):
    """Of every backward, how many forwards come before it."""
    return [sum(op.kind == "forward" for op in order[:n]) for n, op in enumerate(order) if op.kind == "backward"]


def stock_order(microbatches, stage, stages):
    """1F1B as it is usually written: warm-up, one forward and one backward, cool-down."""
    warmup = min(stages - 1 - stage, microbatches)
    order = [("forward", k) for k in range(warmup)]
    for k in range(microbatches - warmup):
        order += [("forward", warmup + k), ("backward", k)]
    return order + [("backward", k) for k in range(microbatches - warmup, microbatches)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 8, 16])
def test_one_unit_and_slack_one_is_the_stock_order(microbatches, stages):
    for stage in range(stages):
        order = stage_order([1] * microbatches, stage, stages, slack=1)
        assert [(op.kind, op.microbatch) for op in order] == stock_order(microbatches, stage, stages)
        assert all(op.unit == 0 for op in order)


@each_shape
def test_every_unit_once_each_way_in_its_direction(units, stages, slack):
    for stage in range(stages):
        order = stage_order(units, stage, stages, slack)
        forwards = [op for op in order if op.kind == "forward"]
        assert forwards == [Op("forward", k, i) for k, count in enumerate(units) for i in range(count)]
        assert forwards == stage_order(units, stage, stages, slack, forward_only=True)
        backwards = [op for op in order if op.kind == "backward"]
        assert backwards == [Op("backward", k, i) for k, count in enumerate(units) for i in range(count)[::-1]]


@each_shape
def test_earlier_stages_run_further_ahead(units, stages, slack):
    """What the proof needs: h_r(g) does not grow with r, and exceeds the next stage's by at most the slack."""
    ahead = [forwards_before_backwards(stage_order(units, stage, stages, slack)) for stage in range(stages)]
    for upstream, downstream in zip(ahead, ahead[1:], strict=False):
        assert all(0 <= h - g <= slack for h, g in zip(upstream, downstream, strict=True))


@each_shape
def test_every_stage_has_a_whole_micro_batch_before_its_backward(units, stages, slack):
    for stage in range(stages):
        done = set()
        for op in stage_order(units, stage, stages, slack):
            if op.kind == "backward":
                assert {("forward", op.microbatch, i) for i in range(units[op.microbatch])} <= done
            done.add((op.kind, op.microbatch, op.unit))


def test_last_stage_runs_nothing_early():
    order = stage_order([3, 1, 2], stage=1, stages=2, slack=3)
    names = [f"{op.kind[0]}{op.microbatch}{op.unit}" for op in order]
    assert " ".join(names) == "f00 f01 f02 b02 f10 b01 f20 b00 f21 b10 b21 b20"


@pytest.mark.parametrize(
    ("units", "costs", "slack"),
    [
        ([1, 1, 1], [1.0, 9.0, 1.0], 1),  # nothing is cut
        ([8], [1.0] * 8, 2),
        ([8], [0.1] * 8, 2),
        ([8], [0.7 / 8 + 0.3 * (2 * i + 1) / 64 for i in range(8)], 3),  # the triangle, 30 % attention
        ([8], [0.4 / 8 + 0.6 * (2 * i + 1) / 64 for i in range(8)], 4),
        ([2, 1], [1.0, 9.0, 1.0], 2),  # never more than the units of a micro-batch
        ([8] * 2, [1.0] * 15 + [9.0], 8),  # 2 * 9 / 1.5 = 12
    ],
)
def test_slack_rule(units, costs, slack):
    assert choose_slack(units, costs) == slack


@pytest.mark.parametrize("slack", range(1, 10))
def test_an_edge_has_room_for_the_lead(slack):
    slots = 2
    assert slots + sends_in_flight(slack) >= slack + 1
    assert sends_in_flight(slack) >= 2
