"""`megamem bench stream`: plain, full recompute and streamed steps of one model, in one process and interleaved.

A step is the forward and backward of one row, every position scored. `plain` and `recompute` use megatron-core's own
head (full logits, its vocabulary-parallel cross-entropy); streamed variants use the streamed head. Bytes are live
tensor storages above parameters and gradient buffers. Seconds are medians.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megamem.bench.measure import largest_difference
from megamem.config.architecture import Architecture
from megamem.config.schema import ParallelConfig
from megamem.convert.source import RandomSource
from megamem.convert.weights import load_weights, stage_parameters
from megamem.errors import UserError
from megamem.layout.layout import CAUSAL, FULL, Relation, block, rows
from megamem.models.build import build_model
from megamem.models.gpt import Head, LogProbHead
from megamem.models.llada import tensor_maps
from megamem.models.row import Row, RowParams
from megamem.models.runner import Runner, StreamedPipeline
from megamem.plan.variants import StockHead, Variant
from megamem.platform.groups import Groups, StageLinks
from megamem.platform.host import to_device, to_host
from megamem.platform.memory import LiveStorages
from megamem.stream.layer import StreamedTransformerLayer, StreamOptions
from megamem.train.optim import wrap_for_training


@dataclass(frozen=True)
class Sizes:
    """The model and row that are measured."""

    tokens: int = 4096
    layers: int = 8
    hidden: int = 512
    ffn: int = 1536
    heads: int = 8
    vocab: int = 32000
    chunk_tokens: int = 256
    head_tokens: int = 256


@dataclass(frozen=True)
class Result:
    """One variant: bytes at most alive (all, and on the device), median seconds, largest relative gradient difference
    (Frobenius, over parameters) to `plain`."""

    variant: str
    peak_bytes: int
    device_peak_bytes: int
    seconds: float
    max_rel_grad_diff: float


def variants(sizes: Sizes) -> dict[str, Variant]:
    """Every variant, in the order of the table.

    `streamed_attention` is for speed: its chunks have four times the tokens. With inputs in host memory the head would
    be the peak: it gets half of the rows.
    """
    stream = StreamOptions(sizes.chunk_tokens, sizes.head_tokens)
    fast = StreamOptions(4 * sizes.chunk_tokens, sizes.head_tokens, "input+attention")
    small = StreamOptions(sizes.chunk_tokens, -(-sizes.head_tokens // 2), offload="cpu")
    return {
        "plain": Variant(),
        "recompute": Variant(recompute=True),
        "streamed": Variant(stream),
        "streamed_attention": Variant(fast),
        "streamed_offload": Variant(small),
    }


def relation(name: str) -> Relation:
    """`full`, `causal` or `block:N`.

    Raises:
        UserError: anything else.
    """
    if name in ("full", "causal"):
        return {"full": FULL, "causal": CAUSAL}[name]
    kind, _, size = name.partition(":")
    if kind == "block" and size.isdigit() and int(size) > 0:
        return block(int(size))
    raise UserError(f"--attention = {name!r}; allowed: full, causal, block:N with N at least 1")


def bench_stream(
    sizes: Sizes,
    attention: str,
    groups: Groups,
    repeats: int,
    progress: Callable[[str], None],
    names: Sequence[str] | None = None,
) -> list[Result]:
    """Measure variants (all by default): first memory and gradients, then `repeats` rounds of times, taking turns.

    Gradients are compared with those of `plain`, or of the first variant where it is left out.
    """
    arch = Architecture(
        layers=sizes.layers, hidden=sizes.hidden, ffn=sizes.ffn, heads=sizes.heads, kv_heads=sizes.heads,
        head_dim=sizes.hidden // sizes.heads, vocab_rows=sizes.vocab, max_positions=sizes.tokens,
        mask_id=0, eos_id=0, pad_id=0,
    )  # fmt: skip
    seen = relation(attention)
    every = variants(sizes)
    steps = {name: _Step(arch, sizes, every[name], seen, groups) for name in names or every}
    first = next(iter(steps))
    memory, gradients = {}, {}
    progress(f"warm-up: {first}")
    steps[first].run()  # what a process makes once (random states, caches) is no step's
    for name, step in steps.items():
        memory[name], gradients[name] = step.measure()
        mib = [bytes_ / 2**20 for bytes_ in (memory[name].peak, memory[name].device_peak)]
        progress(f"memory: {name}: peak {mib[0]:.1f} MiB, on the device {mib[1]:.1f} MiB")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats):
        for name, step in steps.items():
            seconds[name].append(step.time())
            progress(f"round {turn + 1} of {repeats}: {name}: {seconds[name][-1]:.3f} s")
    return [
        Result(
            name,
            memory[name].peak,
            memory[name].device_peak,
            statistics.median(seconds[name]),
            largest_difference(gradients[name], gradients[first]),
        )
        for name in steps
    ]


class _Step:
    """One variant's model and row."""

    def __init__(self, arch: Architecture, sizes: Sizes, variant: Variant, seen: Relation, groups: Groups):
        device = groups.device.torch
        self._model = build_model(arch, groups, torch.float32, recompute=variant.recompute, stream=variant.stream)
        maps = tensor_maps(arch)
        load_weights(self._model, maps, arch, RandomSource(maps, arch, 0), groups)
        self._ddp = wrap_for_training(self._model, ParallelConfig())
        # The streamed schedule owns the gradient that comes into a layer and writes the outgoing one over it.
        own = None if variant.stream is None else StreamedPipeline(StageLinks(), "layer")
        self._runner = Runner(self._ddp, groups, "full", own)
        generator = torch.Generator().manual_seed(0)
        self._ids, self._target = (
            torch.randint(0, sizes.vocab, (sizes.tokens,), generator=generator).to(device) for _ in range(2)
        )
        self._coefficient = torch.randn(sizes.tokens, generator=generator).to(device)
        self._layout = rows([sizes.tokens], seen)
        self._stock = variant.stream is None

    def _row(self) -> Row:
        head: Head = StockHead(self._target) if self._stock else LogProbHead(self._target)
        position = torch.arange(len(self._ids), device=self._ids.device)
        return Row(self._ids, RowParams(layout=self._layout), position, head)

    def run(self) -> None:
        """One forward and backward; gradients start from zero."""
        self._ddp.zero_grad_buffer()
        loss = lambda row, logp: ((logp * self._coefficient).sum(), {})  # noqa: E731
        # Known coefficients, as on-policy and supervised steps have; the stock head has no use for that.
        self._runner.forward_backward([self._row()], loss, linear=not self._stock)

    def measure(self) -> tuple[LiveStorages, dict[str, Tensor]]:
        """Peak bytes of a step, and its gradients."""
        meter = LiveStorages()
        layers = [x for x in self._model.decoder.layers if isinstance(x, StreamedTransformerLayer)]
        for layer in layers:
            layer.to_host = lambda x: meter.mark_host(to_host(x))
            if self._runner.groups.device.is_cpu:  # where the device is the host nothing would move, or be counted
                layer.to_device = lambda kept, device: kept.clone()
        with meter:
            self.run()
        for layer in layers:
            layer.to_host, layer.to_device = to_host, to_device
        return meter, {name: p.main_grad.clone() for name, p in stage_parameters(self._model).items()}

    def time(self) -> float:
        """Seconds of a step."""
        device = self._runner.groups.device
        device.synchronize()
        started = time.perf_counter()
        self.run()
        device.synchronize()
        return time.perf_counter() - started


def table(results: Sequence[Result]) -> str:
    """Results for a person, with ratios to full recompute (or to the first variant where it is left out)."""
    base = next((r for r in results if r.variant == "recompute"), results[0])
    lines = [f"{'variant':20}{'peak MiB':>10}{'device MiB':>12}{'ratio':>8}{'seconds':>9}{'ratio':>8}{'grad diff':>11}"]
    lines += [
        f"{r.variant:20}{r.peak_bytes / 2**20:10.1f}{r.device_peak_bytes / 2**20:12.1f}"
        f"{r.device_peak_bytes / base.device_peak_bytes:8.3f}{r.seconds:9.3f}{r.seconds / base.seconds:8.3f}"
        f"{r.max_rel_grad_diff:11.1e}"
        for r in results
    ]
    return "\n".join(lines)


def as_json(results: Sequence[Result], sizes: Sizes, attention: str) -> dict:
    """One object: what was measured, and `rows`."""
    return {"sizes": asdict(sizes), "attention": attention, "rows": [asdict(r) for r in results]}
