"""Say what a demo run reached: `python summary.py RUN_FOLDER SECONDS`."""

import json
import sys
from pathlib import Path


def main(run: Path, seconds: int) -> None:
    """Print held-out numbers before and after."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval_exact" in row]
    first, last = evaluated[0], evaluated[-1]
    print(
        f"\nheld-out puzzles ({first['eval_problems']:.0f}, greedy): exact {first['eval_exact']:.3f} after SFT -> "
        f"{last['eval_exact']:.3f} after {last['step']} BGPO steps; reward {first['eval_reward']:.3f} -> "
        f"{last['eval_reward']:.3f}; {seconds} s in all"
    )
    print(f"look at {run}/demo.png, {run}/metrics.jsonl, tensorboard --logdir {run}/tensorboard")
    print(f"the trained model: {run}/hf_bgpo")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
