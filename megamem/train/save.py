"""Writing one checkpoint, at once or in the background; the format is in `checkpoint.py`.

    begin_checkpoint   host copies of this rank's tensors, a forked process that writes them   (blocks training)
    Writing.advance    once all ranks' processes have ended: sizes, `megamem.json`, rename      (or: not yet)

The content is what training had when `begin_checkpoint` was called. On a GPU the copies to the host are made before it
returns; on a CPU the forked process has every page as it was at the fork, whatever training writes afterwards. Nothing
is kept between two saves (megatron-core's cached plans are off), so none can hold parts of an older one.

What only the first rank writes (common.pt, .metadata, metadata.json, megamem.json) must not raise inside a collective
call: the other ranks would wait for it. So each such failure is caught where it happens and told to all afterwards.
"""

import inspect
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from megamem.config.load import config_yaml
from megamem.config.schema import RunConfig
from megamem.errors import UserError
from megamem.platform.checkpoint_io import results_through_files
from megamem.platform.groups import Groups
from megamem.train.checkpoint import INFO_NAME, CheckpointInfo, copy_small_files, first_line, sharded_state

# From 0.17 on megatron-core has a second writer, which is another package and the default.
_CAN_CHOOSE = "async_strategy" in inspect.signature(TorchDistSaveShardedStrategy.async_save).parameters
_OWN_WRITER = {"async_strategy": "mcore"} if _CAN_CHOOSE else {}


def begin_checkpoint(
    folder: Path,
    info: CheckpointInfo,
    model: nn.Module,
    groups: Groups,
    hf_folder: Path,
    optimizer: Any = None,
    config: RunConfig | None = None,
) -> "Writing":
    """Start to write a checkpoint of the present state; a collective call. `advance` must follow until it is done.

    An existing `folder` is replaced only once the new one is complete.

    Raises:
        UserError: it could not be written (disk full, no permission); nothing but a temporary folder was touched.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    weights = temporary / "weights"
    problem = _attempt(lambda: _prepare(temporary, hf_folder, config)) if groups.is_main else None
    _raise_together(problem, temporary, groups)
    sharded, common = save_preprocess(
        sharded_state(model, optimizer, is_loading=False),
        # Optimizer facts live on some ranks only, by design; compared, they would give a warning at every save.
        preprocess_common_before_consistancy_check=lambda common: {k: v for k, v in common.items() if k != "optimizer"},
    )
    problem = _attempt(lambda: _write_common(common, weights)) if groups.is_main else None
    _raise_together(problem, temporary, groups)
    strategy, calls = _Strategy("torch_dist", 1), AsyncCallsQueue()

    def schedule() -> None:
        with results_through_files():
            calls.schedule_async_request(strategy.async_save(sharded, weights, **_OWN_WRITER))

    problem = _attempt(schedule)
    try:
        _raise_together(problem, temporary, groups)
    except UserError:
        calls.close(abort=True)
        raise
    return Writing(folder, temporary, info, groups, calls, strategy)


@dataclass
class Writing:
    """A checkpoint on its way. Every rank has one."""

    folder: Path
    temporary: Path
    info: CheckpointInfo
    groups: Groups
    calls: AsyncCallsQueue
    strategy: "_Strategy"

    def advance(self, wait: bool) -> bool:
        """Complete the checkpoint if all ranks have written their part; a collective call.

        Args:
            wait: until they have.

        Returns:
            Whether it is complete.

        Raises:
            UserError: it could not be written. It is given up then, on every rank.
        """
        done: list[int] = []
        problem = _attempt(lambda: done.extend(self.calls.maybe_finalize_async_calls(blocking=wait)))
        if problem is None and not done:
            return False
        _raise_together(problem or self.strategy.problem, self.temporary, self.groups)
        problem = _attempt(self._publish) if self.groups.is_main else None
        _raise_together(problem, self.temporary, self.groups)
        return True

    def _publish(self) -> None:
        files = sorted(path for path in self.temporary.rglob("*") if path.is_file())
        info = replace(self.info, files={str(p.relative_to(self.temporary)): p.stat().st_size for p in files})
        told = self.temporary / INFO_NAME
        told.write_text(json.dumps(asdict(info), indent=1), encoding="utf-8")
        for path in [*files, told, self.temporary]:
            flush_to_disk(path)
        old = self.folder.with_name(self.folder.name + ".old.tmp")
        if self.folder.exists():
            self.folder.rename(old)
        self.temporary.rename(self.folder)
        flush_to_disk(self.folder.parent)
        shutil.rmtree(old, ignore_errors=True)


class _Strategy(TorchDistSaveShardedStrategy):
    """megatron-core's, but where the first rank cannot write `.metadata` it goes on and keeps the reason.

    (megatron-core lets that rank raise while the others wait for its word whether all went well.)
    """

    problem: str | None = None

    def _get_save_and_finalize_callbacks(self, writer: Any, *others: Any) -> Any:
        finish = writer.finish

        def finish_or_keep_problem(*args: Any) -> None:
            self.problem = _attempt(lambda: finish(*args))

        writer.finish = finish_or_keep_problem
        return super()._get_save_and_finalize_callbacks(writer, *others)


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prepare(temporary: Path, hf_folder: Path, config: RunConfig | None) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "weights").mkdir(parents=True)
    copy_small_files(hf_folder, temporary / "hf")
    if config is not None:
        (temporary / "config.yaml").write_text(config_yaml(config), encoding="utf-8")


def _write_common(common: dict[str, Any], weights: Path) -> None:
    torch.save(common, weights / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(weights))


def _attempt(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except (Exception, CheckpointException) as error:  # megatron-core's writers wrap an OSError in their own kinds
        return first_line(error)
    return None


def _raise_together(problem: str | None, temporary: Path, groups: Groups) -> None:
    """Every rank fails if one does; the temporary folder goes."""
    problems: list[str | None] = [problem]
    if groups.world > 1:
        problems = [None] * groups.world
        dist.all_gather_object(problems, problem)
    told = next((p for p in problems if p), None)
    if told:
        if groups.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{temporary.with_suffix('')}: checkpoint could not be written; is the disk full? ({told})")
