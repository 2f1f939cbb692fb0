"""Traces: the file format, bubbles, and the tool that draws them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megamem.stream.schedule import Op
from megamem.stream.simulate import chunk_costs, simulate
from megamem.stream.trace import Event, Trace, read_trace, write_events
from tests.helpers import refused

ROOT = Path(__file__).resolve().parents[2]
EVENTS = (
    Event(0, Op("forward", 0, 0), 10.0, 12.0),
    Event(1, Op("forward", 0, 0), 12.0, 14.0),
    Event(1, Op("backward", 0, 0), 14.0, 18.0),
    Event(0, Op("backward", 0, 0), 18.5, 20.0),
)


def draw(*arguments):
    command = [sys.executable, "tools/trace.py", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_bubbles_count_from_the_first_start():
    trace = Trace(EVENTS)
    assert (trace.step_time, trace.stages) == (10.0, 2)
    assert trace.bubbles == pytest.approx([0.65, 0.4]) and trace.bubble == pytest.approx(0.525)


def test_one_line_per_unit(tmp_path):
    write_events(tmp_path / "0.jsonl", EVENTS[:1])
    line = {"rank": 0, "op": "forward", "microbatch": 0, "unit": 0, "start": 10.0, "end": 12.0}
    assert (tmp_path / "0.jsonl").read_text() == json.dumps(line) + "\n"


def test_files_of_all_stages_make_one_trace(tmp_path):
    trace = simulate([chunk_costs("causal", 4, 0.3)] * 3, [1.0] * 3)
    for stage in range(3):
        write_events(tmp_path / f"{stage}.jsonl", (event for event in trace.events if event.stage == stage))
    assert set(read_trace(tmp_path).events) == set(trace.events)
    assert len(read_trace(tmp_path / "1.jsonl").events) == len(trace.events) // 3


def test_a_wrong_path_or_file_is_told(tmp_path):
    assert f"{tmp_path}: no trace here" in refused(read_trace, tmp_path)
    assert "no trace here" in refused(read_trace, tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    assert "no event" in refused(read_trace, tmp_path)
    for wrong in ("{", "[]", "3", '{"rank": 0}'):
        (tmp_path / "wrong.jsonl").write_text(wrong + "\n")
        assert "wrong.jsonl:1: not an event" in refused(read_trace, tmp_path / "wrong.jsonl")


def test_the_tool_draws_a_simulation(tmp_path):
    done = draw("--stages", 8, "--microbatches", 1, "--chunks", 16, "--compare", "1f1b", "--out", tmp_path / "a.png")
    assert done.returncode == 0, done.stderr
    assert "causal, 16 units, slack 3: step 26.15, 0.196 of 1F1B, bubble 36.5 %" in done.stdout
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_the_tool_draws_a_run_and_tells_a_wrong_path(tmp_path):
    write_events(tmp_path / "0.jsonl", EVENTS)
    done = draw(tmp_path, "--out", tmp_path / "a.png")
    assert done.returncode == 0 and "per stage: 65.0 40.0" in done.stdout, done.stderr
    assert (tmp_path / "a.png").exists()
    done = draw(tmp_path / "absent")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no trace here" in done.stderr
