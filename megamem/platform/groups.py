"""Process groups from degrees. The only reader of megatron-core's `parallel_state`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.errors import UserError
from megamem.platform import mcore_cpu
from megamem.platform.device import Device
from megamem.platform.launch import Ranks


@dataclass(frozen=True)
class Axis:
    """One parallel axis seen from this process."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class Groups:
    """The process grid seen from this process.

    Attributes:
        tp, pp, dp: tensor, pipeline and data axis.
        mp: tensor x pipeline: the processes that hold one replica of the model and see the same samples.
        world_rank, world: place in the whole job.
        collection: megatron-core's own record of the same groups, handed to its modules.
        device: where this process computes.
        store: in which the processes met; clone it before use in a thread.
    """

    tp: Axis
    pp: Axis
    dp: Axis
    mp: Axis
    world_rank: int
    world: int
    collection: object
    device: Device
    store: dist.Store

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    @property
    def is_main(self) -> bool:
        """The one process that writes logs."""
        return self.world_rank == 0

    def sum_over_data(self, x: Tensor) -> Tensor:
        """Sum over data-parallel ranks, in place; returns x."""
        if self.dp.size > 1:
            dist.all_reduce(x, group=self.dp.group)
        return x

    def from_last_stage(self, x: Tensor) -> Tensor:
        """Broadcast from the last pipeline stage within its column, in place; returns x."""
        if self.pp.size > 1:
            dist.broadcast(x, dist.get_global_rank(self.pp.group, self.pp.size - 1), group=self.pp.group)
        return x

    def from_replica_head(self, value: object) -> object:
        """An object computed by the first process of each model replica, given to all of that replica."""
        if self.mp.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(self.mp.group, 0), group=self.mp.group)
        return box[0]

    def any(self, flag: bool) -> bool:
        """True on every process if true on one."""
        return self._any(flag, self.world, None)

    def any_of_replica(self, flag: bool) -> bool:
        """True on every process of this model replica if true on one of them."""
        return self._any(flag, self.mp.size, self.mp.group)

    def _any(self, flag: bool, size: int, group: dist.ProcessGroup | None) -> bool:
        if size == 1:
            return flag
        x = torch.tensor([int(flag)], device=self.device.torch)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
        return bool(x.item())

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


@dataclass(frozen=True)
class Link:
    """One direction between two neighbouring stages: a group of their own, and the other's global rank."""

    group: dist.ProcessGroup
    peer: int


@dataclass(frozen=True)
class StageLinks:
    """This stage's links; None where the pipeline ends.

    Attributes:
        forward_in, forward_out: hidden states from the stage before, to the stage after.
        backward_in, backward_out: their gradients, from the stage after, to the stage before.
    """

    forward_in: Link | None = None
    forward_out: Link | None = None
    backward_in: Link | None = None
    backward_out: Link | None = None


def connect_stages(groups: Groups) -> StageLinks:
    """A two-rank group per directed edge of every pipeline. A collective call over all processes.

    With one communicator for both directions, or for a direction of all stages, a receive posted ahead can stand in
    front of the send on which it depends. (Torch's creation among members only would spare the others the call, but it
    names a group by how many groups a process has, and that differs between stages.)
    """
    stages = groups.pp.size
    if stages == 1:
        return StageLinks()
    mine = tuple(dist.get_global_rank(groups.pp.group, r) for r in range(stages))
    columns: list[tuple[int, ...]] = [()] * groups.world
    dist.all_gather_object(columns, mine)
    links: dict[str, Link] = {}
    # Even boundaries first: then no stage connects to two neighbours at a time.
    for boundary in [*range(0, stages - 1, 2), *range(1, stages - 1, 2)]:
        for column in sorted(set(columns)):
            upstream, downstream = column[boundary : boundary + 2]
            for way, source in (("forward", upstream), ("backward", downstream)):
                group = dist.new_group([upstream, downstream], backend=groups.device.backend)
                if groups.world_rank not in (upstream, downstream):
                    continue
                outward = groups.world_rank == source
                link = Link(group, downstream if groups.world_rank == upstream else upstream)
                links[f"{way}_out" if outward else f"{way}_in"] = link
                first = torch.zeros(1, device=groups.device.torch)  # the first use connects
                dist.send(first, link.peer, group) if outward else dist.recv(first, link.peer, group)
    return StageLinks(**links)


def _meet(ranks: Ranks, timeout: timedelta) -> dist.Store:
    if ranks.init_method is None:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous(ranks.init_method, ranks.rank, ranks.world, timeout=timeout))
    return store


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))


@contextmanager
def process_groups(
    ranks: Ranks, device: Device, tensor: int, pipeline: int, timeout: float = 1800.0
) -> Iterator[Groups]:
    """Start torch.distributed and megatron-core's groups; tear both down on exit.

    Args:
        ranks: place of this process in the job.
        tensor, pipeline: degrees; the rest of the world is data parallel.
        timeout: seconds after which a collective gives up.

    Raises:
        UserError: the world cannot be divided that way (checked again here because the CLI's check may be bypassed).
    """
    if ranks.world % (tensor * pipeline):
        raise UserError(
            f"parallel.tensor x parallel.pipeline = {tensor} x {pipeline} does not divide {ranks.world} processes"
        )
    if device.is_cpu:
        mcore_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    mcore_cpu.patch_adam_step()
    store = _meet(ranks, timedelta(seconds=timeout))
    dist.init_process_group(
        device.backend,
        store=dist.PrefixStore("torch", store),
        rank=ranks.rank,
        world_size=ranks.world,
        timeout=timedelta(seconds=timeout),
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor,
            pipeline,
            distributed_timeout_minutes=timeout / 60,
            create_gloo_process_groups=device.backend != "fake",
        )
        # No dropout anywhere: the tracker only has to exist. Weights are loaded or drawn by name (convert/source.py).
        model_parallel_cuda_manual_seed(1)
        yield Groups(
            tp=_axis(parallel_state.get_tensor_model_parallel_group()),
            pp=_axis(parallel_state.get_pipeline_model_parallel_group()),
            dp=_axis(parallel_state.get_data_parallel_group()),
            mp=_axis(parallel_state.get_model_parallel_group()),
            world_rank=ranks.rank,
            world=ranks.world,
            collection=ProcessGroupCollection.use_mpu_process_groups(),
            device=device,
            store=store,
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
