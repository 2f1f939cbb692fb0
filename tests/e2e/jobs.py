"""`megamem` commands as a user starts them, and what they leave behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil

from tests.dist.harness import kill_family
from tests.run_folder import metrics

ROOT = Path(__file__).resolve().parents[2]


def start(arguments, world=1, **options):
    """A `megamem` command in a process group of its own; under torchrun for more than one process."""
    launcher = [sys.executable, "-m", "megamem.cli.main"]
    if world > 1:
        torchrun = ["megamem.platform.elastic", "--standalone", f"--nproc-per-node={world}"]
        launcher = [sys.executable, "-m", *torchrun, "-m", "megamem.cli.main"]
    return subprocess.Popen(
        [*launcher, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def finish(process, timeout=600):
    """Wait; its status, `out` and `err`."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    return SimpleNamespace(status=process.returncode, out=out, err=err)


def kill(process):
    """SIGKILL to all of a job."""
    kill_family(process.pid)
    process.communicate()


def workers(process) -> list[int]:
    """Process ids of the ranks that torchrun started, in rank order."""
    return sorted(
        child.pid for child in psutil.Process(process.pid).children() if "megamem.cli.main" in child.cmdline()
    )


def wait_for(process, happened: Callable[[], bool], timeout=600.0) -> None:
    """Wait until something has happened while a process runs."""
    deadline = time.monotonic() + timeout
    while not happened():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.01)


def has_lines(run, count: int) -> Callable[[], bool]:
    """Whether a run's log has so many lines."""
    return lambda: len(metrics(run)) >= count
