"""Shell scripts: checked by shellcheck, and harmless to what they did not start."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*ROOT.glob("launch/*"), *ROOT.glob("examples/*/*.sh"), ROOT / ".ci" / "run"]
SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in SCRIPTS if path.is_file())
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


def test_every_variable_has_its_default_in_one_place():
    """What a script reads in capitals is set by env.sh, by Slurm, or above in the same script."""
    defaults = {line.split("{")[1].split(":")[0] for line in _lines("env.sh") if line.startswith(': "${')}
    exported = {word for line in _lines("env.sh") if line.startswith("export ") for word in line.split()[1:]}
    assert exported <= defaults, exported - defaults
    for name in ("torchrun.sh", "mpirun.sh", "slurm.sbatch", "slurm_task.sh"):
        for variable in sorted(defaults):
            again = [line for line in _lines(name) if line.startswith(f': "${{{variable}:=')]
            assert name == "slurm.sbatch" or not again, f"{name}: {variable}"


def _lines(name: str) -> list[str]:
    return (ROOT / "launch" / name).read_text(encoding="utf-8").splitlines()


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
