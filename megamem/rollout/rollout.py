"""What sampling produces, and how it is recorded and read back.

Recorded rollouts make runs comparable across layouts: one argmax flipped by rounding would change everything after it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megamem.errors import UserError


@dataclass(frozen=True)
class Request:
    """One response to sample; `(problem, sample)` is its identity, and what its randomness is keyed by."""

    problem: str
    sample: int
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Rollout:
    """A request and its response, token ids."""

    problem: str
    sample: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]


def record_rollouts(folder: Path, step: int, part: int, rollouts: Iterable[Rollout]) -> None:
    """Write one data-parallel rank's rollouts of a step as JSON lines."""
    path = folder / f"step_{step:06d}"
    path.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(rollout)) + "\n" for rollout in rollouts)
    (path / f"part_{part:04d}.jsonl").write_text(lines, encoding="utf-8")


def replay_rollouts(folder: Path, step: int, requests: Sequence[Request]) -> list[Rollout]:
    """The recorded rollouts of these requests, whatever number of ranks wrote them.

    Raises:
        UserError: the step, or a request in it, was not recorded, or was recorded with another prompt.
    """
    found: dict[tuple[str, int], Rollout] = {}
    path = folder / f"step_{step:06d}"
    try:
        for part in sorted(path.glob("part_*.jsonl")):
            for line in part.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                found[entry["problem"], entry["sample"]] = Rollout(
                    entry["problem"], entry["sample"], tuple(entry["prompt"]), tuple(entry["response"])
                )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: recorded rollouts cannot be read ({error!r})") from None
    rollouts = []
    for request in requests:
        rollout = found.get((request.problem, request.sample))
        if rollout is None or rollout.prompt != request.prompt:
            raise UserError(
                f"{path}: rollout.replay has no rollout of problem {request.problem!r}, sample {request.sample}, with "
                "this prompt; record it with the same seed, task and rollout.prompts/group"
            )
        rollouts.append(rollout)
    return rollouts
