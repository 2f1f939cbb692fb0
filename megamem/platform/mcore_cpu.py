"""megatron-core on a machine without CUDA.

What megatron-core assumes of CUDA falls into five kinds (DESIGN section 2); each symbol below has one function here.
Every patch is idempotent, keeps the original under `__wrapped__` where there is one, and is refused where a GPU is
present, so that no GPU run ever sees them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _names_cuda(device: Any) -> bool:
    return isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")


class _CudaMeansCpu(TorchFunctionMode):
    """Kind 1: `device="cuda"` arguments, `.cuda()`, and `tensor.type()` compared with "torch.cuda.…" strings."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


# Kind 2: questions to the CUDA runtime.
def _current_device(original: Callable) -> Callable:
    return lambda: _CPU


def _no_operation(original: Callable) -> Callable:
    return lambda *args, **kwargs: None


# Kind 3: CUDA's random state. The tracker gets a generator of its own: megatron-core checks that forking it leaves the
# default CPU generator untouched.
_TRACKER_GENERATOR = torch.Generator()


def _manual_seed(original: Callable) -> Callable:
    return lambda seed: _TRACKER_GENERATOR.manual_seed(int(seed)) and None


def _get_rng_state(original: Callable) -> Callable:
    return lambda *args, **kwargs: _TRACKER_GENERATOR.get_state()


def _set_rng_state(original: Callable) -> Callable:
    return lambda new_state, *args, **kwargs: _TRACKER_GENERATOR.set_state(new_state) and None


# Kind 4: torch's AdamW keeps a "step" that the fully reshardable optimizer state does not carry per parameter.
def _supply_adam_step(original: Callable) -> Callable:
    @wraps(original)
    def set_states(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return original(self, model_param, tensors)

    return set_states


# Kind 5: apex's kernel that adds a weight gradient to its buffer.
class _WeightGradients:
    """`fused_weight_gradient_mlp_cuda` for the CPU: `total += dy^T x` without a temporary, where dtypes agree."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x_TI: torch.Tensor, dy_TO: torch.Tensor, total_OI: torch.Tensor) -> None:
        if total_OI.dtype == dy_TO.dtype:
            total_OI.addmm_(dy_TO.t(), x_TI)
        else:
            total_OI.add_(dy_TO.t() @ x_TI)


def _patch(owner: Any, name: str, factory: Callable[[Callable], Callable]) -> None:
    original = getattr(owner, name)
    if getattr(original, "_megamem", False):
        return
    replacement = factory(original)
    replacement._megamem = True
    replacement.__wrapped__ = original
    setattr(owner, name, replacement)


_MODE: list[_CudaMeansCpu] = []


def install() -> None:
    """Make megatron-core run on CPU tensors and gloo in this process. Call again at will."""
    assert not torch.cuda.is_available(), "the CPU patches must never meet a GPU"
    for name, factory in (
        ("current_device", _current_device),
        ("synchronize", _no_operation),
        ("empty_cache", _no_operation),
        ("manual_seed", _manual_seed),
        ("get_rng_state", _get_rng_state),
        ("set_rng_state", _set_rng_state),
    ):
        _patch(torch.cuda, name, factory)
    from megatron.core.tensor_parallel import layers as mcore_layers
    from megatron.core.tensor_parallel import random as mcore_random

    mcore_layers.fused_weight_gradient_mlp_cuda = _WeightGradients
    mcore_layers._grad_accum_fusion_available = True
    _patch(mcore_random, "_get_cuda_rng_state", _get_rng_state)
    _patch(mcore_random, "_set_cuda_rng_state", _set_rng_state)
    patch_adam_step()
    if not _MODE:
        _MODE.append(_CudaMeansCpu())
        _MODE[0].__enter__()


def adds_weight_gradients() -> bool:
    """Whether linear layers can add their weight gradient to its buffer (on a GPU: with apex's extension)."""
    from megatron.core.tensor_parallel import layers

    return getattr(layers, "_grad_accum_fusion_available", False)


def patch_adam_step() -> None:
    """Needed wherever torch's AdamW is the optimizer, on a GPU too (no Transformer Engine, no apex)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    _patch(DistributedOptimizer, "_set_main_param_and_optimizer_states", _supply_adam_step)
