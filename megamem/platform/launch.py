"""Who am I among the processes? Asked once, before anything else starts.

One function per launcher, tried in order; a launcher that did not start this process answers None. Slurm and MPI are
two more functions in `SOURCES`.
"""

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamem.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """Place of this process in the job.

    Attributes:
        rank, world: global rank and number of processes.
        local_rank: index on this node.
        init_method: rendezvous for torch.distributed (`env://`, `tcp://…` or `file://…`); None for a single process,
            which meets itself through an in-memory store.
        source: the launcher that said so.
    """

    rank: int
    world: int
    local_rank: int
    init_method: str | None
    source: str


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except KeyError:
        raise UserError(f"environment: {name} is not set although other torchrun variables are") from None
    except ValueError:
        raise UserError(f"environment: {name} = {environ[name]!r} is not an integer") from None


def _torchrun(environ: Mapping[str, str]) -> Ranks | None:
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    rank, world = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    local_rank = _integer(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    if not 0 <= rank < world:
        raise UserError(f"environment: RANK = {rank} must be in 0 … WORLD_SIZE - 1 = {world - 1}")
    return Ranks(rank, world, local_rank, "env://", "torchrun")


def _single_process(environ: Mapping[str, str]) -> Ranks:
    return Ranks(0, 1, 0, None, "single process")


SOURCES: tuple[Callable[[Mapping[str, str]], Ranks | None], ...] = (_torchrun, _single_process)


def hush_dependencies() -> None:
    """Keep the warnings of megatron-core and torch.distributed about themselves out of every process's output.

    They are about fallbacks that megamem reports where it matters, and about deprecations it does not cause.
    """
    for module in ("megatron", "torch.distributed", "torch.nn.utils"):
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=module)
    for message in ("The .grad attribute of a Tensor that is not a leaf", ".*deprecating ShardedTensor"):
        warnings.filterwarnings("ignore", message=message)


def discover_ranks(environ: Mapping[str, str]) -> Ranks:
    """Rank, world size and rendezvous from the first launcher that recognises the environment.

    Raises:
        UserError: variables are incomplete or contradict each other.
    """
    return next(ranks for source in SOURCES if (ranks := source(environ)) is not None)


def run_locally(job: Callable[..., Any], world: int, *args: Any) -> None:
    """Run `job(ranks, *args)` as one process, or as `world` new processes on this machine that meet through a file.

    For commands that are not started under a launcher. `job` must be importable (it is pickled).

    Raises:
        UserError: what a process raised as such; the others are ended.
        RuntimeError: a process failed otherwise; its traceback has been printed.
    """
    if world == 1:
        job(Ranks(0, 1, 0, None, "single process"), *args)
        return
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix="megamem_") as folder:
        context = mp.spawn(_local_rank, (world, folder, job, args), nprocs=world, join=False)
        try:
            while not context.join():
                pass
        except mp.ProcessRaisedException as error:
            told = Path(folder) / "user_error"
            if told.exists():
                raise UserError(told.read_text(encoding="utf-8")) from None
            raise RuntimeError(str(error)) from None


def _local_rank(rank: int, world: int, folder: str, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    hush_dependencies()
    ranks = Ranks(rank, world, rank, f"file://{folder}/rendezvous", "local")
    try:
        job(ranks, *args)
    except UserError as error:
        (Path(folder) / "user_error").write_text(str(error), encoding="utf-8")
        raise
