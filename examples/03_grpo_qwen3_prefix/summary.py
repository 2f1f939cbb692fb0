"""Say what a run of reinforcement learning reached: `python summary.py RUN_FOLDER`."""

import json
import sys
from pathlib import Path


def main(run: Path) -> None:
    """Print held-out numbers before and after, and what a step cost."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated, steps = [row for row in rows if "eval_exact" in row], [row for row in rows if "tokens" in row]
    first, last = evaluated[0], evaluated[-1]
    print(
        f"\nheld-out problems ({first['eval_problems']:.0f}, greedy): exact {first['eval_exact']:.3f} after SFT -> "
        f"{last['eval_exact']:.3f} after {last['step']} steps; reward {first['eval_reward']:.3f} -> "
        f"{last['eval_reward']:.3f}"
    )
    print(
        f"a step: {_mean(steps, 'tokens'):.0f} tokens forward and backward, {_mean(steps, 'seconds_update'):.2f} s; "
        f"rollouts {_mean(steps, 'seconds_rollout'):.2f} s"
    )


def _mean(rows: list[dict], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
