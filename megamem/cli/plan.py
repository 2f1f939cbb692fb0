"""`megamem plan`: from a configuration and the machines to a plan."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megamem.config.architecture import Architecture
from megamem.config.rules import (
    check,
    model_divisible,
    optimizer_precision,
    prefix_is_exact,
    streams_fit,
    world_divisible,
)
from megamem.config.schema import RunConfig
from megamem.errors import UserError
from megamem.plan.planner import Machines, Progress, as_json, make_plan, suggest
from megamem.plan.step import Job
from megamem.plan.units import parse_bytes
from megamem.stream.layer import StreamOptions
from megamem.train.prepare import open_model
from megamem.train.run import DTYPES, attention_name
from megamem.train.sharing import cheaper, compare_forms


def plan_run(
    config: RunConfig,
    gpus: int | None,
    gpus_per_node: int,
    gpu_memory: str,
    host_memory: str,
    reserve: str,
    tokens: int | None,
    rows: int | None,
    stage: int | None,
    prompt: int | None,
    progress: Progress,
) -> dict[str, Any]:
    """What `megamem plan` prints; options are named as there.

    Raises:
        UserError: a size that is none, a model folder without config.json, or a layout that suits neither the model nor
            the GPUs.
    """
    parallel, s = config.parallel, config.stream
    machines = Machines(
        gpus or parallel.tensor * parallel.pipeline,
        parse_bytes(gpu_memory, "--gpu-memory"),
        parse_bytes(reserve, "--reserve"),
        parse_bytes(host_memory, "--host-memory"),
        gpus_per_node,
    )
    if machines.usable <= 0:
        raise UserError(f"--reserve = {reserve!r} leaves nothing of --gpu-memory = {gpu_memory!r}; allowed: less")
    arch, tokens = open_model(Path(config.model.path)).arch, tokens or config.train.row_tokens
    streamed = config.model_copy(
        update={
            "stream": s.model_copy(update={"layers": True}),
            "train": config.train.model_copy(update={"recompute": "none", "row_tokens": tokens}),
            "prefix": config.prefix.model_copy(update={"share": prompt is not None}),
        }
    )
    rules = (world_divisible, model_divisible, streams_fit, optimizer_precision, prefix_is_exact)
    check(streamed, arch, machines.gpus, rules)
    job = Job(arch, DTYPES[config.model.dtype], parallel, attention_name(arch, config.model))
    stream = StreamOptions(s.chunk_tokens, s.head_tokens, s.save)
    plan = make_plan(job, stream, machines, tokens, rows or parallel.pipeline, stage, progress)
    if gpus is not None:
        plan = replace(plan, suggestion=suggest(job, stream, machines, tokens, rows, progress) or {})
    found = as_json(plan) | {"schedule": "megatron", "configured_schedule": config.pipeline.schedule}
    return found if prompt is None else found | {"shared_prompt": shared_prompt(streamed, arch, prompt, found)}


def shared_prompt(config: RunConfig, arch: Architecture, prompt: int, found: dict[str, Any]) -> dict[str, Any]:
    """Both ways to share a prompt of so many tokens, and the one to take: the cheaper one, if its keys and values fit
    beside a streamed step."""
    costs = compare_forms(config, arch, attention_name(arch, config.model), [prompt])
    room = found["gpu_memory_bytes"] - found["reserve_bytes"] - found["peak_bytes"]["streamed"]["total"]
    form = cheaper(costs) if costs["handle"].kept_bytes <= room else "row"
    return {
        "tokens": prompt,
        "forms": {name: asdict(cost) for name, cost in costs.items()},
        "chosen": form,
        "needs": [] if form == "row" else ["pipeline.schedule=streamed", "stream.layers=true", "stream.window=stage"],
    }
