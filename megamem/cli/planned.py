"""The planner beside a run: what a training run should need, computed by a process of its own while it starts."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megamem.config.schema import PlannedConfig, RunConfig
from megamem.errors import UserError
from megamem.platform.child import Child, answer_parent
from megamem.platform.device import resolve_device
from megamem.platform.launch import Ranks, hush_dependencies
from megamem.train.journal import Planned


@contextmanager
def planning(config: RunConfig, ranks: Ranks, environ: Mapping[str, str]) -> Iterator[Planned]:
    """Inside, the planner works beside the main process if the run asks for it. Enter it before process groups form: a
    fork is not safe beside every network."""
    asked = config.observe.plan
    if ranks.rank != 0 or asked is False or (asked is None and resolve_device(config.device, ranks.local_rank).is_cpu):
        yield lambda: None
        return
    request = json.dumps({"config": config.model_dump(mode="json"), "world": ranks.world})
    try:
        child = Child(__name__, request, environ)
    except OSError as error:
        reason = f"the planner cannot be started ({error.strerror})"
        yield lambda: reason
        return
    try:
        yield lambda: _read(child.answer())
    finally:
        child.end()


def _read(answer: str | None) -> PlannedConfig | str | None:
    if not answer:
        return None if answer is None else "the planner failed; `megamem plan` shows why"
    found = json.loads(answer)
    return found["problem"] if "problem" in found else PlannedConfig(**found)


def plan_configured(config: RunConfig, world: int) -> PlannedConfig:
    """The largest need of a rank, as the run is configured: its layers and head, full rows in which every position is
    scored, megatron-core's schedule.

    Raises:
        UserError: `train.row_tokens` is more than the model's positions.
    """
    from megamem.plan.planner import predict
    from megamem.plan.step import Job
    from megamem.plan.variants import Variant
    from megamem.train.prepare import open_model
    from megamem.train.run import DTYPES, attention_name, stream_options

    arch, parallel, tokens = open_model(Path(config.model.path)).arch, config.parallel, config.train.row_tokens
    job = Job(arch, DTYPES[config.model.dtype], parallel, attention_name(arch, config.model))
    variant = Variant(stream_options(config.stream), config.train.recompute == "full", own_head=True)
    found = predict(job, variant, world // (parallel.tensor * parallel.pipeline), tokens)
    parts = {name: round(size / 2**30, 4) for name, size in found.parts(tokens).items()}
    peak = parts.pop("total")
    if config.objective.kl:  # a second model, for the reference policy
        parts["reference"] = parts["parameters"]
        peak += parts["reference"]
    return PlannedConfig(peak_gib=peak, stage=found.stage, parts_gib=parts)


def _answer(request: str) -> str:
    asked = json.loads(request)
    try:
        return plan_configured(RunConfig(**asked["config"]), asked["world"]).model_dump_json()
    except UserError as error:
        return json.dumps({"problem": str(error)})


if __name__ == "__main__":
    hush_dependencies()
    answer_parent(_answer)
