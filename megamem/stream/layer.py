"""The streamed transformer layer (DESIGN section 3.1; StreamBP, arXiv 2506.03077, for every layout).

A layer is y = x + P(A(q, K, V)) followed by y + M(N(y)); q, K, V come from R(N(x)). Only attention joins tokens, and it
does so through K and V. So the layer runs in chunks of tokens, forward and backward, and keeps its input only. Chunks
that see each other both ways form a *unit* (`layout/grid.py: chunk_units`); no unit sees a later one, so a row goes
forward unit by unit and backward in reverse:

    forward     unit:   q, k, v = R(N(x)) of its chunks                  K, V of the row so far
                        for every block of chunks: o = A(q, K, V); for every chunk in it: y = M(x + P(o))

    backward    phase 0: K, V of the row again (a stage-major pipeline has kept them)
                unit:   q of its chunks again
                phase A, blocks descending: o again (or saved);
                        for every chunk in it: the tail x + P(o) -> M again with a graph; its backward gives
                        dx (residual part), do and the tail's weight gradients;
                        attention's backward gives dq of the block and adds to dK, dV of the row (at least fp32)
                phase B, chunks of the unit, all of whose readers have now passed phase A:
                        R(N(x)) with a graph; its backward from (dq, dk, dv) completes dx

Attention's backward needs no graph: it recomputes probabilities from the log-sum-exp (ops/attention.py). In causal and
block-causal rows every chunk is a unit, and one projection with a graph serves both its q and its phase B; a
bidirectional row is one unit. Nothing but the units, which come from the layout alone, distinguishes them.

A *block* is a run of chunks of a unit that attend together: flash kernels want more queries than a chunk may have, and
a token costs attention less memory than it costs the MLP (`QUERIES_AT_ONCE`).

Of the last layer, chunks that no one scores need keys and values only (`RowParams.idle`): no attention, no tail.

Every parameter's gradient is summed over chunks and handed out once (`stream/gradients.py`).

Shapes: S row tokens, U tokens of a unit, C tokens of a chunk (this rank's part of them under sequence parallelism where
a tensor is local), B tokens of a block in `_BND` and `_BN` (elsewhere the batch, 1), H hidden, N query heads, G
key/value heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megamem.layout.grid import ChunkGrid, chunk_units
from megamem.layout.layout import Layout
from megamem.ops.attention import attention_backward, attention_forward, key_gradients
from megamem.ops.attention_plan import Plan, keys_seen, plan_attention
from megamem.platform.host import to_device, to_host
from megamem.stream.gradients import GradientSums, adding_weights, expect_plain_gradients

# Queries of one attention call, where a unit has chunks enough. Torch's CPU kernel goes through them 64 at a time below
# 768 and 256 at a time from there on.
QUERIES_AT_ONCE = 768


@dataclass(frozen=True)
class StreamOptions:
    """How layers stream.

    Attributes:
        chunk_tokens: tokens of a chunk, over all ranks that share the row.
        head_tokens: rows of logits that exist at a time.
        save: what a layer keeps for its backward: its input, or also the attention output with its log-sum-exp (then
            the backward runs no attention forward).
        offload: keep the layer input in host memory (pinned on CUDA).
    """

    chunk_tokens: int
    head_tokens: int = 256
    save: Literal["input", "input+attention"] = "input"
    offload: Literal["none", "cpu"] = "none"


class StreamedTransformerLayer(TransformerLayer):
    """megatron-core's layer, run and differentiated chunk by chunk where the row carries a chunk grid."""

    def __init__(self, *args, stream: StreamOptions, **kwargs):
        super().__init__(*args, **kwargs)
        self.stream = stream
        self.to_host = to_host
        self.to_device = to_device

    def forward(self, hidden_states: Tensor, *args, packed_seq_params=None, **kwargs):
        """As megatron-core's layer: `(hidden states, context)`. Rows without a grid take the plain path."""
        if packed_seq_params.grid is None:
            result = super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)
            return expect_plain_gradients(result[0], self.parameters()), result[1]
        steps = LayerSteps(self, packed_seq_params)
        if not torch.is_grad_enabled():
            return steps.forward(hidden_states, keep_attention=False)[0], None
        parameters = [p for p in self.parameters() if p.requires_grad]
        return _StreamedLayer.apply(hidden_states, steps, *parameters), None

    def keep(self, x: Tensor) -> Tensor:
        """A layer input as it waits for its backward."""
        return self.to_host(x) if self.stream.offload == "cpu" else x

    def fetch(self, kept: Tensor, device: torch.device) -> Tensor:
        """The layer input back where the layer computes."""
        return self.to_device(kept, device) if self.stream.offload == "cpu" else kept


@dataclass
class OpenRow:
    """What a layer holds of a row whose units are on their way.

    Attributes:
        k_SGD, v_SGD: keys and values of the units that went forward; None before the first.
        dk_SGD, dv_SGD: their gradients, at least fp32; None before the first unit comes back.
        attended: (output, lse) of the attention of blocks by their first chunk, where it is saved.
        inputs: layer inputs of units, where the caller leaves them here (as `StreamedTransformerLayer.keep` returns).
    """

    k_SGD: Tensor | None = None
    v_SGD: Tensor | None = None
    dk_SGD: Tensor | None = None
    dv_SGD: Tensor | None = None
    attended: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)

    def behind(self, tokens: int, length: int) -> OpenRow:
        """A row of `length` tokens whose first `tokens` are this one's: a copy of their keys and values."""
        k_SGD, v_SGD = (x.new_empty(length, *x.shape[1:]) for x in (self.k_SGD, self.v_SGD))
        k_SGD[:tokens], v_SGD[:tokens] = self.k_SGD[:tokens], self.v_SGD[:tokens]
        return OpenRow(k_SGD, v_SGD)

    def absorb(self, reader: OpenRow, tokens: int) -> None:
        """Add the gradients that a row `behind` this one has for the keys and values it was given."""
        if self.dk_SGD is None:
            self.dk_SGD, self.dv_SGD = key_gradients(self.k_SGD), key_gradients(self.v_SGD)
        self.dk_SGD[:tokens] += reader.dk_SGD[:tokens]
        self.dv_SGD[:tokens] += reader.dv_SGD[:tokens]

    def close(self) -> None:
        """Let go of keys and values: the first unit has come back."""
        self.k_SGD = self.v_SGD = self.dk_SGD = self.dv_SGD = None


class LayerSteps:
    """The unit steps of one layer on one row; knows the layer's modules and the row's plans, holds no tensors."""

    def __init__(self, layer: StreamedTransformerLayer, row):
        self.layer = layer
        self.row = row
        self.grid: ChunkGrid = row.grid
        self.spans = self.grid.spans()
        self.units = row_units(row.layout, self.grid)
        self.idle = row.idle if layer.layer_number == layer.config.num_layers else frozenset()
        most = -(-QUERIES_AT_ONCE // self.grid.chunk)
        self.blocks = [query_blocks(unit, self.idle, most) for unit in self.units]
        attention = layer.self_attention
        first = (layer.input_layernorm, attention.linear_qkv, attention.q_layernorm, attention.k_layernorm)
        self.projection = _parameters(first)
        self.tail = _parameters((attention.linear_proj, layer.pre_mlp_layernorm, layer.mlp))

    # The whole row, layer by layer.

    def forward(self, x_SBH: Tensor, keep_attention: bool) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """The layer's output, and what was kept of its attention."""
        row, y_SBH = OpenRow(), torch.empty_like(x_SBH)
        for unit in range(len(self.units)):
            part = self.local(unit)
            self.forward_unit(row, unit, x_SBH[part], keep_attention, y_SBH[part])
        return y_SBH, row.attended

    def backward(
        self,
        x_SBH: Tensor,
        dy_SBH: Tensor,
        attended: dict[int, tuple[Tensor, Tensor]],
        gradients: GradientSums,
        dx_SBH: Tensor,
    ) -> Tensor:
        """Write the row's dx into `dx_SBH` (it may be `dy_SBH`) and return it; weight gradients go to `gradients`."""
        row = OpenRow(attended=attended)
        last = len(self.units) - 1
        for unit in range(last):  # phase 0; every unit projects itself again, so the last one needs none
            self._project_unit(row, unit, x_SBH[self.local(unit)])
        for unit in range(last, -1, -1):
            part = self.local(unit)
            self.backward_unit(row, unit, x_SBH[part], dy_SBH[part], gradients, dx_SBH[part])
        return dx_SBH

    # One unit.

    def local(self, unit: int) -> slice:
        """Where a unit lies in a rank's own tokens."""
        return self.grid.local(self._span(unit))

    @torch.no_grad()
    def forward_unit(self, row: OpenRow, unit: int, x_UBH: Tensor, keep_attention: bool, y_UBH: Tensor) -> None:
        """Write the layer's output for a unit into `y_UBH`; units before it must have been here."""
        q_UND = self._project_unit(row, unit, x_UBH)
        for block in self.blocks[unit]:
            attended = attention_forward(q_UND[self._rows(unit, block)], row.k_SGD, row.v_SGD, self._plan(block))
            for i in block:
                part = self._within(unit, i)
                y_UBH[part] = self._finish(x_UBH[part], attended[0][self._rows_of(block, i)])
            if keep_attention:
                row.attended[block.start] = attended
        for i in self.idle.intersection(self.units[unit]):
            part = self._within(unit, i)
            y_UBH[part] = x_UBH[part]  # anything finite: no one reads it

    def backward_unit(
        self, row: OpenRow, unit: int, x_UBH: Tensor, dy_UBH: Tensor, gradients: GradientSums, dx_UBH: Tensor
    ) -> None:
        """Write a unit's dx into `dx_UBH` (which may be `dy_UBH`); units after it must have been here."""
        chunks, graph = self.units[unit], None
        if len(chunks) == 1:
            graph = self._project_with_graph(x_UBH, chunks[0])
            q_CND = self._keep_keys(row, chunks[0], *(t.detach() for t in graph[1]))
            q_UND = q_CND.contiguous()  # not a view that keeps keys and values alive
        else:
            q_UND = self._project_unit(row, unit, x_UBH)
        if row.dk_SGD is None:
            row.dk_SGD, row.dv_SGD = key_gradients(row.k_SGD), key_gradients(row.v_SGD)
        dq_UND = q_UND  # written over it, block by block
        for block in reversed(self.blocks[unit]):
            part = self._rows(unit, block)
            dq_UND[part] = self._phase_a(row, unit, block, x_UBH, q_UND[part], dy_UBH, gradients, dx_UBH)
        for i in self.idle.intersection(chunks):
            dx_UBH[self._within(unit, i)], dq_UND[self._rows(unit, range(i, i + 1))] = 0, 0
        for i in reversed(chunks):
            part, span = self._within(unit, i), slice(*self.spans[i])
            x_CBH, qkv = graph or self._project_with_graph(x_UBH[part], i)
            grads = (dq_UND[self._rows(unit, range(i, i + 1))], row.dk_SGD[span], row.dv_SGD[span])
            grads = [g.to(t.dtype) for g, t in zip(grads, qkv, strict=True)]
            dx_UBH[part] += gradients.backward(qkv, grads, (x_CBH,), *self.projection)[0]
            del x_CBH, qkv, grads

    def _phase_a(
        self,
        row: OpenRow,
        unit: int,
        block: range,
        x_UBH: Tensor,
        q_BND: Tensor,
        dy_UBH: Tensor,
        gradients: GradientSums,
        dx_UBH: Tensor,
    ) -> Tensor:
        """dq of a block; writes dx (residual part) of its chunks into `dx_UBH`, adds to the row's dK and dV."""
        plan, found = self._plan(block), row.attended.pop(block.start, None)
        out_BND, lse_BN = found or attention_forward(q_BND, row.k_SGD, row.v_SGD, plan)
        douts = []
        for i in block:
            part = self._within(unit, i)
            with torch.enable_grad():
                x_CBH = x_UBH[part].detach().requires_grad_()
                leaf_CND = out_BND[self._rows_of(block, i)].detach().requires_grad_()
                y_CBH = self._finish(x_CBH, leaf_CND)
            inputs = (x_CBH, leaf_CND)
            dx_UBH[part], dout_CND = gradients.backward((y_CBH,), (dy_UBH[part],), inputs, *self.tail)
            del y_CBH
            douts.append(dout_CND)
        dout_BND = torch.cat(douts) if len(douts) > 1 else dout_CND
        del douts, dout_CND
        return attention_backward(dout_BND, q_BND, row.k_SGD, row.v_SGD, out_BND, lse_BN, plan, row.dk_SGD, row.dv_SGD)

    # A chunk through the layer's modules.

    def _project(self, x_CBH: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """q `[C, N, D]`, k and v `[C, G, D]` of a chunk, after RoPE: R(N(x))."""
        attention = self.layer.self_attention
        qkv = attention.get_query_key_value_tensors(self.layer.input_layernorm(x_CBH), None)
        q, k, v = (t.squeeze(1) for t in qkv)
        q, k = attention.core_attention.rotate(q, k, self.row, slice(*self.spans[i]))
        return q, k, v

    def _project_with_graph(self, x_CBH: Tensor, i: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        with torch.enable_grad():
            x_CBH = x_CBH.detach().requires_grad_()
            return x_CBH, self._project(x_CBH, i)

    @torch.no_grad()
    def _project_unit(self, row: OpenRow, unit: int, x_UBH: Tensor) -> Tensor:
        """Queries `[U, N, D]` of a unit (of all ranks' tokens); its keys and values go to the row."""
        q_UND = None
        for i in self.units[unit]:
            q_CND = self._keep_keys(row, i, *self._project(x_UBH[self._within(unit, i)], i))
            if q_UND is None:
                first, last = self._span(unit)
                q_UND = q_CND.new_empty(last - first, *q_CND.shape[1:])
            q_UND[self._rows(unit, range(i, i + 1))] = q_CND
        return q_UND

    def _keep_keys(self, row: OpenRow, i: int, q_CND: Tensor, k_CGD: Tensor, v_CGD: Tensor) -> Tensor:
        if row.k_SGD is None:
            row.k_SGD, row.v_SGD = (t.new_empty(self.grid.length, *t.shape[1:]) for t in (k_CGD, v_CGD))
        row.k_SGD[slice(*self.spans[i])], row.v_SGD[slice(*self.spans[i])] = k_CGD, v_CGD
        return q_CND

    def _finish(self, x_CBH: Tensor, out_CND: Tensor) -> Tensor:
        """y of a chunk from its input and attention output: M(x + P(o))."""
        layer = self.layer
        context_CBH = out_CND.flatten(1).unsqueeze(1)
        middle_CBH = _residual(x_CBH, layer.self_attention.linear_proj(context_CBH))
        return _residual(middle_CBH, layer.mlp(layer.pre_mlp_layernorm(middle_CBH)))

    def _span(self, unit: int) -> tuple[int, int]:
        chunks = self.units[unit]
        return self.spans[chunks[0]][0], self.spans[chunks[-1]][1]

    def _plan(self, block: range) -> Plan:
        return plan_attention(self.row.layout, self.spans[block.start][0], self.spans[block.stop - 1][1])

    def _rows(self, unit: int, block: range) -> slice:
        """Where a block lies in the unit's queries."""
        first = self._span(unit)[0]
        return slice(self.spans[block.start][0] - first, self.spans[block.stop - 1][1] - first)

    def _rows_of(self, block: range, i: int) -> slice:
        """Where a chunk lies in the block's queries."""
        first = self.spans[block.start][0]
        return slice(self.spans[i][0] - first, self.spans[i][1] - first)

    def _within(self, unit: int, i: int) -> slice:
        """Where a chunk lies in a rank's own tokens of its unit."""
        offset, part = self.local(unit).start, self.grid.local(self.spans[i])
        return slice(part.start - offset, part.stop - offset)


class _StreamedLayer(torch.autograd.Function):
    """Autograd's view: one node per layer that saves the layer's input (and the attention output, if asked)."""

    @staticmethod
    def forward(ctx, x_SBH: Tensor, steps: LayerSteps, *parameters: nn.Parameter) -> Tensor:
        layer = steps.layer
        kept_SBH = layer.keep(x_SBH)  # first, so that a copy to the host runs beside the layer
        y_SBH, attended = steps.forward(x_SBH, keep_attention=layer.stream.save == "input+attention")
        ctx.steps, ctx.parameters, ctx.device, ctx.chunks = steps, parameters, x_SBH.device, list(attended)
        ctx.save_for_backward(kept_SBH, *[t for pair in attended.values() for t in pair])
        return y_SBH

    @staticmethod
    def backward(ctx, dy_SBH: Tensor):
        kept, *flat = ctx.saved_tensors
        attended = dict(zip(ctx.chunks, zip(flat[::2], flat[1::2], strict=True), strict=True))
        gradients = GradientSums()
        x_SBH = ctx.steps.layer.fetch(kept, ctx.device)
        dx_SBH = ctx.steps.backward(x_SBH, dy_SBH, attended, gradients, torch.empty_like(dy_SBH))
        return dx_SBH, None, *[gradients.hand_out(p) for p in ctx.parameters]


@lru_cache(maxsize=256)
def row_units(layout: Layout, grid: ChunkGrid) -> tuple[range, ...]:
    """Chunks of every unit of a row."""
    spans = grid.spans()
    seen = [keys_seen(plan_attention(layout, *span)) for span in spans]
    return tuple(chunk_units(seen, spans))


def query_blocks(unit: range, idle: frozenset[int], most: int) -> list[range]:
    """Runs of at most `most` chunks of a unit that attend together; idle chunks do not attend."""
    blocks: list[range] = []
    for i in unit:
        if i in idle:
            continue
        if blocks and blocks[-1].stop == i and len(blocks[-1]) < most:
            blocks[-1] = range(blocks[-1].start, i + 1)
        else:
            blocks.append(range(i, i + 1))
    return blocks


def _residual(x: Tensor, output_with_bias: tuple[Tensor, Tensor | None]) -> Tensor:
    output, bias = output_with_bias
    return x + output if bias is None else x + (output + bias)


def _parameters(modules: Sequence[nn.Module | None]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trained parameters whose gradients arrive as tensors, and those whose layers add them up themselves."""
    added = adding_weights(modules)
    theirs = set(added)
    every = (p for module in modules if module is not None for p in module.parameters())
    return [p for p in every if p.requires_grad and p not in theirs], added
