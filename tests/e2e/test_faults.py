"""What happens to a run on two real processes when one of them is signalled, fails, hangs, or computes no numbers."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import yaml

from megamem.errors import RUN_AGAIN
from tests.dist.harness import tiny_model, tiny_settings
from tests.e2e.jobs import finish, has_lines, start, wait_for, workers
from tests.run_folder import computed, metrics

STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    tiny_model(folder / "model")
    return folder


def write_config(folder, name, fault=None, **train):
    """A tiny run; evaluated often, and saved only at its end unless something makes it save."""
    settings = tiny_settings(folder / "model", folder / name)
    settings["train"] |= {"steps": STEPS, "save_every": 1000, **train}
    settings["eval"] = {"every": 2, "at_start": True, "limit": 4}
    if fault:
        options = settings["task"]["options"] | {"mark": str(folder / f"{name}.mark"), **fault}
        settings["task"] = {"name": "tests.e2e.faulty:Faulty", "options": options}
        settings["eval"] = {"every": 0, "at_start": False}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def test_a_signal_to_one_rank_saves_on_all_and_loses_nothing(folder):
    whole, stopped = write_config(folder, "whole"), write_config(folder, "stopped")
    done = finish(start(["train", whole], world=2))
    assert done.status == 0, done.err
    told = []
    # Twice: in the middle of the step after the second line, and wherever it is a moment after it was resumed.
    for number, lines, pause in ((signal.SIGTERM, 2, 0.1), (signal.SIGUSR1, 3, 0.0)):
        process = start(["train", stopped], world=2)
        wait_for(process, has_lines(folder / "stopped", lines))
        time.sleep(pause)
        os.kill(workers(process)[1], number)
        told.append(finish(process))
        assert told[-1].status == RUN_AGAIN, told[-1].err
        assert '"interrupted"' in (folder / "stopped" / "status.json").read_text()
    done = finish(start(["train", stopped], world=2))
    assert done.status == 0, done.err
    assert "asked to stop" in told[0].out and "resumed after step" in told[1].out + done.out
    assert computed(folder / "stopped") == computed(folder / "whole")
    assert '"finished"' in (folder / "stopped" / "status.json").read_text()


@pytest.fixture(scope="module")
def raised(folder):
    config = write_config(folder, "raised", {"fault": "fail"})
    process = start(["train", config], world=2)
    wait_for(process, (folder / "raised.mark").exists)
    began = time.monotonic()
    return SimpleNamespace(done=finish(process), seconds=time.monotonic() - began)


def test_a_rank_that_raises_ends_the_others_and_alone_is_shown(raised):
    assert raised.done.status == 1
    assert raised.done.err.count("Traceback") == 1, raised.done.err
    assert "rank 1 failed" in raised.done.err and "the reward cannot be computed" in raised.done.err
    assert raised.seconds < 30  # seconds on a free machine


def test_a_rank_that_hangs_is_named_with_its_operation(folder):
    config = write_config(folder, "hangs", {"fault": "hang"}, timeout=5.0)
    done = finish(start(["train", config], world=2))
    assert done.status == 1
    assert "no progress for 5 s" in done.err and "Traceback" not in done.err
    assert "rank 1 (" in done.err and "hangs; its last operation: reward, at faulty.py:" in done.err, done.err
    assert "the others are in" in done.err and "rank 0 (" not in done.err


def test_a_stopped_rank_is_named(folder):
    process = start(["train", write_config(folder, "frozen", timeout=5.0, steps=100000)], world=2)
    wait_for(process, has_lines(folder / "frozen", 2))
    os.kill(workers(process)[1], signal.SIGSTOP)
    began = time.monotonic()
    done = finish(process)
    assert done.status == 1
    assert "rank 1 (" in done.err and "does not answer" in done.err, done.err
    assert time.monotonic() - began < 60


def test_a_run_that_diverges_ends_with_a_readable_message(folder):
    config = write_config(folder, "diverges", max_skipped=1)
    done = finish(start(["train", config, "optimizer.lr=1e30", "optimizer.weight_decay=0"], world=2))
    assert done.status == 2
    lines = done.err.strip().splitlines()
    assert len(lines) == 2 and "step 3" in lines[0] and "2 times in a row" in lines[0], done.err
    assert "train.max_skipped = 1" in lines[0] and "optimizer.lr" in lines[1]
    assert [line["skipped"] for line in metrics(folder / "diverges")[1:]] == [0, 1]
