"""A Slurm cluster of one's own on this machine, for as long as a test file runs: controller, nodes and authentication.

Everything lives in one folder and listens on ports of its own, so it meets no other Slurm. Needs root and Debian's
packages slurm-wlm and munge.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

DAEMONS = ("munged", "slurmctld", "slurmd")
_CONFIGURATION = """\
ClusterName=megamem
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
# A job that is queued again waits until the credentials of its last start have expired: two minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=2000
PartitionName=all Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here; None if it can."""
    absent = [name for name in DAEMONS if not _find(name)]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


@contextmanager
def cluster(folder: Path, nodes: int = 2) -> Iterator[dict[str, str]]:
    """Start it; the environment in which sbatch and its like find it. Ends every job and daemon on exit.

    Raises:
        RuntimeError: the nodes did not come up; with the logs' ends.
    """
    (folder / "state").mkdir(parents=True)
    for node in range(1, nodes + 1):
        (folder / f"spool_n{node}").mkdir()
    ports = _free_ports(nodes + 1)
    configuration = folder / "slurm.conf"
    values = {"folder": folder, "host": socket.gethostname().split(".")[0], "nodes": nodes}
    configuration.write_text(_CONFIGURATION.format(**values, port=ports[0], first=ports[1], last=ports[-1]))
    environ = {**os.environ, "SLURM_CONF": str(configuration)}
    try:
        _start_munge(folder)
        _run("slurmctld", environ=environ)
        for node in range(1, nodes + 1):
            _run("slurmd", "-N", f"n{node}", environ=environ)
        _wait_until_idle(folder, nodes, environ)
        yield environ
    finally:
        _end(folder, environ)


def _end(folder: Path, environ: dict[str, str]) -> None:
    daemons = []
    for file in [*folder.glob("slurmd_*.pid"), folder / "slurmctld.pid", folder / "munge.pid"]:
        if file.exists() and psutil.pid_exists(number := int(file.read_text())):
            daemons.append(psutil.Process(number))
    jobs = psutil.process_iter(["name", "environ"])  # slurmstepd, what it started, and what left its sight
    own = [p for p in jobs if (p.info["environ"] or {}).get("SLURM_CONF") == environ["SLURM_CONF"]]
    own = [p for p in own if p not in daemons and p.pid != os.getpid()]
    for processes, seconds in ((own, 0), (daemons, 10)):
        for process in processes:
            _signal(process, signal.SIGTERM if seconds else signal.SIGKILL)
        _, left = psutil.wait_procs(processes, timeout=seconds or 5)
        for process in left:
            _signal(process, signal.SIGKILL)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


def _start_munge(folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    files["seed-file"] = "munge.seed"
    # --force: it warns of folders that others can write to, such as the one above this.
    _run("munged", "--force", *(f"--{option}={folder / name}" for option, name in files.items()))


def _wait_until_idle(folder: Path, nodes: int, environ: dict[str, str]) -> None:
    command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    for _ in range(60):
        found = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if found.stdout.strip() == str(nodes):
            return
        time.sleep(0.5)
    logs = "\n".join(f"{path.name}: {path.read_text()[-800:]}" for path in sorted(folder.glob("*.log")))
    raise RuntimeError(f"no {nodes} idle nodes after 30 s\n{found.stdout}{found.stderr}\n{logs}")


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _run(name: str, *arguments: str, environ: dict[str, str] | None = None) -> None:
    done = subprocess.run([_find(name), *arguments], env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stdout}{done.stderr}")


def _free_ports(count: int) -> list[int]:
    """Neighbouring ports that nobody listens on."""
    for first in range(16000, 20000, count):
        ports = list(range(first, first + count))
        if all(_is_free(port) for port in ports):
            return ports
    raise RuntimeError("no free ports between 16000 and 20000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
