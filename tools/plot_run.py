"""Plot a run folder's metrics.jsonl: reward, exact-solve rate and gradient norm against step.

python tools/plot_run.py runs/demo [OUT.png]
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def series(rows: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def main(run: Path, out: Path) -> None:
    """Write the picture."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    panels = (
        ("reward", [("reward", "training, sampled", "-"), ("eval_reward", "held out", "o-")]),
        ("exact-solve rate", [("exact", "training, sampled", "-"), ("eval_exact", "held out", "o-")]),
        ("gradient norm", [("grad_norm", "before clipping", "-")]),
    )
    for axis, (title, lines) in zip(axes, panels, strict=True):
        for name, label, style in lines:
            axis.plot(*series(rows, name), style, label=label, linewidth=1.2, markersize=4)
        axis.set(title=title, xlabel="RL step")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(out, dpi=130)
    print(f"wrote {out}")


if __name__ == "__main__":
    run_folder = Path(sys.argv[1])
    main(run_folder, Path(sys.argv[2]) if len(sys.argv) > 2 else run_folder / "demo.png")
