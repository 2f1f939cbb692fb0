"""This rank's layers on the units of streamed rows: the streamed pipeline's `Stage` (DESIGN section 3.4).

Stage-major: a unit goes through all layers of the stage before the next one does, forward and backward, with the row's
keys and values (and their gradients) of all these layers open. A row of one unit goes layer by layer instead and keeps
layer inputs only. No autograd graph lives across ops, but the embedding's.

Shapes: S row tokens, U tokens of a unit, C of a chunk (all this rank's), T scored tokens, H hidden.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from megamem.layout.grid import ChunkGrid
from megamem.layout.layout import Layout
from megamem.models.gpt import DiffusionGPT, LogProbHead
from megamem.models.row import Row
from megamem.stream.gradients import GradientSums
from megamem.stream.head import HeadSteps
from megamem.stream.layer import LayerSteps, OpenRow, row_units
from megamem.stream.simulate import UnitCost, layout_costs

Window = Literal["layer", "stage"]
# (row, what its head returns) -> (scalar to differentiate, what to report)
Loss = Callable[[Any, Tensor], tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True)
class Cut:
    """How a row crosses the pipeline: its layout, its chunks, which of them cross together, and its prefix (`Row`)."""

    layout: Layout
    grid: ChunkGrid
    units: tuple[range, ...]
    prefix: int | None = None

    def tokens(self, unit: int) -> slice:
        """Where a unit lies in a rank's own tokens."""
        spans, chunks = self.grid.spans(), self.units[unit]
        return self.grid.local((spans[chunks[0]][0], spans[chunks[-1]][1]))


def cut_row(model: DiffusionGPT, row: Row, window: Window) -> Cut:
    """Window `layer` runs a row layer by layer: one unit."""
    start = row.params.layout.length - len(row.ids_S)
    assert window == "stage" or not start, "a prefix is shared where rows keep their keys and values"
    grid = model.chunk_grid(row.params, short_rows=True, start=start)
    units = row_units(row.params.layout, grid)
    whole = (range(len(grid.spans())),)
    return Cut(row.params.layout, grid, whole if window == "layer" else units, row.prefix)


def unit_costs(model: DiffusionGPT, cut: Cut) -> list[UnitCost]:
    """Forward and backward work of a row's units in one layer, in multiply-adds summed over tensor-parallel ranks."""
    c = model.config
    width = c.num_attention_heads * c.kv_channels
    attention = c.hidden_size * 2 * (width + c.num_query_groups * c.kv_channels)
    token, pair = attention + 3 * c.hidden_size * c.ffn_hidden_size, 2 * width
    return layout_costs(cut.layout, cut.grid.spans(), cut.units, token, pair)


@dataclass
class _OpenMicrobatch:
    """What the stage holds of a row whose units are on their way."""

    row: Row
    cut: Cut
    layers: list[tuple[LayerSteps, OpenRow]]
    prefix: "_OpenMicrobatch | None" = None
    by_layer: bool = False  # layer after layer, keeping no keys and values
    gradients: GradientSums = field(default_factory=GradientSums)
    embedded_SBH: Tensor | None = None  # first stage: the layers' input, until all units have taken theirs
    hidden_U: dict[int, Tensor] = field(default_factory=dict)  # last stage: units before the last norm
    head: HeadSteps | None = None
    scored: list[slice] | None = None
    logp_T: Tensor | None = None
    grad_T: Tensor | None = None


class StagePass:
    """One pass of rows through this stage: implements `stream.pipeline.Stage`.

    Attributes:
        results: on the last stage, what was reported (or, without gradients, evaluated) for every row.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Row],
        cuts: Sequence[Cut],
        evaluate: Loss | Callable[[Any, Any], Any],
        training: bool,
        linear: bool = False,
    ):
        """Args:
        model: the stage, bare or wrapped for data parallelism.
        rows: built on access.
        cuts: of every row.
        evaluate: with `training` a `Loss`, else (row, head's output) -> what to return.
        linear: the loss's gradient does not depend on the log-probs.
        """
        self.results: list[Any] = []
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._model: DiffusionGPT = model.module if self._ddp else model
        self._rows, self._cuts, self._evaluate = rows, cuts, evaluate
        self._training, self._linear = training, linear
        self._open: dict[int, _OpenMicrobatch] = {}
        # Rows that others see must stay until their last reader is done.
        self._readers = Counter(cut.prefix for cut in cuts if cut.prefix is not None)
        self._finished = 0

    def shape(self, microbatch: int, unit: int) -> tuple[int, int, int]:
        part = self._cuts[microbatch].tokens(unit)
        return part.stop - part.start, 1, self._model.config.hidden_size

    # Forward.

    @torch.no_grad()
    def forward(self, microbatch: int, unit: int, x: Tensor | None) -> Tensor | None:
        if unit == 0:
            self._open[microbatch] = self._begin(microbatch)
        state = self._open[microbatch]
        if self._model.pre_process:
            x = state.embedded_SBH[state.cut.tokens(unit)]
        for steps, opened in state.layers:
            x = self._forward_layer(steps, opened, unit, x, state.by_layer)
        last_unit = unit == len(state.cut.units) - 1
        if last_unit:
            state.embedded_SBH = None
        if not self._model.post_process:
            if last_unit and not self._training:
                self._close(microbatch)
            return x
        state.hidden_U[unit] = x
        if self._training and not self._linear:
            for i, hidden_CBH in self._chunks(state, unit):
                state.head.forward(self._norm(hidden_CBH), i, state.scored[i], state.logp_T)
        if last_unit and not self._training:
            hidden_SBH = torch.cat([state.hidden_U.pop(u) for u in range(len(state.cut.units))])
            row = state.row
            output = self._model.predict(self._norm(hidden_SBH), row.params, row.position_T, row.head)
            self.results.append(self._evaluate(row, output))
            self._close(microbatch)
        return None

    def _close(self, microbatch: int) -> None:
        """Forget a row, or what others no longer see of it."""
        prefix = self._open[microbatch].cut.prefix
        if not self._readers[microbatch]:
            del self._open[microbatch]
        if prefix is not None:
            self._readers[prefix] -= 1
            if not self._training and not self._readers[prefix]:
                del self._open[prefix]

    def _begin(self, microbatch: int) -> _OpenMicrobatch:
        row, cut, model = self._rows[microbatch], self._cuts[microbatch], self._model
        row.params.grid = cut.grid
        row.params.idle = model.idle_chunks(row.params, row.position_T, row.head)
        steps = [LayerSteps(layer, row.params) for layer in model.decoder.layers]
        prefix = None if row.prefix is None else self._open[row.prefix]
        alone = prefix is None and not self._readers[microbatch]
        if prefix is None:
            layers = [(step, OpenRow()) for step in steps]
        else:
            behind = [opened.behind(cut.grid.start, cut.grid.length) for _, opened in prefix.layers]
            layers = list(zip(steps, behind, strict=True))
        state = _OpenMicrobatch(row, cut, layers, prefix, by_layer=alone and len(cut.units) == 1)
        if model.pre_process:
            state.embedded_SBH = model.embed(row.ids_S[None], row.params)
        if model.post_process and self._training:
            assert isinstance(row.head, LogProbHead), row.head
            state.head = model.head_steps(row.params, row.position_T, row.head)
            state.scored = state.head.scored()
            state.logp_T = state.head.empty(model.output_weight())
            if self._linear:
                state.grad_T = self._loss_gradient(state, torch.zeros_like(state.logp_T))[0]
        return state

    def _forward_layer(self, steps: LayerSteps, opened: OpenRow, unit: int, x: Tensor, by_layer: bool) -> Tensor:
        keep = self._training and steps.layer.stream.save == "input+attention"
        if self._training:
            opened.inputs[unit] = steps.layer.keep(x)  # first, so that a copy to the host runs beside the layer
        if by_layer:
            y, opened.attended = steps.forward(x, keep)
        else:
            y = torch.empty_like(x)
            steps.forward_unit(opened, unit, x, keep, y)
        return y

    # Backward.

    @torch.no_grad()
    def backward(self, microbatch: int, unit: int, dy: Tensor | None) -> Tensor | None:
        state, model = self._open[microbatch], self._model
        if model.post_process:
            dy = self._backward_head(state, unit)
        for depth, (steps, opened) in reversed(list(enumerate(state.layers))):
            x = steps.layer.fetch(opened.inputs.pop(unit), dy.device)
            if state.by_layer:
                dy = steps.backward(x, dy, opened.attended, state.gradients, dy)
            else:
                steps.backward_unit(opened, unit, x, dy, state.gradients, dy)
            if unit == 0:
                if state.prefix is not None:
                    state.prefix.layers[depth][1].absorb(opened, state.cut.grid.start)
                opened.close()
        if model.pre_process:
            self._backward_embedding(state, unit, dy)
        if unit == 0:
            self._finish(microbatch)
        return None if model.pre_process else dy

    def _backward_embedding(self, state: _OpenMicrobatch, unit: int, dx_UBH: Tensor) -> None:
        grid, ids_S = state.cut.grid, state.row.ids_S
        positions_S = None
        if self._model.embedding.add_position_embedding:
            positions_S = torch.tensor(state.cut.layout.positions(), device=ids_S.device)
        for i, dx_CBH in self._chunks(state, unit, dx_UBH):
            first, last = grid.spans()[i]
            ids_C = ids_S[first - grid.start : last - grid.start]
            position_C = None if positions_S is None else positions_S[first:last]
            self._model.embedding_gradient(ids_C, position_C, dx_CBH, grid.parts > 1, state.gradients)

    def _backward_head(self, state: _OpenMicrobatch, unit: int) -> Tensor:
        """The gradient of a unit's hidden states before the last norm."""
        if state.grad_T is None:  # all log-probs of the row are known by now
            state.grad_T, report = self._loss_gradient(state, state.logp_T)
            self.results.append(report)
        dx = torch.empty_like(state.hidden_U[unit])
        norm, logp_T = self._model.decoder.final_layernorm, state.logp_T if self._linear else None
        for (i, hidden_CBH), (_, dx_CBH) in zip(self._chunks(state, unit), self._chunks(state, unit, dx), strict=True):
            with torch.enable_grad():
                leaf_CBH = hidden_CBH.detach().requires_grad_()
                normed_CBH = norm(leaf_CBH)
            dnormed_CBH = state.head.backward(
                normed_CBH.detach(), i, state.scored[i], state.grad_T, state.gradients, logp_T
            )
            dx_CBH.copy_(
                state.gradients.backward((normed_CBH,), (dnormed_CBH,), (leaf_CBH,), list(norm.parameters()))[0]
            )
        del state.hidden_U[unit]
        if self._linear and unit == 0:
            self.results.append(self._evaluate(state.row, state.logp_T)[1])
        return dx

    def _loss_gradient(self, state: _OpenMicrobatch, logp_T: Tensor) -> tuple[Tensor, Any]:
        with torch.enable_grad():
            leaf_T = logp_T.detach().requires_grad_()
            scalar, report = self._evaluate(state.row, leaf_T)
        return torch.autograd.grad(scalar, leaf_T)[0], report

    def _finish(self, microbatch: int) -> None:
        """Hand out every parameter's gradient, all at once, so that each hook fires once."""
        state, model = self._open[microbatch], self._model
        self._readers.pop(microbatch, None)  # its readers are all done
        self._close(microbatch)
        parameters = [p for layer in model.decoder.layers for p in layer.parameters()]
        if model.post_process:
            parameters += [*model.decoder.final_layernorm.parameters(), model.output_weight()]
        if model.pre_process:  # a tied matrix has both parts of its gradient in one sum
            parameters += [p for p in model.embedding.parameters() if all(p is not q for q in parameters)]
        parameters = [p for p in parameters if p.requires_grad]
        self._finished += 1
        last = self._finished == len(self._rows)
        with torch.enable_grad(), nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            state.gradients.as_root(parameters, parameters[0].device).backward()

    # Parts of a unit.

    def _norm(self, hidden: Tensor) -> Tensor:
        return self._model.decoder.final_layernorm(hidden)

    def _chunks(self, state: _OpenMicrobatch, unit: int, x_UBH: Tensor | None = None) -> list[tuple[int, Tensor]]:
        """The unit's chunks and their part of its hidden states (or of `x_UBH`)."""
        x_UBH = state.hidden_U[unit] if x_UBH is None else x_UBH
        first, spans = state.cut.tokens(unit).start, state.cut.grid.spans()
        parts = [(i, state.cut.grid.local(spans[i])) for i in state.cut.units[unit]]
        return [(i, x_UBH[part.start - first : part.stop - first]) for i, part in parts]
