"""What a run leaves in its folder."""

import json
from pathlib import Path

# Of the clock and of the machine, not of the computation.
MEASURED = ("seconds", "tokens_per_second", "peak", "mfu", "planned")


def metrics(run: Path) -> list[dict[str, float]]:
    """The lines of a run's log; one that is being written does not count."""
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def computed(run: Path) -> list[dict[str, float]]:
    """The lines of a run's log without what was measured."""
    return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in metrics(run)]


def steps(run: Path) -> list[int]:
    """Steps in the log of a run."""
    return [line["step"] for line in metrics(run)]


def checkpoints(run: Path) -> list[int]:
    """Steps of complete checkpoints."""
    return sorted(int(path.parent.name[5:]) for path in run.glob("checkpoints/step_??????/megamem.json"))
