"""What is logged, how it is averaged over ranks, and where it is written."""

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamem.errors import UserError
from megamem.train.experience import response_length
from megamem.train.run import DTYPES, Run
from megamem.train.update import Update


@dataclass(frozen=True, eq=False)
class Result:
    """Of one optimizer step.

    Attributes:
        sums: what `update.backward` returned.
        norm: of the gradient, before clipping; None: the step was skipped.
    """

    sums: Mapping[str, Tensor]
    norm: float | None


def step_metrics(
    run: Run, batch: Any, updates: Sequence[Update], results: Sequence[Result], seconds: float
) -> dict[str, float]:
    """Numbers of one step over the whole batch, the same on every rank (seconds: this rank's).

    `reward`, `exact` (share of right responses), `length` (tokens up to the first EOS), `zero_variance` (share of
    groups without signal), `loss` (minus the objective; about 0 on-policy, watch the others), `elbo` (nats per
    response, mean over the draws that carry gradient), `log_ratio` (mean d, 0 on-policy), `grad_norm` (before clipping,
    mean over updates), `skipped` (updates with a loss or gradient that was not finite: these count nowhere else), `lr`,
    `tokens` (that the updates ran, over all ranks: a shared prompt counts once), `tokens_per_second` (of the updates),
    `mfu` (operations that the model needs for the rows of the updates, of those that all devices could have done in
    the same time; where their peak is known), `seconds`, `seconds_*` of each phase (of evaluation and checkpoint: those
    since the line before), `peak_memory_gib` (largest rank), and `part_*` the task's own numbers.
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
    phases = run.phases.take()
    # The last stage knows the losses; every stage and rank gets the sums.
    table = torch.stack([torch.stack([r.sums[name] for name in ("loss", "elbo", "draws", "ratio")]) for r in results])
    table = run.groups.sum_over_data(run.groups.from_last_stage(table.to(device)))
    done = [i for i, result in enumerate(results) if result.norm is not None]
    peak = _peak_flops(run)
    tokens, flops = _work(run, updates, peak is not None)
    if done:
        loss, elbo, draws, ratio = table[done].sum(0).tolist()
        metrics |= {
            "loss": loss / len(done),
            "elbo": elbo / max(draws, 1),
            "log_ratio": ratio / max(draws, 1),
            "grad_norm": sum(results[i].norm for i in done) / len(done),
        }
    return metrics | {
        "skipped": float(len(results) - len(done)),
        "lr": run.optimizer.param_groups[0]["lr"],
        "tokens": tokens,
        "tokens_per_second": tokens / phases["update"],
        **({"mfu": flops / (phases["update"] * peak)} if peak else {}),
        "seconds": seconds,
        **{f"seconds_{name}": value for name, value in phases.items()},
        "peak_memory_gib": _max_over_world(run.groups.device.peak_bytes() / 2**30, run),
    }


def _work(run: Run, updates: Sequence[Update], count: bool) -> tuple[float, float]:
    """Tokens that the updates ran and, if they are to be counted, operations that the model needs for them, over all
    replicas."""
    arch = run.prepared.model.arch
    mine = [sum(u.rows.tokens for u in updates), sum(u.rows.model_flops(arch) for u in updates) if count else 0]
    tokens, flops = run.groups.sum_over_data(
        torch.tensor(mine, dtype=torch.float64, device=run.groups.device.torch)
    ).tolist()
    return tokens, flops


def _peak_flops(run: Run) -> float | None:
    """Operations a second that all devices of the run could do."""
    config = run.prepared.config
    one = config.observe.peak_tflops or run.groups.device.peak_tflops(DTYPES[config.model.dtype])
    return one and one * 1e12 * run.groups.world


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
        tell: where a line for the user goes if a step cannot be written; its numbers wait for the next one. None: that
            is an error.

    Raises:
        UserError: the lines of an interrupted run cannot be dropped.
    """

    def __init__(self, out: Path, first_step: int, tensorboard: bool, tell: Callable[[str], None] | None = None):
        self._path, self._tell = out / "metrics.jsonl", tell
        self._waiting: list[str] = []
        try:
            self._keep_before(first_step)
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error.strerror})") from None
        self._writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=first_step)

    def _keep_before(self, first_step: int) -> None:
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _step_of(line) < first_step]
        if kept == lines:
            return
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self._path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's numbers.

        Raises:
            UserError: they cannot be written, and there is no `tell`.
        """
        self._waiting.append(json.dumps({"step": step, **metrics}) + "\n")
        try:
            _append(self._path, "".join(self._waiting).encode())
            self._waiting.clear()
            if self._writer:
                for name, value in metrics.items():
                    self._writer.add_scalar(name, value, step)
                self._writer.flush()
        except OSError as error:
            told = f"{self._path.parent}: the log cannot be written ({error.strerror})"
            if self._tell is None:
                raise UserError(f"{told}; is the disk full?") from None
            if len(self._waiting) <= 1:  # the first of the lines that wait, or tensorboard, which is given up
                self._tell(f"{told}; train.on_save_error = continue: training goes on")
            if not self._waiting:
                self._writer = None


def _append(path: Path, data: bytes) -> None:
    """Append all of it or nothing: half a line would spoil the next one.

    Raises:
        OSError: nothing was appended.
    """
    with open(path, "ab", buffering=0) as handle:
        before = os.fstat(handle.fileno()).st_size
        try:
            if handle.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            handle.truncate(before)
            raise


def _step_of(line: str) -> float:
    """The step of a line; a half-written line counts as too late."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
