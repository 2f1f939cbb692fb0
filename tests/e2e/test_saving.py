"""Saving as a user meets it: a disk that is really full, a kill in the middle of a background save, damaged folders."""

import errno
import os
import shutil
import signal
import subprocess
import threading
from types import SimpleNamespace

import psutil
import pytest
import yaml

from megamem.train.checkpoint import choose_checkpoint, latest_name, list_checkpoints
from tests.dist.harness import tiny_model, tiny_settings
from tests.e2e.jobs import finish, start, wait_for
from tests.run_folder import computed, metrics

STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saving")
    tiny_model(folder / "model")
    return folder


def write_config(folder, name, out, **train):
    settings = tiny_settings(folder / "model", out)
    settings["train"] |= {"steps": STEPS, "save_every": 1, "keep": 3, **train}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def names(run):
    return [path.name for path in list_checkpoints(run)]


def step(number):
    return f"step_{number:06d}"


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with room for one checkpoint (0.55 MB) and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs a file system that fills up; mount says {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_disk_stops_the_run_and_harms_nothing(folder, small_disk):
    run = small_disk / "run"
    done = finish(start(["train", write_config(folder, "stop", run)]))
    assert done.status == 2 and "Traceback" not in done.err + done.out
    lines = done.err.strip().splitlines()
    assert len(lines) == 1 and f"{step(2)}: checkpoint could not be written" in lines[0]
    assert "No space left on device" in lines[0]
    assert choose_checkpoint(run) == (run / "checkpoints" / step(1), ())
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", step(1)]


def test_a_run_may_continue_on_a_full_disk(folder, small_disk):
    """No second checkpoint fits until the first is gone; for a while not even a line of the log does."""
    run, filler, steps = small_disk / "run", small_disk / "filler", 40
    config = write_config(folder, "continue", run, steps=steps, save_every=2, save_async=True, on_save_error="continue")
    process, told = start(["train", config]), []
    reader = threading.Thread(target=lambda: [told.append(line) for line in process.stdout])
    reader.start()
    wait_for(process, lambda: (run / "checkpoints" / "latest").exists())
    with open(filler, "ab", buffering=0) as handle:
        # Filled again and again: a checkpoint that is given up leaves room.
        wait_for(process, lambda: not _filled(handle) or any("the log cannot be written" in line for line in told))
    written = len(metrics(run))
    assert choose_checkpoint(run)[0] == run / "checkpoints" / step(2)
    filler.unlink()
    shutil.rmtree(run / "checkpoints" / step(2))
    reader.join(timeout=300)
    assert process.wait(timeout=60) == 0, process.stderr.read()
    assert written < steps and [line["step"] for line in metrics(run)] == list(range(1, steps + 1))
    failures = [line for line in told if "checkpoint could not be written" in line]
    assert all("training goes on" in line for line in failures)
    assert any("No space left" in line for line in failures)  # torch's writer of common.pt says it in other words
    chosen, notes = choose_checkpoint(run)
    assert chosen.name > step(2) and not notes


def _filled(handle):
    """Write until nothing more fits."""
    try:
        while handle.write(bytes(512)):
            pass
    except OSError as error:
        return error.errno == errno.ENOSPC
    return True


# --- killed in the middle of a background save ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(folder):
    done = finish(start(["train", write_config(folder, "whole", folder / "whole", save_async=True)]))
    assert done.status == 0, done.err
    return folder / "whole"


@pytest.fixture(scope="module")
def killed(folder):
    """SIGKILL to the training process alone while its writers write; they live on for a moment. Then resumed."""
    run = folder / "killed"
    process = start(["train", write_config(folder, "killed", run, save_async=True)])
    wait_for(process, lambda: (run / "checkpoints" / "latest").exists())
    while True:
        wait_for(process, lambda: _on_its_way(run))
        process.send_signal(signal.SIGSTOP)
        if _on_its_way(run):  # and nobody can complete it now
            break
        process.send_signal(signal.SIGCONT)
    writers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    gone, alive = psutil.wait_procs(writers, timeout=60)
    left = SimpleNamespace(alive=alive, names=names(run), latest=latest_name(run), half=_on_its_way(run))
    done = finish(start(["train", folder / "killed.yaml"]))
    assert done.status == 0, done.err
    return SimpleNamespace(run=run, left=left, out=done.out)


def _on_its_way(run):
    return list((run / "checkpoints").glob("step_*.tmp/weights/*.distcp"))


def test_a_kill_in_a_background_save_leaves_a_temporary_folder_only(killed):
    assert killed.left.half and not killed.left.alive
    assert killed.left.latest == killed.left.names[-1]
    assert f"resumed after step {int(killed.left.latest.removeprefix('step_'))}" in killed.out
    assert names(killed.run) == [step(STEPS - 2), step(STEPS - 1), step(STEPS)]
    assert sorted(os.listdir(killed.run / "checkpoints")) == ["latest", *names(killed.run)]


def test_it_goes_on_bit_by_bit(whole, killed):
    assert computed(killed.run) == computed(whole)


# --- damaged checkpoints ----------------------------------------------------------------------------------------------


def damaged(whole, run, *steps_):
    shutil.copytree(whole, run)
    for number in steps_:
        os.truncate(run / "checkpoints" / step(number) / "weights" / "__0_0.distcp", 1000)
    return run


def test_a_damaged_checkpoint_is_left_out_and_the_next_older_taken(folder, whole, tmp_path):
    run = damaged(whole, tmp_path / "run", STEPS)
    exported = finish(start(["convert", "export", run, tmp_path / "hf"]))
    assert exported.status == 0 and "is damaged and left out" in exported.err
    done = finish(start(["train", folder / "whole.yaml", f"out={run}"]))
    assert done.status == 0, done.err
    assert f"{step(STEPS)} is damaged and left out: weights/__0_0.distcp has 1000 bytes" in done.out
    assert f"resumed after step {STEPS - 1}" in done.out
    assert computed(run) == computed(whole)
    assert choose_checkpoint(run) == (run / "checkpoints" / step(STEPS), ())  # written anew


def test_only_damaged_checkpoints_are_told_before_anything_starts(folder, whole, tmp_path):
    run = damaged(whole, tmp_path / "run", STEPS - 2, STEPS - 1, STEPS)
    done = finish(start(["train", folder / "whole.yaml", f"out={run}"]))
    assert done.status == 2 and "Traceback" not in done.err
    assert "no checkpoint is whole" in done.err and len(done.err.strip().splitlines()) == 2
    assert metrics(run) == metrics(whole)
