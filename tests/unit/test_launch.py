"""Which process am I, and on which device: environments as real launchers make them, and the mistakes.

The environments are what torchrun 2.13, srun 22.05, mpirun of Open MPI 5.0 and mpiexec of MPICH 5.0 gave to a process,
cut down to the variables that matter.
"""

import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from megamem.platform import launch
from megamem.platform.device import resolve_device
from megamem.platform.launch import Ranks, discover_ranks, first_host, tasks_per_node, tells_mistakes
from megamem.platform.local import run_locally
from tests.helpers import refused

ALONE = Ranks(0, 1, 0, None, "single process", "local", 1, 1)
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29511"}
TORCHRUN = MASTER | {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "2",
}
STANDALONE = TORCHRUN | {"TORCHELASTIC_RUN_ID": "1f149ae3-7eeb"}
TORCHRUN_2X2 = TORCHRUN | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "RANK": "3", "WORLD_SIZE": "4"}

BATCH_SHELL = {
    "SLURM_JOB_ID": "10042",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
STEP = BATCH_SHELL | {
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
ONE_TASK = STEP | {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
ONE_TASK |= {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
ONE_TASK |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n1"}
# A batch job with one task per node.
TASK_PER_NODE = STEP | {"SLURM_LOCALID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
TASK_PER_NODE |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}

OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-n1-20085@1",
    "PMIX_RANK": "1",
}
OPEN_MPI_2X2 = OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
OPEN_MPI_ALONE = OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
OPEN_MPI_ALONE |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
OPEN_MPI_PER_NODE = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MPICH = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "11", "PMI_RANK": "1", "PMI_SIZE": "2"}
SRUN_PMI2 = STEP | {"PMI_FD": "13", "PMI_JOBID": "10042.0", "PMI_RANK": "3", "PMI_SIZE": "4"}
CRAY = {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PMI_RANK": "3", "PMI_SIZE": "4"}


@pytest.fixture(autouse=True)
def no_mpi(monkeypatch):
    """Without mpi4py, wherever this runs."""

    def absent(ranks, first_port):
        raise ImportError("mpi4py")

    monkeypatch.setattr(launch, "ask_first_rank", absent)


def by_torchrun(rank, world, local_rank, local_world=None, nodes=None, job="n1-29511"):
    return Ranks(rank, world, local_rank, "env://", "torchrun", f"torchrun-{job}-0", local_world, nodes)


def by_slurm(where="n1:15042", job="10042-0-0"):
    return Ranks(3, 4, 1, f"tcp://{where}", "Slurm", f"slurm-{job}", 2, 2)


def by_mpi(rank, world, where="n1:29511", source="Open MPI", job="mpi-prterun-n1-20085-1"):
    return Ranks(rank, world, 1, f"tcp://{where}", source, job, 2, 1 if world == 2 else None)


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, ALONE),
        ({"HOME": "/x", "MASTER_ADDR": "host"}, ALONE),
        (MASTER | {"RANK": "0", "WORLD_SIZE": "1"}, by_torchrun(0, 1, 0)),
        (MASTER | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, by_torchrun(5, 8, 1)),
        (MASTER | {"RANK": "5", "WORLD_SIZE": "8"}, by_torchrun(5, 8, 5)),
        (TORCHRUN, by_torchrun(1, 2, 1, 2, 1)),
        (STANDALONE, by_torchrun(1, 2, 1, 2, 1, job="1f149ae3-7eeb")),
        (TORCHRUN_2X2, by_torchrun(3, 4, 1, 2, 2)),
        # Slurm: steps only; the port follows from the job and, for steps side by side, from the step.
        (STEP, by_slurm()),
        (STEP | {"SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "2"}, by_slurm("n1:16051", "10042-1-2")),
        (STEP | MASTER, by_slurm("n1:29511")),
        (STEP | {"MASTER_ADDR": "", "MASTER_PORT": ""}, by_slurm()),
        (SRUN_PMI2, by_slurm()),
        (STEP | {"SLURM_JOB_NODELIST": "n[0-2]"}, by_slurm()),  # a step on some of the job's nodes
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,3"}, replace(by_slurm(), local_world=3)),
        (BATCH_SHELL, ALONE),
        (ONE_TASK, ALONE),
        (ONE_TASK | {"PMI_RANK": "0", "PMI_SIZE": "1"}, ALONE),
        # MPI
        (OPEN_MPI | MASTER, by_mpi(1, 2)),
        (OPEN_MPI, by_mpi(1, 2, "127.0.0.1:19789")),
        (OPEN_MPI_2X2 | MASTER, by_mpi(3, 4)),
        (OPEN_MPI_ALONE, ALONE),
        (MPICH | MASTER, by_mpi(1, 2, source="MPICH", job="tcp---n1-29511")),
        (CRAY | MASTER, by_mpi(3, 4, source="PMI", job="tcp---n1-29511")),
        # one inside the other
        (ONE_TASK | TORCHRUN, by_torchrun(1, 2, 1, 2, 1)),
        (BATCH_SHELL | TORCHRUN, by_torchrun(1, 2, 1, 2, 1)),
        (TASK_PER_NODE | TORCHRUN_2X2, by_torchrun(3, 4, 1, 2, 2)),
        (OPEN_MPI_PER_NODE | TORCHRUN_2X2, by_torchrun(3, 4, 1, 2, 2)),
        (TASK_PER_NODE | OPEN_MPI_2X2 | MASTER, by_mpi(3, 4)),
        # set by hand from what the launcher around says
        (STEP | MASTER | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, by_torchrun(3, 4, 1)),
        (OPEN_MPI | MASTER | {"RANK": "1", "WORLD_SIZE": "2"}, by_torchrun(1, 2, 1)),
    ],
)
def test_ranks(environ, ranks):
    assert discover_ranks(environ) == ranks


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "2"}, ["RANK is not set"]),
        ({"RANK": "two", "WORLD_SIZE": "4"}, ["RANK = 'two'", "integer"]),
        ({"RANK": "", "WORLD_SIZE": "4"}, ["RANK = ''", "integer"]),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "x"}, ["LOCAL_RANK = 'x'", "integer"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK = 4", "0 … WORLD_SIZE - 1 = 3"]),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, ["RANK = -1", "0 … WORLD_SIZE - 1 = 3"]),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, ["MASTER_ADDR is not set"]),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n1"}, ["MASTER_PORT is not set"]),
        (STEP | {"SLURM_LOCALID": "x"}, ["SLURM_LOCALID = 'x'"]),
        (STEP | {"SLURM_PROCID": "4"}, ["SLURM_PROCID = 4", "SLURM_STEP_NUM_TASKS"]),
        (STEP | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, ["MASTER_ADDR", "SLURM_STEP_NODELIST"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_RANK is not set"]),
        (OPEN_MPI_2X2, ["4 processes under Open MPI", "MASTER_ADDR", "mpi4py"]),
        (
            MPICH,
            ["2 processes under MPICH", "MASTER_ADDR", "mpi4py"],
        ),  # MPICH tells no name from which to derive a port
        ({"PMI_RANK": "1", "PMI_SIZE": "2"} | MASTER, ["PMI_LOCAL_RANK is not set"]),
        # every one of several tasks started several processes
        (STEP | TORCHRUN_2X2, ["SLURM_STEP_TASKS_PER_NODE", "LOCAL_WORLD_SIZE", "2 processes on this node"]),
        (OPEN_MPI | TORCHRUN, ["OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"]),
        # one torchrun per node, or per task, but each a job of its own
        (TASK_PER_NODE | TORCHRUN, ["SLURM_STEP_NUM_TASKS", "GROUP_WORLD_SIZE", "--nnodes"]),
        (STEP | TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1", "RANK": "0"}, ["GROUP_WORLD_SIZE"]),
        (OPEN_MPI_PER_NODE | TORCHRUN, ["OMPI_COMM_WORLD_SIZE", "GROUP_WORLD_SIZE"]),
        # left over in the environment: set by hand or by another system
        (STEP | MASTER | {"RANK": "0", "WORLD_SIZE": "8"}, ["SLURM_STEP_NUM_TASKS", "(WORLD_SIZE)"]),
        # every one of several tasks started an mpirun
        (STEP | OPEN_MPI, ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"]),
        (TASK_PER_NODE | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}, ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"]),
    ],
)
def test_contradictions(environ, told):
    message = refused(discover_ranks, environ)
    assert "environment" in message and all(text in message for text in told), message
    assert message.count("\n") < 2 and len(message) < 260, message


def test_mpi_agrees_on_an_address(monkeypatch):
    asked = []

    def answer(ranks, first_port):
        asked.append((ranks.rank, first_port))
        return "n7", 15000

    monkeypatch.setattr(launch, "ask_first_rank", answer)
    ranks = discover_ranks(MPICH)
    assert (ranks.init_method, ranks.job) == ("tcp://n7:15000", "tcp---n7-15000")
    assert discover_ranks(MPICH | {"MASTER_ADDR": "n1"}).init_method == "tcp://n1:15000"
    assert discover_ranks(MPICH | {"MASTER_PORT": "9"}).init_method == "tcp://n7:9"
    assert len(asked) == 3
    discover_ranks(MPICH | MASTER)
    discover_ranks(OPEN_MPI_ALONE)
    assert len(asked) == 3  # nobody is asked what is known


@pytest.mark.parametrize("environ", [TORCHRUN_2X2, STEP, OPEN_MPI, MPICH])
def test_one_process_tells_mistakes(environ):
    first = {"RANK": "0", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "0", "PMI_RANK": "0"}
    assert not tells_mistakes(environ)
    assert tells_mistakes({name: first.get(name, value) for name, value in environ.items()})
    assert tells_mistakes({}) and tells_mistakes({"HOME": "/x"}) and tells_mistakes(BATCH_SHELL)


NODE_LISTS = {
    "n1": "n1",
    "n[1-2]": "n1",
    "gpu[07-09,12],login": "gpu07",
    "gpu[12],a1": "gpu12",
    "login,gpu[07-09]": "login",
    "a-b[3,5-7]": "a-b3",
    "rack[0-1]n[01-04]": "rack0n01",
    "r-1-[10-11],q": "r-1-10",
}


@pytest.mark.parametrize("nodes", NODE_LISTS)
def test_first_host(nodes):
    assert first_host(nodes) == NODE_LISTS[nodes]


@pytest.mark.skipif(not shutil.which("scontrol"), reason="Slurm's scontrol is not installed")
@pytest.mark.parametrize("nodes", NODE_LISTS)
def test_first_host_is_slurms(nodes, tmp_path, monkeypatch):
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    found = subprocess.check_output(["scontrol", "show", "hostnames", nodes], text=True)
    assert found.split()[0] == first_host(nodes)


def test_tasks_per_node():
    assert tasks_per_node("8(x2),4") == [8, 8, 4]
    assert tasks_per_node("1") == [1]
    assert tasks_per_node("2,3(x3)") == [2, 3, 3, 3]
    assert tasks_per_node("") == []


def test_run_locally_alone():
    met = []
    run_locally(lambda ranks, *rest: met.append((ranks, rest)), 1, "a", 2)
    assert met == [(Ranks(0, 1, 0, None, "single process"), ("a", 2))]


def machine(monkeypatch, gpus: int) -> list[int]:
    """Pretend a number of GPUs; returns the devices that get chosen."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_without_gpu(monkeypatch, name):
    machine(monkeypatch, 0)
    device = resolve_device(name, 3)
    assert (device.torch, device.backend, device.is_cpu) == (torch.device("cpu"), "gloo", True)
    assert device.peak_bytes() > 2**20
    device.synchronize()


def test_cuda_without_gpu(monkeypatch):
    machine(monkeypatch, 0)
    message = refused(resolve_device, "cuda", 0)
    assert "device = cuda" in message and "allowed here: cpu, auto" in message


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_with_gpus(monkeypatch, name):
    chosen = machine(monkeypatch, 2)
    device = resolve_device(name, 1)
    assert (device.torch, device.backend, device.is_cpu) == (torch.device("cuda", 1), "nccl", False)
    assert chosen == [1]
    message = refused(resolve_device, name, 2)
    assert "local rank 2" in message and "shows 2" in message and "one process per GPU" in message


def test_cpu_beside_a_gpu(monkeypatch):
    """megatron-core's CPU patches must never meet a GPU; the user is told how to hide it."""
    machine(monkeypatch, 1)
    message = refused(resolve_device, "cpu", 0)
    assert "device = cpu" in message and "CUDA_VISIBLE_DEVICES" in message
