"""Tensors in host memory: pinned, and copied on a stream of their own where the device is a GPU."""

from functools import lru_cache

import torch
from torch import Tensor

from megamem.errors import UserError
from megamem.platform.device import Device


def to_host(x: Tensor) -> Tensor:
    """A host copy. From a GPU it is pinned and made beside the computation; on a CPU it is a plain copy."""
    host = torch.empty_like(x, device="cpu", pin_memory=not x.is_cpu)
    if x.is_cpu:
        return host.copy_(x)
    side = _side_stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    x.record_stream(side)  # its memory is not given away before the copy is made
    return host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Back from the host; no copy where the device is the host. The computation waits for it."""
    if device.type == "cpu":
        return host
    side, current = _side_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):  # behind the copy to the host, if that still runs
        x = host.to(device, non_blocking=True)
    current.wait_stream(side)
    x.record_stream(current)
    return x


def check_pinned_memory(device: Device) -> None:
    """Raises:
    UserError: the device is a GPU, and this machine gives no pinned host memory.
    """
    if device.is_cpu:
        return
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        raise UserError(
            f"stream.offload = cpu needs pinned host memory, which cannot be had here ({error}); allowed: none"
        ) from None


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
