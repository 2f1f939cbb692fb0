"""One training step of one rank, watched: how many bytes live in each part of it.

The same code measures a real step and, inside `platform/fake.py: fake_tensors`, a step without data. It is the step of
`train/`: the model, the wrapper with its gradient buffers, the rows through megatron-core's schedule (never the
streamed one). Left out is what needs values or a network: weights, and the reduction of gradients, which works inside
their buffers.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megamem.config.architecture import Architecture
from megamem.config.schema import ParallelConfig
from megamem.layout.packing import sequence_layout
from megamem.models.build import build_model
from megamem.models.gpt import DiffusionGPT, LogProbHead
from megamem.models.row import Row, RowParams
from megamem.models.runner import Runner
from megamem.plan.variants import StockHead, Variant
from megamem.platform.groups import Groups
from megamem.platform.host import to_host
from megamem.platform.memory import LiveStorages
from megamem.stream.layer import StreamedTransformerLayer
from megamem.train.optim import wrap_for_training


@dataclass(frozen=True)
class Job:
    """What is trained, whatever its length.

    Attributes:
        arch: the whole model.
        dtype: of parameters and activations.
        parallel: degrees and switches.
        attention: how a sequence attends (see `layout.packing.sequence_layout`).
        prompt: tokens of a sequence's prompt (at most half of it), where attention distinguishes it.
    """

    arch: Architecture
    dtype: torch.dtype
    parallel: ParallelConfig
    attention: str
    prompt: int = 256

    def with_layers(self, on_stage: int) -> "Job":
        """The same model with that many layers on every stage."""
        layers = on_stage * self.parallel.pipeline
        return replace(self, arch=self.arch.model_copy(update={"layers": layers}))

    def with_stages(self, pipeline: int) -> "Job":
        """The same layers per stage with another number of stages."""
        on_stage = self.arch.layers // self.parallel.pipeline
        return replace(self, parallel=self.parallel.model_copy(update={"pipeline": pipeline})).with_layers(on_stage)


# Parts of a step, in the order in which a row first meets them: the embedding and its gradient, the layers' forward,
# head and loss with their gradients, the layers' backward.
PARTS = ("embedding", "forward", "head", "backward")
Place = tuple[str, str]  # a part, and the lines of megamem that were at work


@dataclass
class Footprint:
    """Bytes of one rank.

    Attributes:
        parameters, gradients: live all the time.
        elements: parameters (with padding) that the optimizer works on, over all data-parallel ranks.
        saved: device bytes above these after the forward of the layers, with all rows in flight: what layers keep.
        host: of them in host memory, at most.
        peaks: largest device bytes above parameters and gradients at each place where something was allocated.
    """

    parameters: int = 0
    gradients: int = 0
    elements: int = 0
    saved: int = 0
    host: int = 0
    peaks: dict[Place, int] = field(default_factory=dict)

    def peak(self, *parts: str) -> int:
        """Largest of these parts (all, if none is named)."""
        return max((size for (part, _), size in self.peaks.items() if part in (parts or PARTS)), default=0)


class _Watch(LiveStorages):
    """Sorts what is allocated by place."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.base, self.peaks = PARTS[0], 0, {}
        self._operator = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._operator = function
        return super().__torch_dispatch__(function, types, args, kwargs)

    def start(self) -> None:
        """Count from here on."""
        self.base, self.peaks = self.device_bytes, {}

    def _see(self, storage: torch.UntypedStorage) -> None:
        super()._see(storage)
        place = (self.part, f"{self._operator} {_lines_at_work()}")
        self.peaks[place] = max(self.peaks.get(place, 0), self.device_bytes - self.base)


def _lines_at_work(count: int = 2) -> str:
    """The innermost lines of megamem that are running."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < count:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("megamem.") and not module.startswith(("megamem.platform", __name__)):
            found.append(f"{module}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(found)


class WatchedStep:
    """A stage of the model, ready to run steps.

    Attributes:
        model: the stage.
        found: what was there before the first step.
    """

    def __init__(self, job: Job, variant: Variant, groups: Groups):
        self._job, self._variant, self._groups = job, variant, groups
        self.found = Footprint()
        self._meter = _Watch()
        with self._meter:
            self.model = build_model(
                job.arch, groups, job.dtype, job.parallel.sequence, variant.recompute, variant.stream
            )
            self.found.parameters = self._meter.bytes
            ddp = wrap_for_training(self.model, job.parallel.model_copy(update={"overlap_grad_reduce": False}))
            self.found.gradients = self._meter.bytes - self.found.parameters
        self.found.elements = sum(buffer.numel for buffer in ddp.buffers)
        self.model.config.finalize_model_grads_func = None
        self.model.stream_short_rows = True
        if variant.stream is not None and variant.recompute:
            _recompute_layers(self.model)
        for layer in self.model.decoder.layers:
            if isinstance(layer, StreamedTransformerLayer):
                layer.to_host = lambda x: self._meter.mark_host(to_host(x))
                layer.to_device = lambda kept, device: kept.clone()  # where the device is the host, nothing would move
        self._runner = Runner(ddp, groups, job.attention)

    def run(self, tokens: int, rows: int = 1) -> Footprint:
        """Forward and backward of some rows of one sequence each, every position scored."""
        found = replace(self.found)
        self._meter.start()
        with self._meter, _watch(self.model, self._meter, found):
            lazy = _Rows(partial(self._row, tokens), rows)
            self._runner.forward_backward(lazy, lambda row, logp_T: (logp_T.sum(), {}))
        return replace(found, peaks=self._meter.peaks)

    def _row(self, tokens: int) -> Row:
        ids_S, target_T = (torch.zeros(tokens, dtype=torch.int64, device=self._groups.device.torch) for _ in range(2))
        prompt = min(self._job.prompt, tokens // 2)
        layout = sequence_layout(self._job.attention, [(prompt, tokens - prompt)])
        stock = self._variant.stream is None and not self._variant.own_head
        head = StockHead(target_T) if stock else LogProbHead(target_T)
        return Row(ids_S, RowParams(layout=layout), None, head)


class _Rows(Sequence[Row]):
    """Rows that are built when they are run and held by no one else, as those of training."""

    def __init__(self, build: Callable[[], Row], count: int):
        self._build, self._count = build, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._build()


def _recompute_layers(model: DiffusionGPT) -> None:
    """Let streamed layers run whole, inside megatron-core's recompute. For bytes only: under sequence parallelism the
    row's tokens are in the order of its chunks, which whole layers do not know."""
    for layer in model.decoder.layers:
        layer.forward = partial(TransformerLayer.forward, layer)


@contextmanager
def _watch(model: DiffusionGPT, meter: _Watch, found: Footprint) -> Iterator[None]:
    """Tell the meter which part runs, and take down what layers keep."""

    def enter(part: str) -> None:
        meter.part = part

    def enter_with_gradient(of: Tensor, part: str) -> None:
        if of.requires_grad:
            of.register_hook(lambda _: enter(part))

    def layers_done(module, args, output) -> None:
        found.saved = max(found.saved, meter.device_bytes - meter.base)
        found.host = max(found.host, meter.host_bytes)
        enter("head")
        enter_with_gradient(output, "backward")

    handles = [
        model.decoder.register_forward_pre_hook(lambda *_: enter("forward")),
        model.decoder.register_forward_hook(layers_done),
    ]
    if model.pre_process:
        handles.append(
            model.embedding.register_forward_hook(lambda module, args, out: enter_with_gradient(out, "embedding"))
        )
    enter("embedding")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
