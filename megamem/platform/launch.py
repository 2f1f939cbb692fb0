"""Who am I among the processes? Asked once, before anything else starts.

A launcher is a row of `SOURCES`: how it tells a process its place, how its processes meet, and what would contradict a
launcher around it (torchrun inside a Slurm task, mpirun's daemons inside a Slurm step). The first row that recognises
the environment counts. Slurm and MPI with one process count as absent: what they started may be another launcher.
"""

import re
import socket
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from megamem.errors import UserError

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Ranks:
    """Place of this process in the job.

    Attributes:
        rank, world: global rank and number of processes.
        local_rank: index on this node.
        init_method: rendezvous for torch.distributed (`env://`, `tcp://…` or `file://…`); None for a single process,
            which meets itself through an in-memory store.
        source: the launcher that said so.
        job: fit for a file name; the same on every rank, and another one at every start as far as the launcher tells
            (torchrun on several nodes without RUN_ID: address and port only).
        local_world: processes on this node; None: not told.
        nodes: nodes of the job; None: not told.
    """

    rank: int
    world: int
    local_rank: int
    init_method: str | None
    source: str
    job: str = "local"
    local_world: int | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class Launcher:
    """One row of `SOURCES`.

    Attributes:
        find: this process's place, without a rendezvous yet; None if this launcher did not start it.
        meet: `init_method` for a place that was found.
        misfit: what is wrong, in words, with a place found here inside the place another launcher told; None: nothing.
    """

    find: Callable[[Environ], Ranks | None]
    meet: Callable[[Environ, Ranks], str]
    misfit: Callable[[Ranks, Ranks], str | None] = lambda inner, outer: None


def discover_ranks(environ: Environ) -> Ranks:
    """Rank, world size and rendezvous from the first launcher that recognises the environment.

    Call it once per process: under MPI it may start MPI, for a moment, to agree on an address.

    Raises:
        UserError: variables are incomplete or contradict each other, or the processes have no way to meet.
    """
    found = [(launcher, ranks) for launcher in SOURCES if (ranks := launcher.find(environ)) is not None]
    for (launcher, inner), (_, outer) in pairwise(found):
        if told := launcher.misfit(inner, outer):
            raise UserError(f"environment: {told}")
    if not found:
        return Ranks(0, 1, 0, None, "single process", local_world=1, nodes=1)
    launcher, ranks = found[0]
    where = launcher.meet(environ, ranks)
    return replace(ranks, init_method=where, job=ranks.job or _name(where))


def tells_mistakes(environ: Environ) -> bool:
    """Whether this process is the one that tells the user's mistakes; never fails, whatever the environment holds."""
    ranks = ("RANK", OPEN_MPI.rank, MPICH.rank, "SLURM_PROCID")
    return next((environ[name] == "0" for name in ranks if name in environ), True)


def hush_dependencies() -> None:
    """Keep the warnings of megatron-core and torch.distributed about themselves out of every process's output.

    They are about fallbacks that megamem reports where it matters, and about deprecations it does not cause.
    """
    for module in ("megatron", "torch.distributed", "torch.nn.utils"):
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=module)
    for message in ("The .grad attribute of a Tensor that is not a leaf", ".*deprecating ShardedTensor"):
        warnings.filterwarnings("ignore", message=message)


def _integer(environ: Environ, name: str, source: str) -> int:
    if name not in environ:
        raise UserError(f"environment: {name} is not set although other {source} variables are")
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(f"environment: {name} = {environ[name]!r} is not an integer") from None


def _optional(environ: Environ, name: str, source: str) -> int | None:
    return _integer(environ, name, source) if name in environ else None


def _place(environ: Environ, rank: str, world: str, source: str) -> tuple[int, int]:
    values = _integer(environ, rank, source), _integer(environ, world, source)
    if not 0 <= values[0] < values[1]:
        raise UserError(f"environment: {rank} = {values[0]} must be in 0 … {world} - 1 = {values[1] - 1}")
    return values


def _name(*parts: str) -> str:
    """A job's name from what tells it from others."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(parts))


def _many(count: int | None) -> bool:
    return count is not None and count > 1


# --- torchrun --------------------------------------------------------------------------------------------------------


def _torchrun(environ: Environ) -> Ranks | None:
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    rank, world = _place(environ, "RANK", "WORLD_SIZE", "torchrun")
    local_rank = _optional(environ, "LOCAL_RANK", "torchrun")
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    if run == "none":
        run = f"{environ.get('MASTER_ADDR')}-{environ.get('MASTER_PORT')}"
    return Ranks(
        rank,
        world,
        rank if local_rank is None else local_rank,
        None,
        "torchrun",
        _name("torchrun", run, environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        _optional(environ, "LOCAL_WORLD_SIZE", "torchrun"),
        _optional(environ, "GROUP_WORLD_SIZE", "torchrun"),
    )


def _meet_by_environment(environ: Environ, ranks: Ranks) -> str:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise UserError(f"environment: {name} is not set although RANK and WORLD_SIZE are")
    return "env://"


def _torchrun_misfit(inner: Ranks, outer: Ranks) -> str | None:
    """Every process of the launcher around must have started one node of the same torchrun job.

    Without GROUP_WORLD_SIZE, RANK and WORLD_SIZE were set by hand, from SLURM_PROCID for example: one for one.
    """
    started, world = _COUNTS[outer.source]
    if inner.nodes and _many(inner.local_world) and _many(outer.local_world):
        return (
            f"{outer.source} started {outer.local_world} processes on this node ({started}) and each of them "
            f"{inner.local_world} more (LOCAL_WORLD_SIZE): one per node with torchrun, or one per GPU without it"
        )
    if (inner.nodes or inner.world) != outer.world:
        return (
            f"{outer.source} started {outer.world} processes ({world}) but torchrun joins {inner.nodes or inner.world} "
            f"({'GROUP_WORLD_SIZE' if inner.nodes else 'WORLD_SIZE'}): separate jobs, or --nnodes is wrong"
        )
    return None


# --- Slurm -----------------------------------------------------------------------------------------------------------


def _slurm(environ: Environ) -> Ranks | None:
    # A batch shell has SLURM_PROCID = 0 and SLURM_NTASKS too; only what srun started is in a step.
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return None
    world_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, world = _place(environ, "SLURM_PROCID", world_name, "Slurm")
    if world == 1:
        return None
    local_rank, node, job, step = (
        _integer(environ, f"SLURM_{name}", "Slurm") for name in ("LOCALID", "NODEID", "JOB_ID", "STEP_ID")
    )
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Ranks(
        rank,
        world,
        local_rank,
        None,
        "Slurm",
        _name("slurm", str(job), str(step), environ.get("SLURM_RESTART_COUNT", "0")),
        counts[node] if node < len(counts) else None,
        len(counts) or None,
    )


def _meet_on_first_node(environ: Environ, ranks: Ranks) -> str:
    """Task 0 of a step runs on the first node of its list."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = environ.get("MASTER_ADDR") or first_host(nodes)
    if not address:
        raise UserError("environment: neither MASTER_ADDR nor SLURM_STEP_NODELIST is set although SLURM_PROCID is")
    # Steps of one job may run side by side.
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    return f"tcp://{address}:{environ.get('MASTER_PORT') or _port(job + 1009 * step)}"


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: `gpu[07-09,12],login` is `gpu07`."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]  # a comma inside brackets does not end a name
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def tasks_per_node(text: str) -> list[int]:
    """Slurm's short form, one number for each node: `8(x2),4` is `[8, 8, 4]`."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in counts for _ in range(int(times or 1))]


def _port(number: int) -> int:
    """A port of the job's own, below those that systems hand out to clients (32768 and up)."""
    return 15000 + number % 10000


# --- MPI -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MpiNames:
    """Variables of one MPI family; `mark` proves who set the others, `job`, where it exists, differs between starts."""

    source: str
    mark: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    job: str


_OMPI = "OMPI_COMM_WORLD_"
OPEN_MPI = MpiNames(
    "Open MPI", f"{_OMPI}SIZE", f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE",
    "PMIX_NAMESPACE",
)  # fmt: skip
# Intel MPI too. srun can set PMI_RANK and PMI_SIZE as well, but not the local rank.
MPICH = MpiNames("MPICH", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID")
PMI = MpiNames("PMI", "PMI_SIZE", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PMI_JOBID")


def _mpi(names: MpiNames, environ: Environ) -> Ranks | None:
    if names.mark not in environ:
        return None
    rank, world = _place(environ, names.rank, names.world, names.source)
    if world == 1:
        return None
    local_rank = _integer(environ, names.local_rank, names.source)
    local_world = _optional(environ, names.local_world, names.source)
    job = _name("mpi", environ[names.job]) if environ.get(names.job) else ""
    return Ranks(rank, world, local_rank, None, names.source, job, local_world, 1 if local_world == world else None)


def _pmi(environ: Environ) -> Ranks | None:
    # Inside a step they are srun's, and no sign of MPI.
    return None if "SLURM_STEP_ID" in environ or MPICH.mark in environ else _mpi(PMI, environ)


def _meet_by_broadcast(environ: Environ, ranks: Ranks) -> str:
    """MASTER_ADDR and MASTER_PORT; else mpi4py asks rank 0; else, on one node, a port that follows from the job."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    first_port = _port(zlib.crc32(ranks.job.encode()))
    if address and port:
        return f"tcp://{address}:{port}"
    try:
        found = ask_first_rank(ranks, first_port)
    except (ImportError, RuntimeError):  # RuntimeError: mpi4py is here, its MPI library is not
        if ranks.nodes != 1 or not ranks.job:
            raise UserError(
                f"environment: {ranks.world} processes under {ranks.source} have no way to meet: set MASTER_ADDR and "
                "MASTER_PORT for all of them, or pip install mpi4py"
            ) from None
        found = ("127.0.0.1", first_port)
    return f"tcp://{address or found[0]}:{port or found[1]}"


def ask_first_rank(ranks: Ranks, first_port: int) -> tuple[str, int]:
    """Host name and a free port of rank 0, the first from `first_port` on; a collective call over MPI.

    MPI is started and ended in here: it has no other use, and its presence would change signals and forks.

    Raises:
        ImportError, RuntimeError: no mpi4py, or no MPI library for it.
        UserError: mpi4py belongs to another MPI than the one that started the processes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about another MPI: told below, if it is one
        from mpi4py import MPI
    world = MPI.COMM_WORLD
    if world.size != ranks.world:
        library = MPI.Get_library_version().split(",")[0]
        raise UserError(
            f"environment: {ranks.source} started {ranks.world} processes, but mpi4py sees {world.size}: it belongs to "
            f"another MPI ({library}); set MASTER_ADDR and MASTER_PORT, or install mpi4py for this one"
        )
    mine = None
    if ranks.rank == 0:
        mine = ("127.0.0.1" if ranks.nodes == 1 else socket.gethostname(), _free_port(first_port))
    found = world.bcast(mine)
    MPI.Finalize()
    return found


def _free_port(first: int) -> int:
    for port in range(first, first + 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UserError(f"ports {first} to {first + 99} of {socket.gethostname()} are in use; set MASTER_PORT")


def _mpi_misfit(inner: Ranks, outer: Ranks) -> str | None:
    """Around mpirun's processes there may be its daemons, one Slurm task on every node."""
    if _many(outer.local_world) or inner.nodes == 1:
        started, world = _COUNTS[outer.source]
        return (
            f"{outer.source} started {outer.world} processes ({world}, {started}) and each of them an mpirun of "
            f"{inner.world} ({_COUNTS[inner.source][1]}); start mpirun once, without srun"
        )
    return None


# --- the table -------------------------------------------------------------------------------------------------------

# Where a source tells its processes on this node, and in all; named in messages.
_COUNTS = {
    "Slurm": ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
    **{names.source: (names.local_world, names.world) for names in (OPEN_MPI, MPICH, PMI)},
}

# The innermost first.
SOURCES: tuple[Launcher, ...] = (
    Launcher(_torchrun, _meet_by_environment, _torchrun_misfit),
    Launcher(partial(_mpi, OPEN_MPI), _meet_by_broadcast, _mpi_misfit),
    Launcher(partial(_mpi, MPICH), _meet_by_broadcast, _mpi_misfit),
    Launcher(_slurm, _meet_on_first_node),
    Launcher(_pmi, _meet_by_broadcast),
)
