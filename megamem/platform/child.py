"""A process beside this one that works on its own: without the launcher's ranks, without GPUs, and never longer than
this one lives."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

# How the variables begin by which launchers tell processes their place (`launch.SOURCES`).
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PET_")
_RANKS += ("SLURM_", "OMPI_", "PMIX_", "PMI_", "MPI_", "PRTE_", "HYDRA_")


def environment_alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is alone on one core."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_RANKS)}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class Child:
    """`python -m module`, which calls `answer_parent`.

    Args:
        module: what to run.
        request: one line.
        environ: environment variables of this process.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, module: str, request: str, environ: Mapping[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment_alone(environ),
            text=True,
        )
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()

    def answer(self) -> str | None:
        """What it answered, a few kB at most: empty if it failed, None as long as it works. Does not wait."""
        if self._process.poll() is None:
            return None
        return self._process.stdout.read() if self._process.returncode == 0 else ""

    def end(self) -> None:
        """End it if it still works."""
        self._process.kill()
        self._process.wait()


def answer_parent(work: Callable[[str], str]) -> None:
    """The main function of a `Child`: request -> answer, at low priority."""
    request = sys.stdin.readline()
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.nice(10)
    sys.stdout.write(work(request))


def _follow_parent() -> None:
    """End with the process at the other end of standard input, however that one ends."""
    os.read(0, 1)
    os._exit(1)
