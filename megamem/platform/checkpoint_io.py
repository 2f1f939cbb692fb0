"""How megatron-core and torch write and read checkpoint files, where megamem does not take it as it is.

Writing: forked writers hand their results back through a manager, a second interpreter that every rank starts at its
first save (4 s, 270 MB) and that stays for good where the rank is killed. Here they go through a file without a name.

Reading: `.metadata` is a pickle, and so are objects between the tensors; torch loads both without asking. A pickle
calls whatever it names, so a checkpoint from elsewhere could run anything. Inside `restricted_reading` it can name only
what checkpoints consist of. Tensors are safe by themselves: torch reads them with `weights_only`.
"""

import io
import logging
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from torch.distributed.checkpoint import DefaultLoadPlanner, filesystem

_Writer = filesystem_async.FileSystemWriterAsync

# All that a `.metadata` of tensors and objects names, beside torch's dtypes: plain data classes and enumerations.
_METADATA = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}
# What objects between the tensors may hold beside numbers, text, containers and tensors (Transformer Engine's state).
_OBJECTS = [io.BytesIO]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint holds")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Any:
    """Torch's description of a distributed checkpoint, from its file `.metadata`.

    Raises:
        pickle.UnpicklingError: it names something else than checkpoints consist of. (A damaged file raises anything.)
        OSError: it cannot be read.
    """
    with open(path, "rb") as handle:
        return _MetadataUnpickler(handle).load()


class CommonReader(TorchCommonLoadStrategy):
    """megatron-core's reader of `common.pt`, whatever the default of `weights_only` is."""

    def load_common(self, checkpoint_dir: Any) -> Any:
        return torch.load(Path(checkpoint_dir) / COMMON_STATE_FNAME, map_location="cpu", weights_only=True)


def _checked_load_bytes(original: Callable[..., None]) -> Callable[..., None]:
    """`DefaultLoadPlanner.load_bytes`, once the bytes have been read with `weights_only`."""

    def load_bytes(self: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
        with torch.serialization.safe_globals(_OBJECTS):
            torch.load(value, weights_only=True)
        value.seek(0)
        original(self, read_item, value)

    return load_bytes


def _restricted_pickle(original: Any) -> Any:
    """The name `pickle` in torch's reader, which has one use of it there: to load `.metadata`."""
    return SimpleNamespace(load=lambda handle: _MetadataUnpickler(handle).load())


@contextmanager
def restricted_reading() -> Iterator[None]:
    """Inside, torch's checkpoint reader unpickles nothing but what checkpoints consist of; everything else raises."""
    with _replaced(filesystem, "pickle", _restricted_pickle):
        with _replaced(DefaultLoadPlanner, "load_bytes", _checked_load_bytes):
            yield


@contextmanager
def results_through_files() -> Iterator[None]:
    """Inside, a rank's writer that is prepared and forked does all the work itself and hands its results back through a
    `ResultsFile`.

    It logs no error by itself: it is among the results.
    """
    level = filesystem_async.logger.level
    filesystem_async.logger.setLevel(logging.CRITICAL)
    try:
        with _replaced(filesystem_async, "_get_write_results_queue", lambda original: ResultsFile):
            with _replaced(
                filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multiproc", _write_in_one_process
            ):
                yield
    finally:
        filesystem_async.logger.setLevel(level)


def _write_in_one_process(original: Callable[..., None]) -> Any:
    """`write_preloaded_data_multiproc` without children: it would wait for one that was killed for good."""

    def write(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: ResultsFile) -> None:
        written: list[tuple[int, Any]] = []
        collect = SimpleNamespace(put=written.append)
        count = SimpleNamespace(get=lambda: None, task_done=lambda: None)
        for index, bucket in enumerate(buckets):
            filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, index, bucket, collect, count, use_fsync=True
            )
        failed = next((found for _, found in written if isinstance(found, Exception)), None)
        results.put(failed or dict(written))

    return staticmethod(write)


@contextmanager
def _replaced(owner: Any, name: str, factory: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, factory(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


class ResultsFile:
    """The two calls that megatron-core makes on a queue of write results: put by a forked writer, got after its end."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # a forked process has the same open file

    def put(self, results: Any) -> None:
        pickle.dump(results, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        self._file.seek(0)
        try:
            return pickle.load(self._file)  # written by this very process's child into a file without a name
        except EOFError:
            return RuntimeError("the process that writes it was killed")
