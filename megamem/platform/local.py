"""A job on this machine, for commands that are not started under a launcher."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megamem.errors import UserError
from megamem.platform.launch import Ranks, hush_dependencies


def run_locally(job: Callable[..., Any], world: int, *args: Any) -> None:
    """Run `job(ranks, *args)` as one process, or as `world` new processes on this machine that meet through a file.

    `job` must be importable (it is pickled).

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
