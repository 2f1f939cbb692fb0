"""megatron-core's DistributedDataParallel and optimizer, and the learning-rate schedule as a pure function."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

from megamem.config.schema import OptimizerConfig, ParallelConfig
from megamem.platform.mcore_cpu import adds_weight_gradients

_NO_CLIP = 1e30  # megatron-core reports the gradient norm only where it clips


def wrap_for_training(
    model: nn.Module, parallel: ParallelConfig, before_reduction: Callable[[], None] = lambda: None
) -> DistributedDataParallel:
    """Gradient buffers in fp32 (in the parameters' dtype for fp64), summed over data-parallel ranks, never averaged.

    Args:
        before_reduction: called when this process's part of a gradient is complete, before it waits for others.
    """
    fp64 = model.config.params_dtype == torch.float64
    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=not fp64,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            use_distributed_optimizer=parallel.distributed_optimizer and not fp64,
        ),
        model,
    )
    if not fp64 and adds_weight_gradients():  # only now there are buffers to add to; megatron-core knows fp32 and below
        for module in model.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module.gradient_accumulation_fusion = True
    # Streamed and plain layers hand out their gradients in different orders. Buckets leave in that order, which has to
    # be one on all ranks, so with overlap no row may take the plain path.
    model.stream_short_rows = parallel.overlap_grad_reduce
    model.config.no_sync_func = ddp.no_sync

    def finalize(model: Sequence[nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
        """Finalize without a token count: objectives/reduction.py has divided already."""
        before_reduction()
        finalize_model_grads(list(model), None, **kwargs)

    model.config.finalize_model_grads_func = finalize
    return ddp


def gradients_finite(ddp: DistributedDataParallel) -> bool:
    """Whether every gradient this process holds is a number; no copy is made."""
    largest = [torch.linalg.vector_norm(buffer.grad_data, torch.inf) for buffer in ddp.buffers]
    return all(bool(torch.isfinite(x)) for x in largest)


def build_optimizer(ddp: DistributedDataParallel, config: OptimizerConfig, parallel: ParallelConfig):
    """megatron-core's mixed-precision Adam over the wrapped model; weight decay spares norms and biases."""
    dtype = ddp.config.params_dtype
    optimizer = get_megatron_optimizer(
        CoreOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad or _NO_CLIP,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=parallel.distributed_optimizer,
        ),
        [ddp],
    )
    # megatron-core leaves applying its `wd_mult` (0 for norms and biases) to its training loop's scheduler.
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
    return optimizer


def learning_rate(config: OptimizerConfig, update: int, total: int) -> float:
    """Learning rate of optimizer step `update` (from 0) of `total`: linear warm-up from 0, then decay to `min_lr`."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    progress = (update - config.warmup_steps) / max(1, total - config.warmup_steps)
    left = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[config.decay]
    return config.min_lr + (config.lr - config.min_lr) * left


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Apply a rate to every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
