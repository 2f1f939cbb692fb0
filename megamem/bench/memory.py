"""Bytes of live tensor storages: what a step allocates, on any device, whatever the allocator keeps."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Tracks tensor storages that are born while it is active.

    Attributes:
        bytes, peak: of all of them, now and at most.
        largest: of a single one.
        device_peak: at most, without those declared to be host memory by `mark_host`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = self.device_peak = self.largest = 0
        self._host_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage(), inputs)
        return result

    def mark_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count this tensor as host memory; returns it. For offloading on a machine whose device is the host."""
        key = tensor.untyped_storage()._cdata
        size = self._sizes.get(key, 0)
        self._host_bytes += size
        weakref.finalize(tensor.untyped_storage(), self._host_gone, size)
        return tensor

    def _see(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or key in inputs:  # a view: of something seen, or of something older than this mode
            return
        self._sizes[key] = size
        self.bytes += size
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, self.bytes)
        self.device_peak = max(self.device_peak, self.bytes - self._host_bytes)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._sizes.pop(key, None)
        self.bytes -= size

    def _host_gone(self, size: int) -> None:
        self._host_bytes -= size
