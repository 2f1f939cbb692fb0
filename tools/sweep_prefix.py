"""`megamem bench prefix` over the grid of Prefix Grouper's paper (arXiv 2506.05433, figures 2 and 3), and its plot.

    python tools/sweep_prefix.py count sweep.jsonl          # prompts of 4096, 8192, 16384: operations from the layouts
    python tools/sweep_prefix.py run sweep_run.jsonl        # prompts of 512, 1024: everything, measured (hours)
    python tools/sweep_prefix.py plot sweep.jsonl docs/prefix.png

One JSON object a line, as the command prints it. Prompt to response is 1:1 … 32:1, responses are 2 … 16.

The package's operations are those of its CPU path, whose second attention call also computes what its mask hides; a
kernel that skips that would leave it with as many as ours.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

from megamem.bench import prefix as bench

RATIOS = (1, 2, 4, 8, 16, 32)
GROUPS = (2, 4, 8, 16)
COUNTED, RUN = (4096, 8192, 16384), (512, 1024)
STYLES = {"prefix_grouper": "--", "grouped": "-"}


def grid(prefixes: tuple[int, ...]) -> list[bench.Sizes]:
    """The bench's default model at every point."""
    points = itertools.product(prefixes, GROUPS, RATIOS)
    return [bench.Sizes(prefix=p, suffix=p // ratio, group=group, row_tokens=2**21) for p, group, ratio in points]


def count(sizes: bench.Sizes) -> dict:
    """Operations of a point."""
    return bench.count_as_json(bench.count(sizes), sizes)


def run(sizes: bench.Sizes) -> dict:
    """Everything of a point."""
    from megamem.platform.device import resolve_device
    from megamem.platform.groups import process_groups
    from megamem.platform.launch import Ranks

    with process_groups(Ranks(0, 1, 0, None, "single process"), resolve_device("auto", 0), 1, 1) as groups:
        return bench.as_json(bench.bench_prefix(sizes, groups, 3, lambda text: None), sizes)


def sweep(prefixes: tuple[int, ...], measure: Callable[[bench.Sizes], dict], out: Path) -> None:
    """Append every point that the file does not have."""
    done = {json.dumps(json.loads(line)["sizes"]) for line in out.read_text().splitlines()} if out.exists() else set()
    for sizes in grid(prefixes):
        if json.dumps(vars(sizes)) in done:
            continue
        found = measure(sizes)
        with out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        ratios = {row["variant"]: round(row["flops"] / found["rows"][0]["flops"], 4) for row in found["rows"][1:]}
        sys.stderr.write(f"prompt {sizes.prefix}, response {sizes.suffix}, {sizes.group} responses: {ratios}\n")


def plot(points: list[dict], out: Path) -> None:
    """Operations ÷ repeated against prompt : response, one panel for each length of prompt."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    prefixes = sorted({p["sizes"]["prefix"] for p in points})
    figure, axes = plt.subplots(1, len(prefixes), figsize=(13, 3.6), sharey=True, squeeze=False, layout="constrained")
    for axis, prompt in zip(axes[0], prefixes, strict=True):
        for color, group in enumerate(GROUPS):
            found = [p for p in points if (p["sizes"]["prefix"], p["sizes"]["group"]) == (prompt, group)]
            ratios = [p["sizes"]["prefix"] / p["sizes"]["suffix"] for p in found]
            for variant, style in STYLES.items():
                share = [_flops(p, variant) / _flops(p, "repeated") for p in found]
                axis.plot(ratios, share, style, color=f"C{color}", label=f"{variant}, {group}", linewidth=1.2)
            axis.axhline(1 / group, color=f"C{color}", linewidth=0.5, alpha=0.5)
        axis.set(title=f"prompt of {prompt}", xlabel="prompt : response", xscale="log", ylim=(0, 1.2))
        axis.set_xticks(RATIOS, [f"{r}:1" for r in RATIOS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("operations ÷ repeated")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right", frameon=False, title="responses", fontsize=8)
    figure.savefig(out, dpi=130)


def _flops(point: dict, variant: str) -> int:
    return next(row["flops"] for row in point["rows"] if row["variant"] == variant)


def main() -> None:
    """Count, run or plot."""
    parser = argparse.ArgumentParser(description="megamem bench prefix over the paper's grid")
    parser.add_argument("what", choices=("count", "run", "plot"))
    parser.add_argument("jsonl", type=Path)
    parser.add_argument("picture", type=Path, nargs="?", default=Path("docs/prefix.png"))
    asked = parser.parse_args()
    if asked.what == "plot":
        plot([json.loads(line) for line in asked.jsonl.read_text().splitlines()], asked.picture)
    elif asked.what == "count":
        sweep(COUNTED, count, asked.jsonl)
    else:
        sweep(RUN, run, asked.jsonl)


if __name__ == "__main__":
    main()
