"""Who is named when a job no longer moves."""

import pytest

from megamem.platform.watch import Pulse, judge

TIMEOUT = 60.0


def pulse(rank, beat, age=100.0, what="update", waits=False):
    return Pulse(beat, age, what, f"step.py:{rank} work", waits, f"n{rank // 2}", 1000 + rank)


def looks(*ranks):
    """Two looks at ranks, each `(beats in between, keywords of its last pulse)`."""
    before = [pulse(rank, 7) for rank in range(len(ranks))]
    return before, [pulse(rank, 7 + beats, **others) for rank, (beats, others) in enumerate(ranks)]


def test_nobody_is_named_while_somebody_moves():
    waiting = (4, dict(waits=True))
    assert judge(*looks(waiting, (4, dict(age=TIMEOUT - 1)), waiting), TIMEOUT) is None
    assert judge(*looks((0, {}), (4, dict(age=1.0)), waiting), TIMEOUT) is None


def test_a_rank_without_a_beat_does_not_move_however_young_its_last_one_was():
    told = judge(*looks((4, dict(waits=True)), (0, dict(age=1.0, what="rollout"))), TIMEOUT)
    assert told.splitlines() == [
        "no progress for 60 s; rank 1 (n0, process 1001) does not answer; its last operation: rollout, at "
        "step.py:1 work",
        "the others are in: update",
    ]


@pytest.mark.parametrize(
    ("ranks", "named", "verb"),
    [
        ([(0, {}), (4, {}), (4, dict(waits=True))], [0], "does not answer"),  # before one that hangs
        ([(4, dict(waits=True)), (4, {}), (4, dict(waits=True)), (4, {})], [1, 3], "hangs"),
        ([(4, dict(waits=True)), (4, dict(waits=True, what="save"))], [0, 1], "waits"),  # a mistake of ours
        ([(0, {})] * 12, list(range(8)), "does not answer"),  # not all of a large job
    ],
)
def test_those_are_named_who_hold_up_the_others(ranks, named, verb):
    told = judge(*looks(*ranks), TIMEOUT)
    assert told.count(f" {verb};") == len(named) and told.count("its last operation") == len(named)
    assert all(f"rank {rank} (n{rank // 2}, process {1000 + rank})" in told for rank in named)
