"""When memory ends: what the user is told, and what is kept to look at."""

import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megamem.config.load import load_config
from megamem.config.schema import RunConfig
from megamem.errors import RankError, UserError
from megamem.platform.groups import Groups
from megamem.platform.memory import is_out_of_memory, record_allocations, write_allocations
from megamem.train.phases import Phases

_LONGEST = 240  # characters of the original error; CUDA's goes on with advice of its own


@contextmanager
def memory_watched(config: RunConfig, groups: Groups, phases: Phases) -> Iterator[None]:
    """Inside, an error that says that memory ended is told by its phase, with the settings that lower it.

    With `observe.memory_snapshot` the allocator's history is kept, and written to `out/memory_rank_N.pickle`.

    Raises:
        RankError: memory ended.
    """
    if config.observe.memory_snapshot:
        record_allocations(groups.device)
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        told = _told(error, config, groups, phases.what)
        if config.observe.memory_snapshot:
            told += _written(Path(config.out) / f"memory_rank_{groups.world_rank}.pickle", groups)
        raise RankError(told) from error


def _told(error: Exception, config: RunConfig, groups: Groups, what: str) -> str:
    """Two lines: what ended where, and what lowers it."""
    first = (str(error).splitlines() or [""])[0][:_LONGEST] or type(error).__name__
    planned = _planned(Path(config.out))
    peak = f"a peak of {groups.device.peak_bytes() / 2**30:.2f} GiB so far"
    peak += "" if planned is None else f", {planned:.2f} GiB planned for an update of full rows"
    *settings, last = _lower(what, config)
    return (
        f"rank {groups.world_rank} ({socket.gethostname()}): out of memory in {what}{_place(error)}; {peak}: {first}\n"
        f"It takes less with {', '.join(settings)} or {last}."
    )


def _lower(what: str, config: RunConfig) -> list[str]:
    """Settings that lower what a phase takes, with their values."""
    s, parallel = config.stream, config.parallel
    chunks = f"a smaller stream.chunk_tokens ({s.chunk_tokens})" if s.layers else "stream.layers=true"
    rows = f"a smaller train.row_tokens ({config.train.row_tokens})"
    sampled = f"a smaller rollout.row_tokens ({config.rollout.row_tokens})"
    stages = f"a larger parallel.pipeline ({parallel.pipeline})"
    tensor = f"a larger parallel.tensor ({parallel.tensor})"
    by_phase = {
        "rollout": [sampled, tensor],
        "evaluate": [sampled, tensor],
        "old_logprobs": [chunks, rows, tensor],
        "update": [chunks, rows, tensor],
    }
    return by_phase.get(what.removeprefix("after "), [stages, tensor])


def _place(error: Exception) -> str:
    """The innermost line of megamem that was at work."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if "megamem" in Path(f.filename).parts]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


def _planned(out: Path) -> float | None:
    """The planner's prediction for this run, in GiB, as soon as the main process knows it."""
    try:
        found = load_config(out / "config.yaml").planned
    except UserError:
        return None
    return None if found is None else found.peak_gib


def _written(path: Path, groups: Groups) -> str:
    try:
        return f" The allocator's history: {path}" if write_allocations(groups.device, path) else ""
    except OSError as error:
        return f" The allocator's history could not be written ({error.strerror})."
