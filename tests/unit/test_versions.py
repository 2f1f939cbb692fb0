"""The version table is the one source: requirements, setup.py and Dockerfile say the same."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = {
    cells[1].split(" (")[0]: cells[2:5]
    for line in (ROOT / "docs" / "versions.md").read_text().splitlines()
    if line.startswith("| ") and (cells := [c.strip() for c in line.split("|")])
}


def test_ranges_are_those_of_setup():
    setup = (ROOT / "setup.py").read_text()
    assert f'"torch{TABLE["torch"][0]}"' in setup
    assert f'"megatron-core{TABLE["megatron-core"][0]}"' in setup
    assert 'python_requires=">=3.10"' in setup
    assert f'"mpi4py{TABLE["mpi4py"][0]}"' in setup


def test_pins_are_those_of_makefile_and_requirements():
    assert f"torch=={TABLE['torch'][1]}" in (ROOT / "Makefile").read_text()
    assert f"megatron-core=={TABLE['megatron-core'][1]}" in (ROOT / "requirements.txt").read_text()
    assert f"mpi4py=={TABLE['mpi4py'][1]}" in (ROOT / "requirements-launch.txt").read_text()


def test_dockerfile():
    docker = (ROOT / "Dockerfile").read_text()
    assert re.search(r"FROM nvcr.io/nvidia/pytorch:(\S+)-py3", docker)[1] == TABLE["NGC PyTorch image"][2]
    assert f"megatron-core=={TABLE['megatron-core'][2]}" in docker
    assert f"APEX_COMMIT={TABLE['NVIDIA apex'][2]}" in docker
