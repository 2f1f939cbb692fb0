"""What is logged, how it is averaged over ranks, and where it is written."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamem.train.experience import response_length
from megamem.train.run import Run
from megamem.train.update import Update


def step_metrics(
    run: Run,
    batch: Any,
    updates: Sequence[Update],
    sums: Sequence[Mapping[str, Tensor]],
    norms: Sequence[float],
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Numbers of one step over the whole batch, the same on every rank.

    `reward`, `exact` (share of right responses), `length` (tokens up to the first EOS), `zero_variance` (share of
    groups without signal), `loss` (minus the objective; about 0 on-policy, watch the others), `elbo` (nats per
    response, mean over the draws that carry gradient), `log_ratio` (mean d, 0 on-policy), `grad_norm` (before clipping,
    mean over updates), `lr`, `tokens` (that the updates ran, over all ranks: a shared prompt counts once),
    `tokens_per_second` (of the updates), `seconds`, `seconds_rollout`, `seconds_update`, `peak_memory_gib` (largest
    rank), and `part_*` the task's own numbers.
    """
    eos_id, group = run.prepared.model.arch.eos_id, max(1, len(batch.rollouts) // _prompt_count(run))
    silent = (batch.advantage_N.view(-1, group) == 0).all(-1).double()
    means = {
        "reward": [s.reward for s in batch.scores],
        "exact": [float(s.exact) for s in batch.scores],
        "length": [response_length(r, eos_id) for r in batch.rollouts],
        "zero_variance": silent.tolist(),
    }
    for name in sorted(batch.scores[0].parts):
        means[f"part_{name}"] = [s.parts.get(name, 0.0) for s in batch.scores]
    metrics = mean_over_data(means, run)
    device = run.groups.device.torch
    # The last stage knows the losses; every stage and rank gets the sums.
    table = torch.stack([torch.stack([s["loss"], s["elbo"], s["draws"], s["ratio"]]) for s in sums]).to(device)
    loss, elbo, draws, ratio = run.groups.sum_over_data(run.groups.from_last_stage(table)).sum(0).tolist()
    tokens = run.groups.sum_over_data(
        torch.tensor(float(sum(u.rows.tokens for u in updates)), dtype=torch.float64, device=device)
    ).item()
    return metrics | {
        "loss": loss / len(updates),
        "elbo": elbo / max(draws, 1),
        "log_ratio": ratio / max(draws, 1),
        "grad_norm": sum(norms) / len(norms),
        "lr": run.optimizer.param_groups[0]["lr"],
        "tokens": tokens,
        "tokens_per_second": tokens / seconds["update"],
        "seconds": sum(seconds.values()),
        "seconds_rollout": seconds["rollout"],
        "seconds_update": seconds["update"],
        "peak_memory_gib": _max_over_world(run.groups.device.peak_bytes() / 2**30, run),
    }


def _prompt_count(run: Run) -> int:
    return run.prepared.config.rollout.prompts // run.groups.dp.size


def mean_over_data(values: Mapping[str, Sequence[float]], run: Run) -> dict[str, float]:
    """Mean of each list over all data-parallel ranks' entries (ranks may hold different numbers of them)."""
    device = run.groups.device.torch
    table = torch.tensor([[sum(v), len(v)] for v in values.values()], dtype=torch.float64, device=device)
    totals = run.groups.sum_over_data(table).tolist()
    return {name: total / max(count, 1) for name, (total, count) in zip(values, totals, strict=True)}


def _max_over_world(value: float, run: Run) -> float:
    x = torch.tensor(value, dtype=torch.float64, device=run.groups.device.torch)
    if run.groups.world > 1:
        torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.MAX)
    return x.item()


class MetricsLog:
    """`metrics.jsonl` (one object a step) and tensorboard files of a run folder; the main process only.

    Args:
        first_step: the step that will be logged first. Later lines of an interrupted run are dropped, so a resumed
            run has one line a step.
    """

    def __init__(self, out: Path, first_step: int, tensorboard: bool):
        self._path = out / "metrics.jsonl"
        self._keep_before(first_step)
        self._writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=first_step)

    def _keep_before(self, first_step: int) -> None:
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step_of(line) < first_step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self._path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's numbers."""
        with open(self._path, "a", encoding="utf-8") as handle:
            handle.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._writer:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()


def _step_of(line: str) -> float:
    """The step of a line; a half-written line counts as too late."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
