"""Shell scripts: checked by shellcheck, and slurm.sbatch against a pretended Slurm (a real one: tests/launch)."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*ROOT.glob("launch/*"), *ROOT.glob("examples/*/*.sh"), ROOT / ".ci" / "run"]
SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in SCRIPTS if path.is_file())
SCRIPTS_OF_LAUNCH = [Path(name).name for name in SCRIPTS if name.startswith("launch/") and "example" not in name]
SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")


def shellcheck(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([SHELLCHECK, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, **options)


@pytest.mark.skipif(not SHELLCHECK, reason="shellcheck is not installed")
def test_shellcheck():
    done = shellcheck("--external-sources", "--source-path=SCRIPTDIR", *SCRIPTS)
    assert done.returncode == 0, done.stdout
    assert shellcheck("-", input="#!/bin/sh\nrm -rf $1/*\n").returncode == 1  # it does find faults


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_kills_by_name(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not [word for word in ("pkill", "killall", "kill -9", "scancel") if word in _code(text)]


def _code(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def test_variables_have_their_defaults_in_one_place():
    text = {name: (ROOT / "launch" / name).read_text(encoding="utf-8") for name in SCRIPTS_OF_LAUNCH}
    defaults = {name: re.findall(r'^ *: "\$\{(\w+):=', body, re.MULTILINE) for name, body in text.items()}
    exported = re.findall(r"\b[A-Z_]{2,}\b", " ".join(re.findall(r"^export (.*)$", text["env.sh"], re.MULTILINE)))
    assert set(exported) <= set(defaults["env.sh"]) and len(set(defaults["env.sh"])) == len(defaults["env.sh"])
    # Where env.sh is has to be known before, and the port follows from the job.
    assert defaults.pop("slurm.sbatch") == ["LAUNCH_DIR", "MASTER_PORT"]
    assert not [name for name, found in defaults.items() if found and name != "env.sh"]


@pytest.mark.parametrize("name", ["torchrun.sh", "mpirun.sh"])
def test_usage_is_told(name):
    done = subprocess.run([ROOT / "launch" / name], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage" in done.stderr


def test_several_nodes_need_an_address():
    done = subprocess.run(
        [ROOT / "launch" / "torchrun.sh", "train", "x.yaml"], env={"NNODES": "2", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "NNODES = 2 needs MASTER_ADDR" in done.stderr


# --- slurm.sbatch with an srun that only writes down what it was asked for --------------------------------------------

SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$SRUN_ASKED"
[ -z "$SRUN_LEAVES" ] || touch "$TASK_LOGS/$SRUN_LEAVES"
exit "$SRUN_STATUS"
"""
SCONTROL = """#!/bin/bash
case $1 in
show) printf '%s\\n' n7 n8 ;;
requeue) echo "$2" > "$REQUEUED" ;;
esac
"""


@pytest.fixture
def submit(tmp_path):
    """Run the batch script as Slurm would on the first of two nodes with 16 CPUs; its outcome."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(status: int = 0, leaves: str = "", restart: int = 0, **variables: str):
        environ = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "LOGS": str(tmp_path / "logs"),
            "SLURM_CPUS_ON_NODE": "16",
            "SLURM_JOB_ID": "10042",
            "SLURM_JOB_NODELIST": "n[7-8]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_RESTART_COUNT": str(restart),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SRUN_ASKED": str(tmp_path / "asked"),
            "SRUN_LEAVES": leaves,
            "SRUN_STATUS": str(status),
            "REQUEUED": str(tmp_path / "requeued"),
        }
        for name in ("asked", "requeued"):
            (tmp_path / name).unlink(missing_ok=True)
        done = subprocess.run(
            [ROOT / "launch" / "slurm.sbatch", "train", "my config.yaml"], env=environ | variables,
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else None
        return done.returncode, asked, (tmp_path / "requeued").exists(), done.stdout + done.stderr

    return run


def test_one_task_per_node_or_per_gpu(submit):
    status, asked, requeued, told = submit()
    assert (status, requeued) == (0, False) and "2 nodes, first n7:15042" in told
    assert {"--ntasks-per-node=1", "--cpus-per-task=16", "--kill-on-bad-exit=1"} <= set(asked)
    assert asked[-3:] == [str(ROOT / "launch" / "slurm_task.sh"), "train", "my config.yaml"]
    _, asked, _, _ = submit(LAUNCH="srun", SLURM_GPUS_ON_NODE="8", SLURM_JOB_ID="20042")
    assert {"--ntasks-per-node=8", "--cpus-per-task=2"} <= set(asked)
    status, asked, _, told = submit(LAUNCH="ssh", SLURM_JOB_ID="30042")
    assert status == 2 and asked is None and "LAUNCH = ssh must be torchrun or srun" in told


def test_containers(submit, tmp_path):
    _, asked, _, _ = submit()
    assert not [word for word in asked if word.startswith("--container")]
    _, asked, _, _ = submit(CONTAINER_IMAGE="x.sqsh", CONTAINER_MOUNTS="/data:/data", SLURM_JOB_ID="20042")
    logs, scripts = tmp_path / "logs" / "20042", ROOT / "launch"
    assert "--container-image=x.sqsh" in asked
    assert f"--container-mounts={scripts}:{scripts},{logs}:{logs},/data:/data" in asked


def test_an_interrupted_job_is_queued_again_until_the_limit(submit):
    assert submit(leaves="interrupted")[::2] == (75, True)
    assert submit(status=1, leaves="interrupted", restart=1)[::2] == (75, True)  # saved; a task did not end well
    status, _, requeued, told = submit(leaves="interrupted", restart=3, MAX_RESTARTS="3")
    assert (status, requeued) == (75, False) and "restart 3 of 3" in told


@pytest.mark.parametrize("status", [1, 2, 137])
def test_a_failed_job_is_not_queued_again(submit, status):
    assert submit(status=status)[::2] == (status, False)
    assert submit(status=0, restart=1)[1] is not None  # nor does it count as finished


def test_a_finished_job_does_nothing_more(submit):
    assert submit()[0] == 0
    status, asked, requeued, told = submit(restart=1)
    assert (status, asked, requeued) == (0, None, False) and "finished before" in told
