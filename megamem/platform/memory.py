"""Bytes of live tensor storages: what a step allocates, on any device, whatever the allocator keeps. And its end."""

import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megamem.platform.device import Device

_HISTORY = 200_000  # allocations and releases that are remembered
# What libraries say that do not raise torch's own error: torch on a CPU, the CUDA runtime and NCCL, cuBLAS.
_EXHAUSTED = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class LiveStorages(TorchDispatchMode):
    """Tracks tensor storages that are born while it is active.

    Attributes:
        bytes, peak: of all of them, now and at most.
        largest: of a single one.
        device_bytes, device_peak, host_bytes: without those declared to be host memory by `mark_host`, now and at most;
            and of those alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = self.device_peak = self.largest = self.host_bytes = 0
        self._sizes: dict[int, int] = {}

    @property
    def device_bytes(self) -> int:
        return self.bytes - self.host_bytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        unseen = [s for s in _storages(result) if s._cdata not in self._sizes]
        if unseen:
            inputs = {s._cdata for s in _storages((args, kwargs))}
            for storage in unseen:
                if storage._cdata not in inputs:  # else a view of something older than this mode
                    self._see(storage)
        return result

    def mark_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count this tensor as host memory; returns it. For offloading on a machine whose device is the host."""
        key = tensor.untyped_storage()._cdata
        size = self._sizes.get(key, 0)
        self.host_bytes += size
        weakref.finalize(tensor.untyped_storage(), self._host_gone, size)
        return tensor

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            return
        self._sizes[key] = size
        self.bytes += size
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, self.bytes)
        self.device_peak = max(self.device_peak, self.device_bytes)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._sizes.pop(key, None)
        self.bytes -= size

    def _host_gone(self, size: int) -> None:
        self.host_bytes -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ended, of the device or of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _EXHAUSTED)


def record_allocations(device: Device) -> None:
    """Remember where memory was taken and given back; a CPU's allocator cannot."""
    if not device.is_cpu:
        torch.cuda.memory._record_memory_history(max_entries=_HISTORY)


def write_allocations(device: Device, path: Path) -> bool:
    """Write what is remembered, for https://pytorch.org/memory_viz; whether there was anything to write."""
    if device.is_cpu:
        return False
    torch.cuda.memory._dump_snapshot(str(path))
    return True
