"""Draw a pipeline step stage by stage, with each stage's bubble: of a run's trace, or of a simulated schedule.

python tools/trace.py runs/demo/trace/step-000000 --out trace.png                                a run
python tools/trace.py --stages 8 --microbatches 8 --chunks 16 --attention causal --compare 1f1b  a simulation

A simulation's unit of time is one layer's forward over a whole row.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from megamem.errors import UserError  # noqa: E402
from megamem.stream.schedule import choose_slack  # noqa: E402
from megamem.stream.simulate import (  # noqa: E402
    ATTENTION,
    Transfer,
    chunk_costs,
    one_forward_one_backward,
    simulate,
)
from megamem.stream.trace import Trace, read_trace  # noqa: E402

COLOURS = {"forward": ("#3b7dbf", "#7fb0e0"), "backward": ("#c8553d", "#e89a86")}  # even and odd micro-batches


def simulated(options: argparse.Namespace) -> dict[str, Trace]:
    """Title -> trace, the streamed schedule first."""
    costs = [chunk_costs(options.attention, options.chunks, options.share)] * options.microbatches
    layers = [options.layers] * options.stages
    transfer = Transfer(options.transfer, options.latency)
    chosen = choose_slack([len(row) for row in costs], [unit.forward for row in costs for unit in row])
    slack = options.slack or chosen
    units = f"{len(costs[0])} units" if len(costs[0]) > 1 else "one unit"
    traces = {f"{options.attention}, {units}, slack {slack}": simulate(costs, layers, slack, transfer)}
    if options.compare:
        traces["1F1B"] = one_forward_one_backward(costs, layers, transfer)
    return traces


def draw(axis: Axes, trace: Trace, until: float) -> None:
    """One row per stage, the first on top; the bubble of each at its right."""
    begin = trace.begin
    bars: dict[tuple[int, str, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace.events:
        bars[event.stage, event.op.kind, event.op.microbatch % 2].append((event.start - begin, event.end - event.start))
    rim = 0.3 if len(trace.events) < 3000 else 0.0
    for (stage, kind, parity), spans in bars.items():
        label = kind if stage == parity == 0 else None
        colour = COLOURS[kind][parity]
        axis.broken_barh(spans, (stage - 0.42, 0.84), facecolor=colour, edgecolor="white", linewidth=rim, label=label)
    size = max(4, min(9, 300 / trace.stages))
    for stage, bubble in enumerate(trace.bubbles):
        axis.text(1.01 * until, stage, f"{100 * bubble:.1f} %", va="center", fontsize=size)
    axis.set(xlim=(0, until), ylim=(trace.stages - 0.4, -0.6), ylabel="stage")
    axis.yaxis.get_major_locator().set_params(integer=True)


def picture(traces: dict[str, Trace], out: Path) -> None:
    """One panel per trace, on one time axis."""
    until = max(trace.step_time for trace in traces.values())
    height = sum(max(1.6, 0.13 * trace.stages) + 0.6 for trace in traces.values())
    figure, axes = plt.subplots(len(traces), 1, figsize=(13, height), squeeze=False, constrained_layout=True)
    for axis, (title, trace) in zip(axes[:, 0], traces.items(), strict=True):
        draw(axis, trace, until)
        axis.set_title(f"{title}: step {trace.step_time:.4g}, bubble {100 * trace.bubble:.1f} %", fontsize=10)
    axes[0, 0].legend(loc="lower right", fontsize=8)
    axes[-1, 0].set_xlabel("time")
    figure.savefig(out, dpi=130)


def report(traces: dict[str, Trace]) -> None:
    """Step time, its ratio to 1F1B where that was simulated, and bubbles."""
    stock = traces.get("1F1B")
    for title, trace in traces.items():
        ratio = f", {trace.step_time / stock.step_time:.3f} of 1F1B" if stock and trace is not stock else ""
        print(f"{title}: step {trace.step_time:.4g}{ratio}, bubble {100 * trace.bubble:.1f} %")
        print("  per stage: " + " ".join(f"{100 * bubble:.1f}" for bubble in trace.bubbles))


def arguments() -> argparse.Namespace:
    """The command line; a simulation's defaults are four layers per stage over fast links."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="file or folder of JSON lines; without it: simulate")
    parser.add_argument("--out", type=Path, default=Path("trace.png"))

    def count(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text}; it is at least 1")
        return int(text)

    parser.add_argument("--stages", type=count, default=4)
    parser.add_argument("--microbatches", type=count, default=4)
    parser.add_argument("--chunks", type=count, default=8, help="equal chunks of a row")
    parser.add_argument("--attention", choices=sorted(ATTENTION), default="causal")
    parser.add_argument("--share", type=float, default=0.3, help="attention's share of a layer's forward")
    parser.add_argument("--slack", type=count, help="default: the rule's")
    parser.add_argument("--layers", type=count, default=4, help="layers per stage")
    parser.add_argument("--transfer", type=float, default=0.05, help="time of a whole row's message on its link")
    parser.add_argument("--latency", type=float, default=0.002, help="time until a message arrives")
    parser.add_argument("--compare", choices=["1f1b"], help="also the stock schedule over the same work")
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    """Print the numbers and write the picture."""
    traces = {str(options.trace): read_trace(options.trace)} if options.trace else simulated(options)
    report(traces)
    picture(traces, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    try:
        main(arguments())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
