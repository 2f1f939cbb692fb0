"""Kill a run again and again, resume it each time, and compare it with one that nobody touched.

    python tools/chaos.py OUT [--kills 20] [--steps 40] [--seed 0] [--layouts same|random] [--slurm-address HOST]

Two processes train the tiny LLaDA of examples/01 on recorded rollouts. At random moments (also while it starts) the
run meets a fault of `FAULTS`: SIGKILL to the whole job or to one rank, SIGTERM to the launcher, SIGUSR1 to one rank; a
disk that is full, once; and, where Slurm answers, `scontrol requeue` of a job of two nodes (--slurm-address: what to
call the first of them, where nodes cannot find each other by name). With `--layouts same` the result has to be
bit-equal to the uninterrupted run's; with `random` every start takes another layout, and the result has to be as close
as uninterrupted runs on those layouts are. Prints a table; status 1 if anything was lost or differs.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from megamem.errors import RUN_AGAIN

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "01_sudoku_demo"
SETTINGS = (
    "model.init=random", "rollout.prompts=4", "rollout.group=4", "noise.draws=2", "eval.every=0", "eval.at_start=false",
    "task.options.train_size=64", "task.options.test_size=8", "train.save_every=1", "optimizer.lr=1e-3",
    "tensorboard=false",
)  # fmt: skip
LAYOUTS = {
    "DP 2": (),
    "TP 2": ("parallel.tensor=2",),
    "TP 2 + SP": ("parallel.tensor=2", "parallel.sequence=true"),
    "PP 2": ("parallel.pipeline=2",),
}
BOUND = 1.5  # times the worst uninterrupted run on another layout: tests/tol.py's FLOOR


@dataclass(frozen=True)
class Job:
    """Runs of one model in one folder; `settings` hold for all of them."""

    out: Path
    steps: int
    address: str | None

    def arguments(self, run: str, layout: str, *settings: str) -> list[str]:
        """Of the `megamem` command that starts a run, or goes on with it."""
        common = (f"out={self.out / run}", f"model.path={self.out / 'tiny'}", f"train.steps={self.steps}")
        return ["train", str(EXAMPLE / "bgpo.yaml"), *common, *SETTINGS, *LAYOUTS[layout], *settings]

    def start(self, arguments: list[str], log: Path, file_limit: int | None = None) -> subprocess.Popen:
        """A run on two processes under torchrun, in a process group of its own."""
        limit = None if file_limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit,) * 2)
        environ = {**os.environ, "PYTHON": sys.executable, "NPROC": "2", "PYTHONPATH": str(ROOT)}
        with open(log, "a", encoding="utf-8") as file:
            return subprocess.Popen(
                [ROOT / "launch" / "torchrun.sh", *arguments],
                stdout=file, stderr=file, env=environ, cwd=ROOT, start_new_session=True, preexec_fn=limit,
            )  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """When a fault comes: `pause` seconds after `lines` more lines in the log; without lines, after the start."""

    lines: int | None
    pause: float


@dataclass(frozen=True)
class Kill:
    """A row of the table."""

    fault: str
    layout: str
    when: str
    logged: int
    resumed: int
    status: int | str

    @property
    def lost(self) -> int:
        """Finished steps that have to be done again."""
        return self.logged - self.resumed

    @property
    def allowed(self) -> int:
        """A step is logged before it is saved; a request to stop saves, if the run was up to hear it."""
        return 0 if self.status == RUN_AGAIN else 1


# --- faults: each ends a running job and returns its status --------------------------------------------------------


def _family(process: subprocess.Popen) -> list[psutil.Process]:
    return [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]


def _ranks(process: subprocess.Popen) -> list[psutil.Process]:
    return [p for p in _family(process) if _is_rank(p)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:  # it has just ended
        return False
    return "megamem.cli.main" in words and "megamem.platform.elastic" not in words


def _send(process: subprocess.Popen, number: signal.Signals, targets: list[psutil.Process]) -> int:
    for target in targets:
        try:
            target.send_signal(number)
        except psutil.NoSuchProcess:
            pass
    return process.wait(300)


def kill_job(process: subprocess.Popen, chance: random.Random) -> int:
    return _send(process, signal.SIGKILL, _family(process))


def kill_rank(process: subprocess.Popen, chance: random.Random) -> int:
    ranks = _ranks(process)
    return _send(process, signal.SIGKILL, [chance.choice(ranks)] if ranks else _family(process))


def term_launcher(process: subprocess.Popen, chance: random.Random) -> int:
    return _send(process, signal.SIGTERM, [psutil.Process(process.pid)])


def usr1_rank(process: subprocess.Popen, chance: random.Random) -> int:
    ranks = _ranks(process)
    return _send(process, signal.SIGUSR1, [chance.choice(ranks)] if ranks else _family(process))


FAULTS: dict[str, Callable[[subprocess.Popen, random.Random], int]] = {
    "SIGKILL, job": kill_job,
    "SIGKILL, a rank": kill_rank,
    "SIGTERM": term_launcher,
    "SIGUSR1, a rank": usr1_rank,
}
FULL_DISK, REQUEUE = "full disk", "requeue"


# --- what a run has done -------------------------------------------------------------------------------------------


def logged(run: Path) -> list[dict[str, float]]:
    """Whole lines of a run's log."""
    log = run / "metrics.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def saved(run: Path) -> int:
    """Step of the newest complete checkpoint."""
    steps = [int(path.parent.name[5:]) for path in run.glob("checkpoints/step_??????/megamem.json")]
    return max(steps, default=0)


def wait_for(moment: Moment, run: Path, before: int, ended: Callable[[], bool]) -> None:
    """Wait until the moment has come, or the run has ended."""
    while moment.lines is not None and len(logged(run)) < before + moment.lines and not ended():
        time.sleep(0.01)
    deadline = time.monotonic() + moment.pause
    while time.monotonic() < deadline and not ended():
        time.sleep(0.01)


def schedule(kills: int, chance: random.Random, slurm: bool) -> Iterator[str]:
    """Faults in order: every kind once if there is room, one full disk, then at random."""
    kinds = [*FAULTS, FULL_DISK, *([REQUEUE] * slurm)][:kills]
    kinds += chance.choices([*FAULTS, *([REQUEUE] * slurm)], k=kills - len(kinds))
    chance.shuffle(kinds)
    yield from kinds


def strike(job: Job, run: str, layout: str, fault: str, chance: random.Random, settings: tuple[str, ...]) -> Kill:
    """Start (or go on with) a run, let it meet a fault, and see what is left."""
    folder, log = job.out / run, job.out / f"{run}.log"
    before = len(logged(folder))
    early = chance.random() < 0.15
    moment = Moment(None, chance.uniform(0, 12)) if early else Moment(chance.randint(1, 2), chance.uniform(0, 0.6))
    when = (
        f"{moment.pause:.1f} s after the start" if early else f"{moment.pause:.2f} s after {moment.lines} more step(s)"
    )
    arguments = job.arguments(run, layout, *settings)
    if fault == FULL_DISK:
        status, when = job.start(arguments, log, file_limit=60_000).wait(300), "first save"
    elif fault == REQUEUE:
        status, when = requeue(job, arguments, folder, moment, before), when
    else:
        process = job.start(arguments, log)
        wait_for(moment, folder, before, lambda: process.poll() is not None)
        if process.poll() is not None:
            sys.exit(f"the run ended with {process.returncode} before it met its fault:\n{log.read_text()[-2000:]}")
        status = FAULTS[fault](process, chance)
    return Kill(fault, layout, when, len(logged(folder)), saved(folder), status)


def requeue(job: Job, arguments: list[str], run: Path, moment: Moment, before: int) -> str:
    """A Slurm job of two nodes, queued again by `scontrol requeue`; cancelled once it goes on. Its end in words."""
    environ = {
        **os.environ,
        "PYTHON": sys.executable,
        "NPROC": "1",
        "PYTHONPATH": str(ROOT),
        "LOGS": str(job.out / "slurm"),
    }
    if job.address:
        environ["MASTER_ADDR"] = job.address
    script = [
        "sbatch",
        "--parsable",
        "--nodes=2",
        f"--output={job.out / 'slurm.out'}",
        "launch/slurm.sbatch",
        *arguments,
    ]
    number = subprocess.run(script, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout.strip()
    wait_for(moment, run, before, partial(_has_left, number))
    subprocess.run(["scontrol", "requeue", number], check=True)
    wait_for(Moment(1, 0.0), run, len(logged(run)), partial(_has_left, number))
    subprocess.run(["scancel", "--full", number], check=True)
    while not _has_left(number):
        pass
    return "requeued, cancelled"


def _has_left(job: str) -> bool:
    """Whether a Slurm job is no longer queued or running; waits, so that Slurm is not asked all the time."""
    time.sleep(0.5)
    asked = subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True, check=False)
    return not asked.stdout.strip() and (asked.returncode == 0 or "Invalid job id" in asked.stderr)


# --- comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Of a run from the reference: largest of any weight, and largest of a logged number, relative to the largest
    value that number has in the run.
    """

    weights: float
    numbers: float


def compare(job: Job, run: str) -> Difference:
    """A finished run against the reference."""
    pairs = list(zip(logged(job.out / "reference"), logged(job.out / run), strict=True))
    numbers = [
        max(abs(a[name] - b[name]) for a, b in pairs) / max(max(abs(a[name]) for a, _ in pairs), 1e-12)
        for name in ("elbo", "grad_norm", "reward", "length")
    ]
    found = {name: weights(job, name) for name in ("reference", run)}
    differences = [(found["reference"][k] - found[run][k]).abs().max() for k in found["reference"]]
    return Difference(torch.stack(differences).max().item(), max(numbers))


def weights(job: Job, run: str) -> dict[str, torch.Tensor]:
    """Of a finished run, by their Hugging Face names."""
    target = job.out / f"{run}_hf"
    if not target.exists():
        export = [sys.executable, "-m", "megamem.cli.main", "convert", "export", job.out / run, target]
        subprocess.run(export, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return {k: v.double() for file in target.glob("*.safetensors") for k, v in load_file(file).items()}


def finish(job: Job, run: str, layout: str, *settings: str) -> None:
    """Let a run end by itself."""
    log = job.out / f"{run}.log"
    status = job.start(job.arguments(run, layout, *settings), log).wait(1800)
    if status:
        sys.exit(f"{run} ended with {status}:\n{log.read_text()[-2000:]}")


def chaos(job: Job, kills: int, seed: int, same: bool, slurm: bool) -> bool:
    """The whole experiment; whether all is well."""
    chance = random.Random(seed)
    recorded = str(job.out / "rollouts")
    subprocess.run([sys.executable, EXAMPLE / "make_tiny_llada.py", job.out / "tiny"], cwd=ROOT, check=True)
    settings = job.out / "tiny" / "config.json"  # two layers: so that two stages divide them
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"n_layers": 2}))
    first, *others = LAYOUTS
    finish(job, "reference", first, f"rollout.record={recorded}")
    replay = (f"rollout.replay={recorded}",)
    print("| # | fault | layout | when | steps logged | resumes after | lost | status |\n" + "|---" * 8 + "|")
    rows = []
    for number, fault in enumerate(schedule(kills, chance, slurm), 1):
        layout = first if same else chance.choice([*LAYOUTS])
        row = strike(job, "killed", layout, fault, chance, replay)
        rows.append(row)
        cells = (number, row.fault, row.layout, row.when, row.logged, row.resumed, row.lost, row.status)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    finish(job, "killed", first if same else chance.choice(others), *replay)
    found = compare(job, "killed")
    allowed = Difference(0.0, 0.0)
    if not same:
        for layout in others:
            finish(job, layout, layout, *replay)
        floors = [compare(job, layout) for layout in others]
        allowed = Difference(*(BOUND * max(getattr(f, n) for f in floors) for n in ("weights", "numbers")))
    lost = [row for row in rows if not 0 <= row.lost <= row.allowed]
    well = not lost and found.weights <= allowed.weights and found.numbers <= allowed.numbers
    print(
        f"\n{len(rows)} kills, {job.steps} steps; steps done twice: {sum(row.lost for row in rows)}; more "
        f"than allowed: {len(lost)}\nlargest difference from the uninterrupted run: weights {found.weights:.3g} "
        f"(allowed {allowed.weights:.3g}), logged numbers {found.numbers:.3g} (allowed {allowed.numbers:.3g})\n"
        + ("all well" if well else "NOT well")
    )
    return well


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description="kill a run again and again, and compare it with one left alone")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", choices=("same", "random"), default="same")
    parser.add_argument("--slurm-address", help="what to call the first node")
    asked = parser.parse_args()
    if asked.out.exists():
        sys.exit(f"{asked.out} exists; give a new folder")
    asked.out.mkdir(parents=True)
    slurm = bool(shutil.which("sbatch")) and subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0
    if not slurm:
        print("no Slurm answers here: no requeue among the faults")
    job = Job(asked.out.resolve(), asked.steps, asked.slurm_address)
    sys.exit(0 if chaos(job, asked.kills, asked.seed, asked.layouts == "same", slurm) else 1)


if __name__ == "__main__":
    main()
