"""What this machine offers to a process. Facts only; `train/doctor.py` judges them."""

import errno
import importlib
import os
import socket
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

# The variable that makes kernels start in the order in which they were queued, so that communication starts first.
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# Packages with kernels for GPUs -> the module that megatron-core imports, in the order in which it tries them.
_KERNELS = {"Transformer Engine": "transformer_engine.pytorch.optimizers", "apex": "apex.optimizers"}


@dataclass(frozen=True)
class Machine:
    """One node, seen by one process.

    Attributes:
        host: its name.
        gpus: GPUs that the process sees.
        gpu: the name of its own; "" without one.
        capability: compute capability of its own GPU, (major, minor).
        has_flash: whether torch was built with flash attention for GPUs.
        kernels: each package with fused kernels -> "" where it can be used, None where it is not installed, otherwise
            why it cannot be imported. Empty without a GPU, where nothing asks for them.
    """

    host: str
    gpus: int = 0
    gpu: str = ""
    capability: tuple[int, int] = (0, 0)
    has_flash: bool = False
    kernels: dict[str, str | None] = field(default_factory=dict)


def this_machine(local_rank: int) -> Machine:
    """Look at this node. On a machine with GPUs it imports the packages with kernels, as megatron-core will."""
    host, gpus = socket.gethostname(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return Machine(host)
    own = min(local_rank, gpus - 1)
    return Machine(
        host,
        gpus,
        torch.cuda.get_device_name(own),
        torch.cuda.get_device_capability(own),
        torch.backends.cuda.is_flash_attention_available(),
        {name: _import_problem(module) for name, module in _KERNELS.items()},
    )


def _import_problem(module: str) -> str | None:
    """ "" if it imports, None if its package is not installed, else the first line of the error."""
    if find_spec(module.split(".")[0]) is None:
        return None
    try:
        importlib.import_module(module)
    except Exception as error:  # a package built for another torch raises OSError, AttributeError, …
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def listen_problem(port: int) -> str:
    """Why a process on this machine cannot listen on a TCP port; "" if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch's store does: a connection that was closed a moment ago does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OverflowError:
            return "not a port"
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno)
    return ""
