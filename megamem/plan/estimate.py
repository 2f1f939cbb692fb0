"""Bytes of one rank's training step at any length, and the longest row that fits, from a few fake steps."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megamem.config.schema import ParallelConfig
from megamem.ops import attention
from megamem.plan.growth import Growth, Name, fit
from megamem.plan.step import PARTS, Footprint, Job, WatchedStep
from megamem.plan.variants import Variant
from megamem.platform.fake import fake_groups, fake_tensors
from megamem.stream import layer

LONGEST = 2**40  # no row is longer
_WHOLE_ROWS = (4096, 16384)  # longer rows take longer only for the lists of their positions


@dataclass(frozen=True)
class Static:
    """Bytes that live all the time, and the optimizer's own while it steps."""

    parameters: int
    gradients: int
    optimizer: int
    optimizer_step: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Estimate:
    """One variant on one stage.

    Attributes:
        static: what does not depend on rows.
        growth: of each of `growth.numbers`.
        layers: layers on the stage.
        in_flight: rows that the stage holds at a time.
        more_rows: the step has more rows than that.
        unit: row lengths are multiples of it.
    """

    stage: int
    static: Static
    growth: Mapping[Name, Growth]
    layers: int
    in_flight: int
    more_rows: bool
    unit: int

    def grown(self, name: str, tokens: int) -> float:
        """Bytes of "saved", "host" or one of `PARTS` with rows of `tokens`."""
        found = [g for n, g in self.growth.items() if n == name or n[0] == name]
        return max((g.at(tokens, self.layers, self.in_flight, self.more_rows) for g in found), default=0.0)

    def peak(self, tokens: int) -> float:
        """Largest device bytes."""
        step = max(self.grown(part, tokens) for part in PARTS)
        return self.static.total + max(step, self.static.optimizer_step)

    def parts(self, tokens: int) -> dict[str, int]:
        """Bytes by part. The peak is `parameters + gradients + optimizer` plus the larger of `optimizer_step` and
        `layer_inputs` plus the largest of `layer`, `head` and `embedding`.

        `layer_inputs` is what layers keep for their backward, of all rows in flight, when the last has gone forward;
        `layer`, `head`, `embedding` are what comes on top while these run, forward or backward.
        """
        saved = self.grown("saved", tokens)
        layer = max(self.grown("forward", tokens), self.grown("backward", tokens))
        sizes = {
            "parameters": self.static.parameters,
            "gradients": self.static.gradients,
            "optimizer": self.static.optimizer,
            "optimizer_step": self.static.optimizer_step,
            "layer_inputs": saved,
            "layer": layer - saved,
            "head": self.grown("head", tokens) - saved,
            "embedding": self.grown("embedding", tokens) - saved,
        }
        return {name: max(0, round(size)) for name, size in sizes.items()} | {"total": round(self.peak(tokens))}

    def longest(self, memory: int, host_memory: float) -> int:
        """The longest row that fits both, a multiple of `unit`; 0 if none does."""

        def fits(units: int) -> bool:
            tokens = units * self.unit
            return self.peak(tokens) <= memory and self.grown("host", tokens) <= host_memory

        low, high = 0, LONGEST // self.unit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low * self.unit


def optimizer_bytes(elements: int, dtype: torch.dtype, parallel: ParallelConfig, data: int) -> tuple[int, int]:
    """What megatron-core's Adam keeps and what it adds while it steps, on one rank.

    Two fp32 moments, and an fp32 copy of parameters of lower precision; shared by data-parallel ranks with the
    distributed optimizer. Torch's AdamW steps all parameters at once on a GPU, with one fp32 temporary of each (fused
    optimizers have none).
    """
    own = -(-elements // data) if parallel.distributed_optimizer else elements
    return own * (8 if dtype == torch.float32 else 12), own * 4


def stage_static(job: Job, stage: int, data: int) -> Static:
    """Static bytes of a stage: its real modules and buffers, without data."""
    found = _fake(job, Variant(), stage, None)
    kept, stepping = optimizer_bytes(found.elements, job.dtype, job.parallel, data)
    return Static(found.parameters, found.gradients, kept, stepping)


def estimate(job: Job, variant: Variant, static: Static, stage: int, rows: int, tokens: int) -> Estimate:
    """Fake small steps of a stage and describe how they grow.

    Args:
        static: from `stage_static`.
        stage: the first or the last of the pipeline; a stage between holds fewer rows than the first, and no head.
        rows: micro-batches of a step and replica.
        tokens: the row length that is asked about; a short one is faked itself.
    """
    pipeline = job.parallel.pipeline
    unit = job.parallel.tensor if job.parallel.sequence else 1
    layers, in_flight = job.arch.layers // pipeline, min(rows, pipeline - stage)
    few = job.with_stages(min(pipeline, 2))
    stage_of_few = 0 if stage == 0 else 1

    def measure(length: int, layers: int, count: int) -> Footprint:
        return _fake(few.with_layers(layers), variant, stage_of_few, (length, count))

    lengths = _lengths(variant, tokens, unit)
    growth = fit(measure, lengths, layers, in_flight, rows if pipeline > 1 else 1)
    more_rows = pipeline > 1 and rows > in_flight
    return Estimate(stage, static, growth, layers, in_flight, more_rows, unit)


def _lengths(variant: Variant, tokens: int, unit: int) -> list[int]:
    """Row lengths to fake: whole rows far apart; a streamed row of one and two chunks, and two so long that attention
    takes its keys and queries in full blocks. `tokens` is among them if it is short."""
    lengths = _WHOLE_ROWS
    if variant.stream is not None:
        chunk = variant.stream.chunk_tokens
        many = max(2, -(-max(attention.KEYS_AT_ONCE, layer.QUERIES_AT_ONCE) // chunk) + 1)
        lengths = tuple(count * chunk for count in (1, 2, many, many + 1))
    return sorted({-(-length // unit) * unit for length in (*lengths, min(tokens, lengths[-1]))})


def _fake(job: Job, variant: Variant, stage: int, row: tuple[int, int] | None) -> Footprint:
    """One step of rows (length, count) without data; without a row, only what is built before it. Groups are new each
    time: megatron-core keeps the largest buffer of gathered activations it ever needed."""
    with fake_groups(stage, job.parallel.tensor, job.parallel.pipeline) as groups, fake_tensors():
        step = WatchedStep(job, variant, groups)
        return step.run(*row) if row else step.found
