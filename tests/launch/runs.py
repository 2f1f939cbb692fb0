"""A tiny run as a launcher's tests see it: started by a script, watched through its log, ended by a signal."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.dist.harness import kill_family, tiny_settings
from tests.run_folder import checkpoints, steps

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY = 40, 10
INTERRUPT_AFTER = 13  # steps; between two regular checkpoints, so that a save at the signal shows


def environment(**variables: Any) -> dict[str, str]:
    """This process's environment for a start: this interpreter, its folder first in PATH, this repository."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PYTHON": sys.executable, "PATH": path, "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, **{name: str(value) for name, value in variables.items()}}


def start(script: str, *arguments: Any, log: Path, **variables: Any) -> subprocess.Popen:
    """A script of `launch/` in a session of its own, output to `log`."""
    with open(log, "a", encoding="utf-8") as output:
        return subprocess.Popen(
            [ROOT / "launch" / script, *map(str, arguments)],
            cwd=ROOT,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def write_config(folder: Path, name: str) -> Path:
    """Settings of a run of `STEPS` steps in `folder/name`."""
    settings = tiny_settings(folder / "model", folder / name)
    settings["train"] |= {"steps": STEPS, "save_every": SAVE_EVERY, "keep": 2}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def wait_for(what: Callable[[], Any], told: Callable[[], str], seconds: float = 300.0) -> Any:
    """Wait until `what()` is true; its value.

    Raises:
        AssertionError: not in time; with what `told()` says.
    """
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"not after {seconds:.0f} s: {told()}"
        time.sleep(0.05)
    return found


def wait_for_step(run: Path, step: int, process: subprocess.Popen, log: Path) -> None:
    """Wait until a run has finished `step` steps."""

    def reached() -> bool:
        assert process.poll() is None, f"ended with {process.returncode} before step {step}: {log.read_text()}"
        return step in steps(run)

    wait_for(reached, log.read_text)


def finish(process: subprocess.Popen, log: Path, seconds: float = 300.0) -> int:
    """The exit status of a started script."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise AssertionError(f"still running after {seconds:.0f} s: {log.read_text()}") from None


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a script and everything that it started."""
    kill_family(process.pid)
    process.wait()


def interrupt(process: subprocess.Popen, number: signal.Signals) -> None:
    """A signal to the script alone, as a scheduler or a person would send it."""
    os.kill(process.pid, number)


def assert_complete(run: Path, resumed_after: int | None = None, log: str = "") -> None:
    """Every step once, the last checkpoint there, and, if so, resumed from the step told."""
    assert steps(run) == list(range(1, STEPS + 1))
    assert checkpoints(run)[-1] == STEPS
    if resumed_after is not None:
        assert f"resumed after step {resumed_after} " in log, log


def discover(command: list[str], **variables: Any) -> list[dict[str, Any]]:
    """What every process under `command` says, by rank."""
    program = [*command, sys.executable, ROOT / "tests" / "launch" / "discover.py"]
    done = subprocess.run(
        program, env=environment(**variables), capture_output=True, text=True, timeout=60, check=False
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert told, done.stdout + done.stderr
    return sorted(told, key=lambda ranks: ranks.get("rank", 0))


def assert_places(told: list[dict[str, Any]], world: int, source: str) -> None:
    """Every rank once, and all agree on where to meet."""
    assert [ranks["rank"] for ranks in told] == list(range(world)), told
    assert {ranks["world"] for ranks in told} == {world} and {ranks["source"] for ranks in told} == {source}
    assert len({ranks["init_method"] for ranks in told}) == 1 and len({ranks["job"] for ranks in told}) == 1, told
