"""`megamem doctor`: every check of a run, without starting it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megamem.config.schema import RunConfig
from megamem.errors import RankError, UserError
from megamem.platform.device import resolve_device
from megamem.platform.launch import Ranks
from megamem.train.doctor import Finding, findings, gather
from megamem.train.prepare import open_model, prepare

Result = TypeVar("Result")


def diagnose(
    config: RunConfig, ranks: Ranks, environ: Mapping[str, str], world: int | None, nodes: int | None
) -> list[Finding]:
    """What rank 0 tells; empty elsewhere. Like `train`, it makes the run folder.

    Args:
        world, nodes: of the run that is meant; None: this process's own job.

    Raises:
        UserError: `world` or `nodes` contradict the launcher or each other.
        RankError: another rank than 0 found an error, and only it knows.
    """
    if ranks.local_rank:
        resolve_device(config.device, ranks.local_rank)
        return []
    meant, path = _meant(ranks, world, nodes), Path(config.model.path)
    found: list[Finding] = []
    _attempt(lambda: resolve_device(config.device, 0), "device", found)
    model = _attempt(lambda: open_model(path), "configuration", found)
    if model is not None:  # all rules are told by a check of their own
        prepared = _attempt(lambda: prepare(config, meant.world, rules=()), "configuration", found)
        found += [Finding("warning", "checkpoints", note) for note in (prepared.notes if prepared else ())]
    facts = gather(config, model, meant, environ)
    found += findings(facts)
    if ranks.rank == 0:
        return found
    if errors := [str(f) for f in found if f.level == "error"]:
        raise RankError("\n".join(f"{facts.machine.host}: {text}" for text in errors))
    return []


def _meant(ranks: Ranks, world: int | None, nodes: int | None) -> Ranks:
    """The job to look at, seen from its first process."""
    if world is None and nodes is None:
        return ranks
    if ranks.world > 1:
        raise UserError(f"--world, --nodes: {ranks.source} started {ranks.world} processes and says so; leave them out")
    world = world or 1
    if nodes is not None and world % nodes:
        raise UserError(f"--nodes = {nodes} does not divide --world = {world}")
    return replace(ranks, world=world, source="--world", local_world=nodes and world // nodes, nodes=nodes)


def _attempt(action: Callable[[], Result], what: str, found: list[Finding]) -> Result | None:
    """What `action` returns; its UserError becomes findings, one per line."""
    try:
        return action()
    except UserError as error:
        found += [Finding("error", what, line) for line in str(error).splitlines()]
        return None


def report(found: list[Finding], as_json: bool) -> str:
    """One line per finding, or one JSON object."""
    if as_json:
        return json.dumps({"findings": [vars(f) for f in found], "errors": sum(f.level == "error" for f in found)})
    return "\n".join(f"{f.level:7}  {f.what}: {f.text}" for f in found)
