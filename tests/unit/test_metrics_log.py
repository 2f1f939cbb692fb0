"""metrics.jsonl where it cannot be written: nothing is lost, no line is spoilt."""

import json

import pytest

from megamem.train.metrics import MetricsLog
from tests.helpers import file_size, refused


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("room", [20, 30, 45])  # for one line of 19 bytes and none, half or most of the next
def test_lines_wait_until_there_is_room(tmp_path, room):
    told = []
    log = MetricsLog(tmp_path, 0, tensorboard=False, tell=told.append)
    log.write(0, {"x": 1})
    with file_size(room):
        for step in (1, 2, 3):
            log.write(step, {"x": 1.5})
        whole = lines(tmp_path)
    log.write(4, {"x": 2})
    assert [line["step"] for line in whole] == list(range(len(whole))) and len(whole) < 4
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]
    assert len(told) == 1 and "the log cannot be written" in told[0] and str(tmp_path) in told[0]


def test_the_run_stops_where_it_shall(tmp_path):
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    log.write(0, {"x": 1})
    with file_size(25):
        message = refused(log.write, 1, {"x": 1})
    assert "the log cannot be written" in message and "is the disk full?" in message
    assert [line["step"] for line in lines(tmp_path)] == [0]


def test_a_folder_in_its_place(tmp_path):
    told = []
    log = MetricsLog(tmp_path, 0, tensorboard=False, tell=told.append)
    (tmp_path / "metrics.jsonl").mkdir()
    log.write(0, {"x": 1})
    (tmp_path / "metrics.jsonl").rmdir()
    log.write(1, {"x": 1})
    assert [line["step"] for line in lines(tmp_path)] == [0, 1] and len(told) == 1


@pytest.mark.parametrize("tail", ["", '{"step": 2, "x"', '{"step": 2}', '{"step": 2}\n{"step": 3}\n'])
def test_later_and_half_written_lines_go(tmp_path, tail):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n' + tail)
    MetricsLog(tmp_path, 2, tensorboard=False).write(2, {"x": 5})
    assert lines(tmp_path) == [{"step": 0}, {"step": 1}, {"step": 2, "x": 5}]


def test_nothing_is_rewritten_where_nothing_goes(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    with file_size(0):
        MetricsLog(tmp_path, 2, tensorboard=False)
        assert "metrics.jsonl: cannot be written" in refused(MetricsLog, tmp_path, 1, tensorboard=False)
    assert lines(tmp_path) == [{"step": 0}, {"step": 1}]
