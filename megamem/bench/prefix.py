"""`megamem bench prefix`: a training step on one prompt and its responses, with and without sharing the prompt.

A causal model scores every response token; a block-causal one (`block` > 0) does so in `draws` noisy copies of every
response that mask all of it. Coefficients are known beforehand, as on-policy and supervised steps have them.

    repeated           every draw has a prompt of its own, packed into rows of at most `row_tokens`; plain layers
    prefix_grouper     the published package in a plain torch model (`prefix_peer.py`); causal models only
    grouped            one row: the prompt once, then all draws; plain layers. The fastest way to share
    grouped_streamed   the same row, streamed layer by layer: the least memory; the last layer skips the prompt
    grouped_handle     the prompt is a row of its own whose keys and values the draws' rows see

Bytes are live tensor storages above parameters and gradient buffers; seconds, wall and processor, are medians.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from megamem.bench.flops import counted, pairs_of, predicted
from megamem.bench.measure import chosen_variants, largest_difference
from megamem.bench.prefix_peer import INSTALL, PrefixGrouperModel, installed
from megamem.config.architecture import Architecture
from megamem.config.schema import ParallelConfig
from megamem.convert.source import RandomSource
from megamem.convert.weights import load_weights, stage_parameters
from megamem.diffusion.noise import draw_noise
from megamem.errors import UserError
from megamem.layout.layout import CAUSAL, rows
from megamem.layout.packing import RowShape, Share
from megamem.models.build import build_model
from megamem.models.qwen import tensor_maps
from megamem.models.row import RowParams
from megamem.models.runner import Runner, StreamedPipeline
from megamem.models.stage import Window
from megamem.platform.groups import Groups, StageLinks
from megamem.platform.memory import LiveStorages
from megamem.platform.rng import generator
from megamem.stream.layer import StreamOptions
from megamem.train.draws import DrawnModel, DrawRow, DrawRows, Sample
from megamem.train.optim import wrap_for_training

PEER = "prefix_grouper"
ALL = ("repeated", PEER, "grouped", "grouped_streamed", "grouped_handle")


@dataclass(frozen=True)
class Sizes:
    """The model, one prompt of `prefix` tokens, and `group` responses of `suffix` tokens with `draws` draws each.

    Attributes:
        block: tokens of a block of a block-causal model; 0: a causal model, whose one draw is the response itself.
        row_tokens: a row holds at most this many, or one longer tree.
    """

    prefix: int = 2048
    suffix: int = 64
    group: int = 8
    draws: int = 1
    block: int = 0
    layers: int = 4
    hidden: int = 512
    ffn: int = 1536
    heads: int = 8
    kv_heads: int = 8
    vocab: int = 2048
    row_tokens: int = 32768
    chunk_tokens: int = 512
    head_tokens: int = 256

    def __post_init__(self) -> None:
        if self.draws > 1 and not self.block:
            raise UserError(f"--draws = {self.draws} needs --block: a causal model has one draw, the response itself")
        if self.heads % self.kv_heads:
            raise UserError(f"--kv-heads = {self.kv_heads} must divide --heads = {self.heads}")

    def architecture(self) -> Architecture:
        """Of the model; a causal one predicts the next token."""
        return Architecture(
            layers=self.layers, hidden=self.hidden, ffn=self.ffn, heads=self.heads, kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads, vocab_rows=self.vocab, max_positions=self.prefix + self.suffix,
            attention="block" if self.block else "causal", block_length=self.block or None,
            shifted_logits=not self.block, mask_id=0 if self.block else None,
        )  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """How the prompt is shared; window: of the streamed schedule, None for plain layers."""

    share: Share
    window: Window | None = None


VARIANTS = {
    "repeated": Variant("none"),
    "grouped": Variant("row"),
    "grouped_streamed": Variant("row", "layer"),
    "grouped_handle": Variant("handle", "stage"),
}


@dataclass(frozen=True)
class Result:
    """One variant: counted operations, bytes at most alive, median wall and processor seconds (of the step, and wall
    per draw), largest relative gradient difference (Frobenius, over parameters) to the first variant measured."""

    variant: str
    flops: int
    peak_bytes: int
    seconds: float
    cpu_seconds: float
    seconds_per_draw: float
    max_rel_grad_diff: float


class _Group:
    """The prompt, its responses and what their gradient is asked for."""

    def __init__(self, sizes: Sizes):
        key, low = generator(0, "bench prefix"), 1  # 0 is the mask
        plan = draw_noise("full", sizes.suffix, sizes.draws, key)
        self.sizes = sizes
        self.prompt_P = torch.randint(low, sizes.vocab, (sizes.prefix,), generator=key)
        self.response_GR = torch.randint(low, sizes.vocab, (sizes.group, sizes.suffix), generator=key)
        self.coefficient_GDR = torch.randn(sizes.group, sizes.draws, sizes.suffix, generator=key)
        self._samples = [Sample(self.prompt_P, response_R, plan, 1.0, group=0) for response_R in self.response_GR]

    def rows(self, share: Share, arch: Architecture, device: torch.device) -> list[DrawRow]:
        """The draws as training packs them."""
        drawn = DrawnModel(arch.sequence_attention, arch.shifted_logits, arch.mask_id, share)
        packed = DrawRows(self._samples, drawn, RowShape(self.sizes.row_tokens), device)
        return [self._plain(row) if share == "none" and not self.sizes.block else row for row in packed]

    def _plain(self, row: DrawRow) -> DrawRow:
        """The same row with every sequence as one segment: no seam where a prompt could be shared."""
        lengths = [self.sizes.prefix + self.sizes.suffix] * len(row.sample_U)
        return replace(row, params=RowParams(layout=rows(lengths, CAUSAL)))

    def loss(self, row: DrawRow, logp_T: Tensor) -> tuple[Tensor, dict]:
        """`sum coefficient * log p`: every draw of a row has all its tokens there, in order."""
        coefficient_UR = self.coefficient_GDR.to(logp_T)[row.sample_U, row.draw_U]
        return (logp_T * coefficient_UR.flatten()).sum(), {}


class _Ours:
    """A variant of our own: its model, and how rows go through it."""

    def __init__(self, variant: Variant, group: _Group, groups: Groups, dtype: torch.dtype):
        sizes, self._arch = group.sizes, group.sizes.architecture()
        # Saved attention outputs: all rows are in memory at once, so they are small beside the layers' inputs.
        options = StreamOptions(sizes.chunk_tokens, sizes.head_tokens, "input+attention")
        stream = None if variant.window is None else options
        model = build_model(self._arch, groups, dtype, stream=stream)
        maps = tensor_maps(self._arch)
        load_weights(model, maps, self._arch, RandomSource(maps, self._arch, 0), groups)
        self.parameters = stage_parameters(model)
        pipeline = None if variant.window is None else StreamedPipeline(StageLinks(), variant.window)
        self._runner = Runner(wrap_for_training(model, ParallelConfig()), groups, "causal", pipeline)
        self._variant, self._group = variant, group

    def run(self) -> None:
        """One step; its gradient is added to the buffers."""
        drawn = self._group.rows(self._variant.share, self._arch, self._runner.groups.device.torch)
        self._runner.forward_backward(drawn, self._group.loss, linear=True)

    def zero(self) -> None:
        self._runner.model.zero_grad_buffer()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.main_grad.clone() for name, p in self.parameters.items()}


class _Peer:
    """The published package."""

    def __init__(self, group: _Group, ours: _Ours, device: torch.device):
        self._model = PrefixGrouperModel(group.sizes.architecture(), ours.parameters)
        dtype = next(iter(ours.parameters.values())).dtype
        self._inputs = (
            group.prompt_P.to(device),
            group.response_GR.to(device),
            group.coefficient_GDR[:, 0].to(device, dtype),
        )

    def run(self) -> None:
        self._model.step(*self._inputs)

    def zero(self) -> None:
        for parameter in self._model.parameters.values():
            parameter.grad.zero_()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self._model.parameters.items()}


Step = _Ours | _Peer


def parse_variants(text: str) -> list[str]:
    """Names from a comma-separated list; all of them for an empty one. The others are compared with the first.

    Raises:
        UserError: an unknown name, or the package first, whose weights are copies of one of ours.
    """
    names = chosen_variants(text, ALL)
    if names[0] == PEER:
        raise UserError(f"--variants = {text!r}: the first is what others are compared with, and {PEER} cannot be it")
    return names


def bench_prefix(
    sizes: Sizes,
    groups: Groups,
    repeats: int,
    progress: Callable[[str], None],
    variants: Sequence[str] = ALL,
    dtype: torch.dtype = torch.float32,
) -> list[Result]:
    """Measure variants: operations, memory and gradients first, then `repeats` rounds of times, taking turns."""
    group = _Group(sizes)
    steps: dict[str, Step] = {}
    for name in variants:
        if name in VARIANTS:
            steps[name] = _Ours(VARIANTS[name], group, groups, dtype)
        elif not sizes.block and installed():
            steps[name] = _Peer(group, steps[variants[0]], groups.device.torch)
        elif not sizes.block:
            progress(INSTALL)
    flops, peaks, gradients = {}, {}, {}
    for name, step in steps.items():
        flops[name] = counted(step.run)  # also makes what a process makes once (random states, caches)
        peaks[name], gradients[name] = _memory(step)
        progress(f"{name}: {flops[name] / 1e9:.1f} GFLOP, peak {peaks[name] / 2**20:.1f} MiB")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(repeats):
        for name, step in steps.items():
            times[name].append(_time(step, groups))
            progress(f"round {turn + 1} of {repeats}: {name}: {times[name][-1][0]:.3f} s")
    found = []
    for name in steps:
        seconds, cpu_seconds = (statistics.median(column) for column in zip(*times[name], strict=True))
        difference = largest_difference(gradients[name], gradients[variants[0]])
        per_draw = seconds / (sizes.group * sizes.draws)
        found.append(Result(name, flops[name], peaks[name], seconds, cpu_seconds, per_draw, difference))
    return found


def count(sizes: Sizes) -> dict[str, int]:
    """Operations of a step of the variants without recomputation, from their layouts: no model is built.

    The package repeats keys, so its second call pairs every response token with the prompt and its whole response.
    """
    arch, group = sizes.architecture(), _Group(sizes)
    scored, found = sizes.group * sizes.draws * sizes.suffix, {}
    for name in ("repeated", "grouped"):
        layouts = [row.params.layout for row in group.rows(VARIANTS[name].share, arch, torch.device("cpu"))]
        found[name] = predicted(arch, sum(layout.length for layout in layouts), scored, pairs_of(layouts))
    if not sizes.block:
        p, all_r = sizes.prefix, sizes.group * sizes.suffix
        pairs = p * (p + 1) // 2 + all_r * (p + sizes.suffix)
        found[PEER] = predicted(arch, p + all_r, scored, pairs)
    return found


def _memory(step: Step) -> tuple[int, dict[str, Tensor]]:
    """Peak bytes, and the gradient."""
    step.zero()
    with LiveStorages() as memory:
        step.run()
    return memory.peak, step.gradients()


def _time(step: Step, groups: Groups) -> tuple[float, float]:
    """Wall and processor seconds."""
    step.zero()
    groups.device.synchronize()
    started = time.perf_counter(), time.process_time()
    step.run()
    groups.device.synchronize()
    return time.perf_counter() - started[0], time.process_time() - started[1]


def table(results: Sequence[Result]) -> str:
    """Results for a person, with ratios to the first."""
    base = results[0]
    lines = [
        f"{'variant':18}{'GFLOP':>10}{'ratio':>7}{'peak MiB':>10}{'ratio':>7}{'seconds':>9}{'ratio':>7}"
        f"{'CPU s':>9}{'ratio':>7}{'ms/draw':>9}{'grad diff':>11}"
    ]
    lines += [
        f"{r.variant:18}{r.flops / 1e9:10.1f}{r.flops / base.flops:7.3f}"
        f"{r.peak_bytes / 2**20:10.1f}{r.peak_bytes / base.peak_bytes:7.3f}"
        f"{r.seconds:9.3f}{r.seconds / base.seconds:7.3f}{r.cpu_seconds:9.3f}{r.cpu_seconds / base.cpu_seconds:7.3f}"
        f"{r.seconds_per_draw * 1e3:9.1f}{r.max_rel_grad_diff:11.1e}"
        for r in results
    ]
    return "\n".join(lines)


def count_table(flops: dict[str, int]) -> str:
    """Counts for a person, with ratios to `repeated`."""
    return "\n".join(f"{name:18}{n / 1e12:12.4f} TFLOP{n / flops['repeated']:8.4f}" for name, n in flops.items())


def as_json(results: Sequence[Result], sizes: Sizes) -> dict:
    """One object: what was measured, and `rows`."""
    return {"sizes": asdict(sizes), "threads": torch.get_num_threads(), "rows": [asdict(r) for r in results]}


def count_as_json(flops: dict[str, int], sizes: Sizes) -> dict:
    """One object: what was counted, and `rows`."""
    return {"sizes": asdict(sizes), "rows": [{"variant": name, "flops": n} for name, n in flops.items()]}
