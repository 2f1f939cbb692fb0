"""Saving on two real ranks: what is kept, when it counts, and what happens where a checkpoint cannot be written.

Every obstacle is one that the file system really puts up: a file or a folder in the way, or a limit on the bytes of a
file (as on a full disk) for one rank alone.
"""

import io
import os
import pickle
import resource
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megamem.errors import UserError
from megamem.models.build import build_model
from megamem.train.checkpoint import choose_checkpoint, latest_name, list_checkpoints, load_model, read_info
from megamem.train.prepare import open_model
from megamem.train.save import begin_checkpoint
from megamem.train.saver import Saver
from tests.dist.harness import Cases, Grid, Outcome, build, run_ranks, tiny_config, tiny_model
from tests.helpers import file_size, refused

RANKS = Grid(tensor=2)


# --- what runs on the processes -------------------------------------------------------------------------------------


def job(ranks, folder):
    cases = Cases(ranks)
    cases.run(RANKS, {"saving": (scenarios, (folder,))})
    cases.run(Grid(), {"traps": (traps, (folder,))})
    return cases.results, cases.errors, cases.seconds


def scenarios(groups, folder):
    """Every scenario on one run whose step count is set by hand; the results of all ranks."""
    run = build(tiny_config(folder / "model", folder / "unused", "parallel.tensor=2", "objective.name=sft"), groups)
    found = {}
    for scenario in SCENARIOS:
        found[scenario.__name__] = scenario(Told(run, folder / scenario.__name__))
    everyone = [None] * groups.world
    torch.distributed.all_gather_object(everyone, found)
    return everyone


class Told:
    """A run with a folder of its own, and what its saver told."""

    def __init__(self, run, out):
        self.run, self.out, self.lines = run, out, []
        if run.groups.is_main:
            (out / "checkpoints").mkdir(parents=True)

    def saver(self, finished=0, **train):
        config = self.run.prepared.config
        plain = {"save_async": False, "on_save_error": "stop", "keep": 5, "keep_best": 0}
        settings = config.train.model_copy(update=plain | train)
        object.__setattr__(
            self.run.prepared, "config", config.model_copy(update={"out": str(self.out), "train": settings})
        )
        self.run.finished = finished
        return Saver(self.run, {}, self.lines.append)

    def save(self, saver, step, **metrics):
        """Save as after a step; the error if there is one."""
        self.run.finished = step
        return self.attempt(lambda: saver.save(metrics))

    def attempt(self, action):
        try:
            action()
        except UserError as error:
            return str(error)
        return None

    def names(self):
        self.run.groups.barrier()
        found = sorted(path.name for path in (self.out / "checkpoints").iterdir()), latest_name(self.out)
        self.run.groups.barrier()
        return found


@contextmanager
def gated_writers(gate):
    """Writers start only once the file `gate` exists."""
    write = FileSystemWriterAsync.write_preloaded_data

    def write_once_allowed(*args, **kwargs):
        while not gate.exists():
            time.sleep(0.01)
        write(*args, **kwargs)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write_once_allowed)
    try:
        yield
    finally:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write)


def keeping(told):
    """One newest and one best; a second saver, as after a restart, in the middle; an evaluation missing at the end."""
    options = {"keep": 1, "keep_best": 1, "best": "eval_reward"}
    saver, seen = told.saver(**options), []
    for step, reward in ((1, 0.2), (2, 0.9), (3, 0.9), (4, 0.1)):
        told.save(saver, step, eval_reward=reward, eval_exact=-reward, loss=7.0)
        seen.append(told.names())
    saver = told.saver(finished=4, **options)
    told.save(saver, 4, eval_reward=1.0)  # saved already
    told.save(saver, 5, eval_reward=0.3)
    seen.append(told.names())
    told.save(saver, 6, loss=1.0)
    seen.append(told.names())
    return {"seen": seen, "scores": read_info(told.out / "checkpoints" / "step_000003").scores, "time": saver.seconds}


def background(told):
    """`latest` waits for the writers; a second save waits for the first; `finish` waits for the second."""
    saver = told.saver(save_async=True)
    told.save(saver, 1)
    saver.finish()
    seen, gate = [told.names()], told.out / "gate"
    with gated_writers(gate):
        told.save(saver, 2)
        for _ in range(3):
            saver.poll()
        seen.append(told.names())
        if told.run.groups.is_main:
            gate.touch()
        told.save(saver, 3)
        seen.append(told.names())
        while told.names()[1] != "step_000003":
            saver.poll()
        seen.append(told.names())
        told.save(saver, 4)
        saver.finish()
        seen.append(told.names())
    return seen


def writer_killed(told):
    """The second rank's writer is killed in the middle of a background save: both are told, and can save again."""
    saver, gate = told.saver(save_async=True), told.out / "gate"
    with gated_writers(gate):
        told.save(saver, 1)
        if told.run.groups.world_rank == 1:
            for child in psutil.Process().children(recursive=True):
                child.kill()
        told.run.groups.barrier()
        gate.touch()
        found = [told.attempt(saver.finish), told.names()]
        told.save(saver, 2)
        saver.finish()
    return [*found, told.names()]


def one_rank_fails(told):
    """The second rank's disk is full while a background save is written: both are told, at the end; then it is not."""
    saver = told.saver(save_async=True)
    told.save(saver, 1)
    saver.finish()
    found = {}
    with file_size(60_000 if told.run.groups.world_rank == 1 else resource.RLIM_INFINITY):
        found["begun"] = told.save(saver, 2)
        found["stop"] = told.attempt(saver.finish)
        found["after stop"] = told.names()
        saver = told.saver(finished=1, save_async=True, on_save_error="continue")
        found["continue"] = told.save(saver, 2) or told.attempt(saver.finish)
        found["lines"] = list(told.lines)
    found["again"] = told.save(saver, 2) or told.attempt(saver.finish)
    found["after all"] = told.names()
    return found


def main_rank_fails(told):
    """Files that only the first rank writes cannot be: `common.pt` (no room), `.metadata` (something in the way)."""
    run, target, small = told.run, told.out / "checkpoints" / "step_000001", told.out / "hf"
    if run.groups.is_main:
        small.mkdir()
        (small / "config.json").write_text("{}")
    run.groups.barrier()
    saver, found = told.saver(), {}
    info = read_info(told.out.parent / "background" / "checkpoints" / "step_000001")
    with file_size(1_000 if run.groups.is_main else resource.RLIM_INFINITY):
        found["common.pt"] = told.attempt(
            lambda: begin_checkpoint(target, info, run.model, run.groups, small, run.optimizer).advance(wait=True)
        )
    writing = begin_checkpoint(target, info, run.model, run.groups, small, run.optimizer)
    if run.groups.is_main:
        (target.with_name("step_000001.tmp") / "weights" / ".metadata.tmp").mkdir()
    found[".metadata"] = told.attempt(lambda: writing.advance(wait=True))
    found["left"] = told.names()
    found["then"] = told.save(saver, 1)
    found["names"] = told.names()
    return found


def blocked(told):
    """A file in place of the folder of checkpoints, and a run that continues; then the folder is back."""
    saver = told.saver(on_save_error="continue")
    folder, away = told.out / "checkpoints", told.out / "away"
    found = {"before": told.save(saver, 1)}
    if told.run.groups.is_main:
        folder.rename(away)
        folder.write_text("in the way")
    found["during"] = told.save(saver, 2)
    found["lines"] = list(told.lines)
    if told.run.groups.is_main:
        folder.unlink()
        away.rename(folder)
    found["after"] = told.save(saver, 3)
    found["names"] = told.names()
    return found


def blocked_and_stopping(told):
    saver = told.saver()
    if told.run.groups.is_main:
        (told.out / "checkpoints").rmdir()
        (told.out / "checkpoints").write_text("in the way")
    return {"told": told.save(saver, 1)}


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def set_trap(weights, where, mark):
    """Change a checkpoint's pickles so that reading them makes the folder `mark`."""
    if where == "common.pt":
        torch.save({**torch.load(weights / where), "more": Trap(mark)}, weights / where)
    elif where == ".metadata":
        metadata = pickle.loads((weights / where).read_bytes())
        metadata.planner_data = Trap(mark)
        (weights / where).write_bytes(pickle.dumps(metadata))
    else:  # one of the objects between the tensors
        metadata = pickle.loads((weights / ".metadata").read_bytes())
        buffer = io.BytesIO()
        torch.save([Trap(mark)], buffer)
        index = next(index for index in metadata.storage_data if where in index.fqn)
        stored = metadata.storage_data[index]
        with open(weights / stored.relative_path, "ab") as handle:
            stored.offset, stored.length = handle.tell(), handle.write(buffer.getvalue())
        (weights / ".metadata").write_bytes(pickle.dumps(metadata))


def traps(groups, folder):
    """Load checkpoints that carry code: with megamem, and as megatron-core loads by itself."""
    saved, found = folder / "background" / "checkpoints" / "step_000004", {}
    model_folder = open_model(saved)
    model = build_model(model_folder.arch, groups, torch.float32)
    load_model(saved, model)
    for where in ("common.pt", ".metadata", "_extra_state"):
        copy, mark = folder / f"trap {where}", folder / f"sprung {where}"
        shutil.copytree(saved, copy)
        set_trap(copy / "weights", where, mark)
        try:
            load_model(copy, model)
            told = "loaded"
        except UserError as error:
            told = str(error)
        sprung = mark.exists()
        try:
            dist_checkpointing.load({"model": model.sharded_state_dict()}, str(copy / "weights"))
        except Exception:  # the trap is sprung by then, or torch has refused
            pass
        found[where] = {"told": told, "sprung": sprung, "sprung without megamem": mark.exists()}
    return found


SCENARIOS = (keeping, background, writer_killed, one_rank_fails, main_rank_fails, blocked, blocked_and_stopping)


# --- what must hold -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saver")
    tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def outcome(folder):
    return Outcome(run_ranks(job, 2, folder))


@pytest.fixture(scope="module")
def everyone(outcome):
    """What each rank found, by scenario."""
    return outcome["saving"]


def steps(*numbers):
    return [f"step_{number:06d}" for number in numbers]


def listing(*numbers):
    return ["latest", *steps(*numbers)]


def test_newest_best_and_latest_are_kept(everyone):
    for found in (rank["keeping"] for rank in everyone):
        assert found["seen"] == [
            (listing(1), "step_000001"),
            (listing(2), "step_000002"),
            (listing(3), "step_000003"),  # as good as 2, and newer
            (listing(3, 4), "step_000004"),
            (listing(3, 5), "step_000005"),  # by another saver: scores survive a restart
            (listing(3, 6), "step_000006"),  # without a score, kept as the newest
        ]
        assert found["scores"] == {"eval_reward": 0.9, "eval_exact": -0.9}
        assert found["time"] > 0


def test_latest_moves_once_a_background_save_is_complete(everyone):
    for seen in (rank["background"] for rank in everyone):
        assert seen == [
            (listing(1), "step_000001"),
            (["latest", *steps(1), "step_000002.tmp"], "step_000001"),
            (["latest", *steps(1, 2), "step_000003.tmp"], "step_000002"),
            (listing(1, 2, 3), "step_000003"),
            (listing(1, 2, 3, 4), "step_000004"),
        ]


def test_a_writer_that_is_killed_is_told_on_all(everyone):
    for stopped, left, after in (rank["writer_killed"] for rank in everyone):
        assert "step_000001: checkpoint could not be written" in stopped and "was killed" in stopped
        assert left == ([], None) and after == (listing(2), "step_000002")


def test_one_rank_with_a_full_disk_stops_all_or_none(everyone):
    for rank, found in enumerate(each["one_rank_fails"] for each in everyone):
        assert found["begun"] is None
        assert "step_000002: checkpoint could not be written" in found["stop"]
        assert found["after stop"] == (listing(1), "step_000001")
        assert found["continue"] is None and found["again"] is None
        assert len(found["lines"]) == (1 if rank == 0 else 0)
        assert all("step_000002: checkpoint could not be written" in line for line in found["lines"])
        assert found["after all"] == (listing(1, 2), "step_000002")
    assert "File too large" in everyone[0]["one_rank_fails"]["stop"]


@pytest.mark.parametrize("name", ["common.pt", ".metadata"])
def test_what_only_the_first_rank_writes_fails_on_all(everyone, name):
    for found in (rank["main_rank_fails"] for rank in everyone):
        assert "checkpoint could not be written" in found[name]
        assert found["left"] == ([], None)
        assert (found["then"], found["names"]) == (None, (listing(1), "step_000001"))


def test_a_run_continues_without_its_folder_or_stops(everyone):
    for rank, each in enumerate(everyone):
        found = each["blocked"]
        assert (found["before"], found["during"], found["after"]) == (None, None, None)
        assert len(found["lines"]) == (1 if rank == 0 else 0)
        assert all("train.on_save_error = continue" in line for line in found["lines"])
        assert found["names"] == (listing(1, 3), "step_000003")
        assert "checkpoint could not be written" in each["blocked_and_stopping"]["told"]


@pytest.mark.parametrize("where", ["common.pt", ".metadata", "_extra_state"])
def test_loading_runs_no_code_from_a_checkpoint(outcome, where):
    found = outcome["traps"][where]
    assert "checkpoint cannot be loaded" in found["told"] and not found["sprung"]
    # The traps are real: torch and megatron-core by themselves step on all but the first.
    assert found["sprung without megamem"] == (where != "common.pt")


# --- choosing among checkpoints, without processes -------------------------------------------------------------------


@pytest.fixture
def run(outcome, folder, tmp_path):
    """A run folder with the checkpoints of steps 1 to 4."""
    assert outcome["saving"]
    return Path(shutil.copytree(folder / "background", tmp_path / "run"))


def checkpoint(run, step):
    return run / "checkpoints" / f"step_{step:06d}"


def cut(path):
    with open(path, "r+b") as handle:
        handle.truncate(path.stat().st_size - 1)


def flip(path):
    """Same size, another byte."""
    data = bytearray(path.read_bytes())
    data[1] ^= 255
    path.write_bytes(data)


DAMAGE = {
    "a tensor file cut short": (lambda c: cut(c / "weights" / "__1_0.distcp"), "weights/__1_0.distcp has"),
    "a tensor file missing": (lambda c: (c / "weights" / "__0_1.distcp").unlink(), "weights/__0_1.distcp: No such"),
    "the description cut short": (lambda c: cut(c / "weights" / ".metadata"), "weights/.metadata has"),
    "the description changed": (lambda c: flip(c / "weights" / ".metadata"), "weights/.metadata cannot be read"),
    "no weights": (lambda c: shutil.rmtree(c / "weights"), "No such file"),
    "no megamem.json": (lambda c: (c / "megamem.json").unlink(), "no megamem.json"),
    "half a megamem.json": (lambda c: cut(c / "megamem.json"), "megamem.json: cannot be read"),
    "an empty folder": (lambda c: [shutil.rmtree(c), c.mkdir()], "no megamem.json"),
}


def test_a_whole_run_is_resumed_without_a_word(run):
    assert choose_checkpoint(run) == (checkpoint(run, 4), ())
    (run / "checkpoints" / "latest").unlink()
    assert choose_checkpoint(run) == (checkpoint(run, 4), ())


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoints_are_left_out_with_a_line(run, kind):
    damage, words = DAMAGE[kind]
    for step in (3, 4):
        damage(checkpoint(run, step))
    (run / "checkpoints" / "latest").write_text("step_000002\n")
    chosen, notes = choose_checkpoint(run)
    assert chosen == checkpoint(run, 2)
    assert len(notes) == 2
    for step, note in zip((4, 3), notes, strict=True):
        assert str(checkpoint(run, step)) in note and "left out" in note and words in note
        assert "\n" not in note


def test_a_latest_that_disagrees_is_told_and_not_followed(run):
    for name in ("step_000002", "step_000009", "no such thing"):
        (run / "checkpoints" / "latest").write_text(name)
        chosen, notes = choose_checkpoint(run)
        assert chosen == checkpoint(run, 4) and len(notes) == 1 and name in notes[0]


def test_no_whole_checkpoint_is_an_error_and_not_a_new_start(run):
    for step in (1, 2, 3, 4):
        cut(checkpoint(run, step) / "weights" / "common.pt")
    message = refused(choose_checkpoint, run)
    assert "no checkpoint is whole" in message and "step_000004" in message and len(message.splitlines()) == 2


def test_other_folders_are_not_looked_at(run, tmp_path):
    shutil.copytree(checkpoint(run, 4), run / "checkpoints" / "step_000009.tmp")
    shutil.copytree(checkpoint(run, 4), run / "checkpoints" / "step_000004 backup")
    assert choose_checkpoint(run) == (checkpoint(run, 4), ())
    assert [path.name for path in list_checkpoints(run)] == steps(1, 2, 3, 4)
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    assert choose_checkpoint(tmp_path / "new") == (None, ())
