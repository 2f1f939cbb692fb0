"""The one place that names "cpu", "cuda", "gloo" and "nccl"."""

import time
from dataclasses import dataclass
from typing import Literal

import torch

from megamem.errors import RankError, UserError
from megamem.platform import peaks

DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Device:
    """Where tensors live and which collective backend moves them.

    Attributes:
        torch: the device of every parameter and activation of this process.
        backend: the torch.distributed backend that serves it.
    """

    torch: torch.device
    backend: str

    @property
    def is_cpu(self) -> bool:
        return self.torch.type == "cpu"

    def synchronize(self) -> None:
        """Wait for queued work, so that a wall clock means something."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.torch)

    def time(self) -> float:
        """Wall clock, in seconds, once queued work is done."""
        self.synchronize()
        return time.time()

    def peak_bytes(self) -> int:
        """Largest memory of this process so far: allocator peak on CUDA, resident set on CPU (bytes)."""
        if not self.is_cpu:
            return torch.cuda.max_memory_allocated(self.torch)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak_tflops(self, dtype: torch.dtype) -> float | None:
        """What matrix products of this dtype can reach here, dense; None where it is not known, as on a CPU."""
        if self.is_cpu:
            return None
        tf32 = torch.get_float32_matmul_precision() != "highest"
        return peaks.peak_tflops(torch.cuda.get_device_name(self.torch), dtype, tf32)


def resolve_device(name: DeviceName, local_rank: int) -> Device:
    """Pick the device of this process.

    Args:
        name: `auto` takes CUDA when a GPU is there.
        local_rank: index of this process on its node, and so of its GPU.

    Raises:
        UserError: CUDA was asked for and is absent, or the CPU was asked for beside a visible GPU.
        RankError: there are more processes on the node than GPUs.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cpu" and has_cuda:  # megatron-core's CPU patches must never meet a GPU
        raise UserError("device = cpu, but a GPU is visible; hide it (CUDA_VISIBLE_DEVICES=''), or use auto or cuda")
    if name == "cpu" or (name == "auto" and not has_cuda):
        return Device(torch.device("cpu"), "gloo")
    if not has_cuda:
        raise UserError("device = cuda, but torch sees no GPU; allowed here: cpu, auto")
    if local_rank >= torch.cuda.device_count():
        raise RankError(
            f"local rank {local_rank} has no GPU: this node shows {torch.cuda.device_count()}; "
            "start at most one process per GPU, or hide the GPUs (CUDA_VISIBLE_DEVICES='')"
        )
    torch.cuda.set_device(local_rank)
    return Device(torch.device("cuda", local_rank), "nccl")
