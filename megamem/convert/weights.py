"""Weights in and out of a model that is spread over tensor- and pipeline-parallel ranks.

Beside the model's own shard, no rank holds more than one tensor group (one map's tensors) at a time.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamem.config.architecture import Architecture
from megamem.convert.maps import TensorMap
from megamem.convert.source import WeightSource, check_coverage
from megamem.platform.groups import Groups


def stage_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of this stage by megatron-core name, with layers counted over the whole model."""
    offset = {f"decoder.layers.{i}.": layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    named = {}
    for name, parameter in model.named_parameters():
        for local, layer in offset.items():
            if name.startswith(local):
                name = f"decoder.layers.{layer}.{name.removeprefix(local)}"
                break
        named[name] = parameter
    return named


@torch.no_grad()
def load_weights(
    model: nn.Module, maps: Sequence[TensorMap], arch: Architecture, source: WeightSource, groups: Groups
) -> None:
    """Fill this rank's parameters from `source` (cast to the parameters' dtype).

    Raises:
        UserError: the source does not hold exactly the model's tensors; nothing has been changed then.
    """
    check_coverage(maps, arch, source)
    parameters = stage_parameters(model)
    for entry in maps:
        parameter = parameters.pop(entry.core, None)
        if parameter is not None:
            shard = entry.split([source.read(n) for n in entry.hf], arch, groups.tp.rank, groups.tp.size)
            parameter.copy_(shard)
    assert not parameters, f"no map fills {sorted(parameters)}"


@torch.no_grad()
def export_weights(
    model: nn.Module,
    maps: Sequence[TensorMap],
    arch: Architecture,
    groups: Groups,
    write: Callable[[str, Tensor], None] | None,
) -> None:
    """Hand every Hugging Face tensor to `write` on the main process, in map order; a collective call.

    Args:
        write: given on the main process, None elsewhere. A tied head is written once, as the embedding.
    """
    parameters = stage_parameters(model)
    done: set[str] = set()
    for entry in maps:
        if set(entry.hf) <= done:
            continue
        done.update(entry.hf)
        shards = _gather_to_main(parameters.get(entry.core), groups)
        if write is not None:
            for name, tensor in zip(entry.hf, entry.join(shards, arch), strict=True):
                write(name, tensor)


def _gather_to_main(parameter: nn.Parameter | None, groups: Groups) -> list[Tensor]:
    """All tensor-parallel shards of a parameter on the main process (an empty list elsewhere).

    The stage that holds it gathers over its tensor-parallel group; if that is not the main process' own stage, the
    first rank of the group sends the shards on. Only the first data-parallel replica takes part.
    """
    owner = torch.tensor([groups.pp.rank if parameter is not None else -1], device=groups.device.torch)
    if groups.pp.size > 1:
        dist.all_reduce(owner, op=dist.ReduceOp.MAX, group=groups.pp.group)
    shards: list[Tensor] = []
    if parameter is not None and groups.pp.rank == owner.item():
        shards = [torch.empty_like(parameter) for _ in range(groups.tp.size)]
        dist.all_gather(shards, parameter.detach().contiguous(), group=groups.tp.group)
    if owner.item() == 0 or groups.dp.rank or groups.tp.rank:
        return shards if groups.is_main else []
    return _send_to_first_stage(shards, int(owner.item()), groups)


def _send_to_first_stage(shards: list[Tensor], owner: int, groups: Groups) -> list[Tensor]:
    """Point to point along the pipeline of the first tensor-parallel rank; shapes travel first."""
    first, source = (dist.get_global_rank(groups.pp.group, i) for i in (0, owner))
    if groups.pp.rank == owner:
        dist.send_object_list([[(s.shape, s.dtype) for s in shards]], first, group=groups.pp.group)
        for shard in shards:
            dist.send(shard, first, group=groups.pp.group)
    elif groups.pp.rank == 0:
        box: list = [None]
        dist.recv_object_list(box, source, group=groups.pp.group)
        received = [torch.empty(shape, dtype=dtype, device=groups.device.torch) for shape, dtype in box[0]]
        for shard in received:
            dist.recv(shard, source, group=groups.pp.group)
        return received
    return []
