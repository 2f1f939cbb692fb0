"""`megamem plan`: what every variant of a step needs and how long its rows may be; and layouts for a number of GPUs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megamem.config.architecture import Architecture
from megamem.config.rules import model_fits_layout
from megamem.config.schema import ParallelConfig
from megamem.errors import UserError
from megamem.plan.estimate import Estimate, Static, estimate, stage_static
from megamem.plan.step import Job
from megamem.plan.variants import Variant, variants
from megamem.stream.layer import StreamOptions

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Machines:
    """What there is to run on.

    Attributes:
        gpus: in the job.
        gpu_memory: bytes of each, of which `reserve` are not ours: CUDA context, communication buffers, fragmentation.
        host_memory: bytes of each node that offloaded layer inputs may take.
        gpus_per_node: at most.
    """

    gpus: int
    gpu_memory: int
    reserve: int
    host_memory: int
    gpus_per_node: int = 8

    @property
    def usable(self) -> int:
        return self.gpu_memory - self.reserve

    @property
    def ranks_per_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)


@dataclass(frozen=True)
class Need:
    """What one variant needs; of the pipeline's stages, the one that needs most."""

    stages: Sequence[Estimate]
    machines: Machines

    def worst(self, tokens: int) -> Estimate:
        return max(self.stages, key=lambda stage: stage.peak(tokens))

    def host_per_node(self, tokens: int) -> int:
        """Offloaded bytes of a node whose ranks are all like the largest."""
        return round(max(stage.grown("host", tokens) for stage in self.stages) * self.machines.ranks_per_node)

    def fits(self, tokens: int) -> bool:
        fits_device = self.worst(tokens).peak(tokens) <= self.machines.usable
        return fits_device and self.host_per_node(tokens) <= self.machines.host_memory

    def longest(self, positions: int | None) -> int:
        """Longest row; `positions` bounds it."""
        share = self.machines.host_memory / self.machines.ranks_per_node
        found = min(stage.longest(self.machines.usable, share) for stage in self.stages)
        return found if positions is None else min(found, positions)


@dataclass(frozen=True)
class Plan:
    """What `megamem plan` found, before it is written down.

    Attributes:
        tokens: the row length that was asked about.
        needs: by variant.
        suggestion: a layout for all GPUs; None if none fits or none was asked for.
    """

    job: Job
    machines: Machines
    stream: StreamOptions
    tokens: int
    rows: int
    needs: Mapping[str, Need]
    suggestion: Mapping[str, Any] | None = None


def make_plan(
    job: Job, stream: StreamOptions, machines: Machines, tokens: int, rows: int, stage: int | None, progress: Progress
) -> Plan:
    """Compare the variants of `variants.variants` on the job's own layout.

    Args:
        stream: chunk sizes; its `offload` is set by the variants.
        tokens: length of a row of one sequence, every position scored.
        rows: micro-batches of a step and replica; they matter with a pipeline only.
        stage: look at this pipeline stage alone; None: the first and the last.

    Raises:
        UserError: the length or the stage is not one of this model.
    """
    check_length(job.arch, tokens)
    pipeline = job.parallel.pipeline
    if stage is not None and not 0 <= stage < pipeline:
        raise UserError(f"--stage = {stage}: parallel.pipeline = {pipeline}; allowed: 0 … {pipeline - 1}")
    data = machines.gpus // (job.parallel.tensor * pipeline)
    statics = _statics(job, data, sorted({0, pipeline - 1}) if stage is None else [stage])
    needs = {}
    for name, variant in variants(stream).items():
        progress(f"fake steps: {name}")
        needs[name] = _need(job, variant, statics, machines, tokens, rows)
    return Plan(job, machines, stream, tokens, rows, needs)


def predict(job: Job, variant: Variant, data: int, tokens: int) -> Estimate:
    """The stage that needs most of a job that runs one variant, with more rows of `tokens` than stages.

    Args:
        data: model replicas.

    Raises:
        UserError: the length is not one of this model.
    """
    check_length(job.arch, tokens)
    pipeline = job.parallel.pipeline
    statics = _statics(job, data, sorted({0, pipeline - 1}))
    stages = [estimate(job, variant, static, stage, pipeline + 1, tokens) for stage, static in statics.items()]
    return max(stages, key=lambda stage: stage.peak(tokens))


def check_length(arch: Architecture, tokens: int) -> None:
    """A learned table of positions ends; RoPE does not."""
    if arch.positions == "learned" and tokens > arch.max_positions:
        raise UserError(
            f"--tokens = {tokens}: the model's table of positions has {arch.max_positions} rows; allowed: up to that"
        )


def suggest(
    job: Job, stream: StreamOptions, machines: Machines, tokens: int, rows: int | None, progress: Progress
) -> dict[str, Any] | None:
    """The first layout for all GPUs on which a streamed row of `tokens` fits.

    Order: least tensor parallelism (it communicates most, and never across nodes), then least pipeline parallelism (its
    bubble), then without offload before with it. What is left is data parallel. Of the chunk sizes 1, 2 and 4 times the
    configured one, the largest that fits: larger chunks run fewer, better filled kernels. A rule of thumb about speed;
    bytes are those of the planner. None: nothing fits.

    Args:
        rows: micro-batches of a step and replica; None: as many as a layout has stages, so that all of them are filled.
    """
    for tensor, pipeline in _layouts(job.arch, machines):
        parallel = job.parallel.model_copy(
            update={"tensor": tensor, "pipeline": pipeline, "sequence": tensor > 1, "distributed_optimizer": True}
        )
        there, data = replace(job, parallel=parallel), machines.gpus // (tensor * pipeline)
        if stream.chunk_tokens % tensor:
            continue
        statics = _statics(there, data, sorted({0, pipeline - 1}))
        if max(static.total for static in statics.values()) > machines.usable:
            continue
        for offload in ("none", "cpu"):
            progress(f"fake steps: tensor {tensor}, pipeline {pipeline}, offload {offload}")
            chunk = _largest_chunk(there, replace(stream, offload=offload), statics, machines, tokens, rows or pipeline)
            if chunk is not None:
                return {"tensor": tensor, "pipeline": pipeline, "data": data, **chunk, "offload": offload}
    return None


def _largest_chunk(
    job: Job, stream: StreamOptions, statics: Mapping[int, Static], machines: Machines, tokens: int, rows: int
) -> dict[str, int] | None:
    best = None
    for chunk in (stream.chunk_tokens * factor for factor in (1, 2, 4)):
        need = _need(job, Variant(replace(stream, chunk_tokens=chunk)), statics, machines, tokens, rows)
        if not need.fits(tokens):
            break
        best = {
            "chunk_tokens": chunk,
            "peak_bytes": round(need.worst(tokens).peak(tokens)),
            "host_bytes_per_node": need.host_per_node(tokens),
        }
        if chunk >= tokens:
            break
    return best


def _layouts(arch: Architecture, machines: Machines) -> list[tuple[int, int]]:
    """(tensor, pipeline) that divide the GPUs and suit the model, in the order in which they are tried."""
    degrees = [d for d in range(1, machines.gpus + 1) if machines.gpus % d == 0]
    return [
        (tensor, pipeline)
        for tensor in degrees
        for pipeline in degrees
        if tensor <= machines.gpus_per_node
        and machines.gpus % (tensor * pipeline) == 0
        and not list(model_fits_layout(ParallelConfig(tensor=tensor, pipeline=pipeline), arch))
    ]


def _statics(job: Job, data: int, stages: Sequence[int]) -> dict[int, Static]:
    return {stage: stage_static(job, stage, data) for stage in stages}


def _need(
    job: Job, variant: Variant, statics: Mapping[int, Static], machines: Machines, tokens: int, rows: int
) -> Need:
    return Need([estimate(job, variant, static, s, rows, tokens) for s, static in statics.items()], machines)


def as_json(plan: Plan) -> dict[str, Any]:
    """One object: what was asked, and by variant `peak_bytes` by part (of the stage that needs most), `longest_tokens`,
    and the host bytes of a node at the asked and at the longest length."""
    parallel, machines, tokens = plan.job.parallel, plan.machines, plan.tokens
    positions = plan.job.arch.max_positions if plan.job.arch.positions == "learned" else None
    longest = {name: need.longest(positions) for name, need in plan.needs.items()}
    return {
        "tokens": tokens,
        "rows": plan.rows,
        "attention": plan.job.attention,
        "dtype": str(plan.job.dtype).removeprefix("torch."),
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "data": machines.gpus // (parallel.tensor * parallel.pipeline),
        "sequence": parallel.sequence,
        "chunk_tokens": plan.stream.chunk_tokens,
        "head_tokens": plan.stream.head_tokens,
        "save": plan.stream.save,
        "gpus": machines.gpus,
        "ranks_per_node": machines.ranks_per_node,
        "gpu_memory_bytes": machines.gpu_memory,
        "reserve_bytes": machines.reserve,
        "host_memory_bytes": machines.host_memory,
        "peak_bytes": {
            name: {"stage": need.worst(tokens).stage} | need.worst(tokens).parts(tokens)
            for name, need in plan.needs.items()
        },
        "fits": {name: need.fits(tokens) for name, need in plan.needs.items()},
        "longest_tokens": longest,
        "host_bytes_per_node": {name: need.host_per_node(tokens) for name, need in plan.needs.items()},
        "host_bytes_per_node_at_longest": {
            name: need.host_per_node(longest[name]) if longest[name] else 0 for name, need in plan.needs.items()
        },
        "suggestion": plan.suggestion,
    }


def table(found: Mapping[str, Any]) -> str:
    """What `as_json` holds, for a person; sizes in GB (10^9 bytes)."""
    columns = ("layer_inputs", "layer", "head", "total")
    base = found["longest_tokens"]["recompute"]
    any_part = found["peak_bytes"]["recompute"]
    lines = [
        f"tensor {found['tensor']}  pipeline {found['pipeline']}  data {found['data']}  {found['dtype']}  "
        f"{found['attention']} attention  chunks of {found['chunk_tokens']} tokens",
        f"memory {_gb(found['gpu_memory_bytes'])} GB, of which {_gb(found['reserve_bytes'])} reserved "
        "(driver context, communication buffers, fragmentation)",
        f"static: parameters {_gb(any_part['parameters'])}  gradients {_gb(any_part['gradients'])}  "
        f"optimizer {_gb(any_part['optimizer'])} (+ {_gb(any_part['optimizer_step'])} while it steps) GB",
        "",
        f"{'GB at ' + format(found['tokens'], ',') + ' tokens':26}"
        + "".join(f"{name.replace('_', ' '):>13}" for name in columns)
        + f"{'fits':>6}{'longest':>13}{'ratio':>7}{'host GB/node':>14}",
    ]
    for name, parts in found["peak_bytes"].items():
        longest = found["longest_tokens"][name]
        host = found["host_bytes_per_node_at_longest"][name]
        lines.append(
            f"{name:26}"
            + "".join(f"{_gb(parts[column]):>13}" for column in columns)
            + f"{'yes' if found['fits'][name] else 'no':>6}{longest:>13,}"
            + (f"{longest / base:>7.2f}" if base else f"{'-':>7}")
            + (f"{_gb(host):>14}" if host else f"{'-':>14}")
        )
    lines.append("(host: at the longest row; ratio: to recompute)")
    if found["configured_schedule"] != found["schedule"]:
        lines.append(
            "planned under megatron-core's schedule (pipeline.schedule=megatron); the streamed one, with "
            "stream.window=stage, also keeps keys and values of all layers of the rows in flight"
        )
    return "\n".join(lines + _shared_prompt_lines(found) + _suggestion_lines(found))


def _shared_prompt_lines(found: Mapping[str, Any]) -> list[str]:
    shared = found.get("shared_prompt")
    if not shared:
        return []
    base = shared["forms"]["row"]["operations"]
    lines = [
        "",
        f"{'a shared prompt of ' + format(shared['tokens'], ','):32}{'PFLOP/group':>12}{'ratio':>7}{'rows':>6}",
    ]
    lines[-1] += f"{'keys, values GB':>17}"
    lines += [
        f"prefix.form={name:20}{cost['operations'] / 1e15:>12.3f}{cost['operations'] / base:>7.2f}{cost['rows']:>6}"
        f"{_gb(cost['kept_bytes']):>17}"
        for name, cost in shared["forms"].items()
    ]
    needs = f" (needs {' '.join(shared['needs'])})" if shared["needs"] else ""
    return [*lines, f"chosen: prefix.share=true prefix.form={shared['chosen']}{needs}"]


def _suggestion_lines(found: Mapping[str, Any]) -> list[str]:
    chosen = found["suggestion"]
    if chosen is None:
        return []
    if not chosen:
        return ["", f"no layout of {found['gpus']} GPUs fits a row of {found['tokens']:,} tokens"]
    return [
        "",
        f"for {found['gpus']} GPUs: parallel.tensor={chosen['tensor']} parallel.pipeline={chosen['pipeline']} "
        f"parallel.sequence={str(chosen['tensor'] > 1).lower()} stream.layers=true "
        f"stream.chunk_tokens={chosen['chunk_tokens']} stream.offload={chosen['offload']}   "
        f"(data {chosen['data']}, peak {_gb(chosen['peak_bytes'])} GB)",
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"
