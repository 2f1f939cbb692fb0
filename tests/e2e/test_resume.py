"""Runs of `megamem train` as a user starts them: killed, resumed, moved to other layouts, and refused."""

import resource
import shutil
import time
from types import SimpleNamespace

import pytest
import yaml

from tests.dist.harness import Cases, Grid, Outcome, run_ranks, tiny_model, tiny_settings
from tests.e2e.jobs import finish, has_lines, kill, start, wait_for
from tests.run_folder import computed, metrics
from tests.tol import assert_exact

STEPS, SAVE_EVERY, KEEP, KILL_AFTER = 6, 1, 2, 3  # so that the checkpoint resumed from is pruned on the way
TP2 = ("parallel.tensor=2",)


def kill_in_the_middle_of_a_step(process, run, lines):
    """Wait until the log has so many lines, then half a step, then SIGKILL."""
    wait_for(process, has_lines(run, lines))
    time.sleep(metrics(run)[-1].get("seconds", 0.2) / 2)
    assert process.poll() is None, "the run ended before it could be killed"
    kill(process)


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def write_config(folder, name, **changes):
    settings = tiny_settings(folder / "model", folder / name) | changes
    settings["train"] |= {"steps": STEPS, "save_every": SAVE_EVERY, "keep": KEEP}
    settings["eval"] = {"every": 3, "at_start": True, "limit": 4}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """An uninterrupted run on two processes, tensor parallel."""
    done = finish(start(["train", write_config(folder, "whole"), *TP2], world=2))
    assert done.status == 0, done.err
    return folder / "whole"


@pytest.fixture(scope="module")
def same_layout(folder):
    """The same run, killed and resumed, with half-written folders lying about."""
    run, config = folder / "same", write_config(folder, "same")
    kill_in_the_middle_of_a_step(start(["train", config, *TP2], world=2), run, KILL_AFTER + 1)  # and one of step 0
    log = run / "metrics.jsonl"
    with open(log, "a", encoding="utf-8") as handle:
        handle.write('{"step": 4, "rew')  # a line that was being written
    before = checkpoints(run)
    newest = run / "checkpoints" / before[-1]
    half = run / "checkpoints" / "step_000099.tmp"
    shutil.copytree(newest, half)
    shutil.rmtree(half / "weights")
    done = finish(start(["train", config, *TP2], world=2))
    assert done.status == 0, done.err
    return SimpleNamespace(run=run, before=before, out=done.out)


@pytest.fixture(scope="module")
def other_layout(folder):
    """Killed on four processes, tensor x pipeline; resumed on two, data parallel."""
    run, config = folder / "other", write_config(folder, "other")
    process = start(["train", config, *TP2, "parallel.pipeline=2"], world=4)
    kill_in_the_middle_of_a_step(process, run, KILL_AFTER + 1)
    done = finish(start(["train", config], world=2))
    assert done.status == 0, done.err
    return run


def weights_job(ranks, named):
    cases = Cases(ranks)
    cases.run(Grid(), {name: (weights, (path,)) for name, path in named.items()})
    return cases.results, cases.errors, cases.seconds


def weights(groups, checkpoint):
    """All weights of a checkpoint by Hugging Face name."""
    from megamem.models.build import build_model
    from megamem.train.checkpoint import load_model
    from megamem.train.prepare import open_model
    from megamem.train.run import DTYPES
    from tests.dist.harness import exported

    model_folder = open_model(checkpoint)
    model = build_model(model_folder.arch, groups, DTYPES[model_folder.info.weights])
    load_model(checkpoint, model)
    return exported(SimpleNamespace(model=model, groups=groups, prepared=SimpleNamespace(model=model_folder)))


@pytest.fixture(scope="module")
def final_weights(whole, same_layout, other_layout, full_disk):
    last = f"checkpoints/step_{STEPS:06d}"
    named = {"whole": whole / last, "same": same_layout.run / last, "other": other_layout / last}
    return Outcome(run_ranks(weights_job, 1, {**named, "full disk": full_disk.run / last}))


def test_a_killed_run_resumes_from_its_last_checkpoint(same_layout):
    assert f"step_{KILL_AFTER - 1:06d}" in same_layout.before and f"step_{STEPS:06d}" not in same_layout.before
    assert "resumed after step" in same_layout.out


def test_resumed_metrics_are_bit_equal(whole, same_layout):
    assert computed(same_layout.run) == computed(whole)


def test_resumed_weights_are_bit_equal(final_weights):
    for name, weight in final_weights["whole"].items():
        assert_exact(final_weights["same"][name], weight, name)


def test_the_log_has_one_line_a_step(whole, same_layout, other_layout):
    for run in (whole, same_layout.run, other_layout):
        assert [line["step"] for line in metrics(run)] == list(range(STEPS + 1))


def test_only_the_newest_checkpoints_are_kept(whole, same_layout):
    kept = [f"step_{step:06d}" for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)][-KEEP:]
    assert checkpoints(whole) == kept
    assert checkpoints(same_layout.run) == kept  # what was half-written is gone, too


def test_a_run_goes_on_at_another_layout(whole, other_layout):
    # fp32 sums in another order: 24 bits, about a hundred roundings in a row, six steps; measured below 2e-7.
    for expected, found in zip(metrics(whole), metrics(other_layout), strict=True):
        for key in ("reward", "exact", "length", "eval_reward"):
            if key in expected:  # the same numbers, averaged over ranks in another order
                assert found[key] == pytest.approx(expected[key], rel=1e-12), (key, expected["step"])
        for key in ("elbo", "grad_norm"):
            if key in expected:
                assert found[key] == pytest.approx(expected[key], rel=2e-6), (key, expected["step"])


def test_weights_at_another_layout_stay_close(final_weights):
    # Six steps of at most lr = 1e-3 each: a lost optimizer state or step would show as 1e-3.
    for name, weight in final_weights["whole"].items():
        assert (final_weights["other"][name] - weight).abs().max() < 1e-4, name


# --- what goes wrong is told in a line or two ------------------------------------------------------------------------


def assert_told(done, *words):
    assert done.status not in (0, None), done.out
    assert "Traceback" not in done.err and "Traceback" not in done.out
    lines = done.err.strip().splitlines()
    assert 1 <= len(lines) <= 2, done.err
    for word in words:
        assert word in done.err, done.err


@pytest.fixture(scope="module")
def full_disk(folder, whole):
    """A finished run asked for more steps, on a disk that takes files of 60 kB at most."""
    run = folder / "full"
    shutil.copytree(whole, run)
    log = (run / "metrics.jsonl").read_text(encoding="utf-8")
    limit = (60_000, 60_000)
    settings = [f"out={run}", f"train.steps={STEPS + 1}"]
    process = start(
        ["train", folder / "whole.yaml", *settings], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    return SimpleNamespace(run=run, done=finish(process), log=log)


def test_a_full_disk_is_told_and_harms_nothing(full_disk, final_weights):
    assert_told(full_disk.done, "checkpoint could not be written", f"step_{STEPS + 1:06d}")
    assert checkpoints(full_disk.run) == [f"step_{STEPS - SAVE_EVERY:06d}", f"step_{STEPS:06d}"]
    for name, weight in final_weights["whole"].items():
        assert_exact(final_weights["full disk"][name], weight, name)
    assert (full_disk.run / "metrics.jsonl").read_text(encoding="utf-8").startswith(full_disk.log)


@pytest.fixture(scope="module")
def refused(folder):
    """Mistakes of a user, tried at the same time."""
    config = write_config(folder, "refused")
    (folder / "file").write_text("not a folder")
    (folder / "bad.jsonl").write_text('{"puzzle": "1", "solution": "2"}\n{"puzzle": oops\n')
    processes = {
        "typo": start(["train", config, "train.stpes=3"]),
        "unwritable": start(["train", config, f"out={folder}/file/run"]),
        "jsonl": start(["train", config, "task.name=sudoku4", f"task.options.file={folder}/bad.jsonl"]),
    }
    return {name: finish(process) for name, process in processes.items()}


def test_a_misspelt_key_is_told(refused):
    assert_told(refused["typo"], "train.stpes", "did you mean steps?")


def test_an_unwritable_run_folder_is_told(refused):
    assert_told(refused["unwritable"], "out = ", "cannot be written")


def test_malformed_problems_are_told(refused):
    assert_told(refused["jsonl"], "bad.jsonl", "line")
