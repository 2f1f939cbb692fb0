"""launch/mpirun.sh on two ranks, and what processes learn under mpirun."""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megamem.errors import RUN_AGAIN
from tests.launch.runs import (
    INTERRUPT_AFTER,
    ROOT,
    STEPS,
    assert_complete,
    assert_places,
    discover,
    finish,
    interrupt,
    start,
    wait_for_step,
    write_config,
)
from tests.run_folder import checkpoints, steps

if not find_spec("mpi4py") or not (Path(sys.executable).parent / "mpirun").exists():
    pytest.skip("no MPI: pip install -r requirements-launch.txt", allow_module_level=True)

# Root and more processes than cores: mpirun refuses both unless told.
MPI_ARGS = "--allow-run-as-root --oversubscribe"


def test_mpi_tells_rank_and_address():
    first, second = (discover(["mpirun", *MPI_ARGS.split(), "-n", "2"]) for _ in range(2))
    assert_places(first, 2, "Open MPI")
    assert [ranks["local_rank"] for ranks in first] == [0, 1] and first[0]["nodes"] == 1
    assert first[0]["job"] != second[0]["job"]


def test_one_node_needs_no_mpi4py(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('as if it were not installed')")
    told = discover(["mpirun", *MPI_ARGS.split(), "-n", "2"], PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert_places(told, 2, "Open MPI")
    assert told[0]["init_method"].startswith("tcp://127.0.0.1:")


def test_a_run_under_mpi_is_interrupted_and_finishes(folder):
    config, run, log = write_config(folder, "mpi"), folder / "mpi", folder / "mpi.log"
    process = start("mpirun.sh", "train", config, log=log, NPROC=2, MPI_ARGS=MPI_ARGS)
    wait_for_step(run, INTERRUPT_AFTER, process, log)
    interrupt(process, signal.SIGTERM)
    assert finish(process, log) == RUN_AGAIN, log.read_text()
    reached = steps(run)[-1]
    assert INTERRUPT_AFTER <= reached < STEPS and checkpoints(run)[-1] == reached, log.read_text()
    process = start("mpirun.sh", "train", config, log=log, NPROC=2, MPI_ARGS=MPI_ARGS)
    assert finish(process, log) == 0, log.read_text()
    assert_complete(run, reached, log.read_text())


def test_a_mistake_is_told_once(folder):
    log = folder / "mpi_mistake.log"
    process = start(
        "mpirun.sh", "train", write_config(folder, "mpi"), "train.stpes=3", log=log, NPROC=2, MPI_ARGS=MPI_ARGS
    )
    assert finish(process, log) == 2
    assert log.read_text().count("did you mean steps?") == 1, log.read_text()
