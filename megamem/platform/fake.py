"""A rank without its machine: fake tensors (shapes, no data) and a fake process group (no communication).

Any rank of any process grid runs here in one process, on any model, in the memory of its Python objects. What follows
from values (`.item()`) cannot run.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megamem.platform.device import Device, resolve_device
from megamem.platform.groups import Groups, process_groups
from megamem.platform.launch import Ranks


@contextmanager
def fake_groups(stage: int, tensor: int, pipeline: int) -> Iterator[Groups]:
    """The process grid as the first process of a pipeline stage sees it, without data parallelism.

    Args:
        stage: pipeline stage, 0 … pipeline - 1.
        tensor, pipeline: degrees.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    device = Device(resolve_device("auto", 0).torch, "fake")
    ranks = Ranks(stage * tensor, tensor * pipeline, 0, None, "fake")
    with process_groups(ranks, device, tensor, pipeline) as groups:
        yield groups


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside have a shape, a dtype and a storage of the right size, but no data."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with ExitStack() as stack:
        # Both ask for values: a check that random states are untouched, and an exchange of parameters in place.
        stack.enter_context(_replaced(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()))
        stack.enter_context(_replaced(nn.Module, "_apply", _apply))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` for fake parameters, which cannot be changed in place."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            moved = function(parameter)
        if moved is not parameter:
            fresh = nn.Parameter(moved, parameter.requires_grad)
            fresh.__dict__.update(parameter.__dict__)
            module._parameters[name] = fresh
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
