"""The streamed transformer layer (DESIGN section 3.1; StreamBP, arXiv 2506.03077, for every layout).

A layer is y = x + P(A(q, K, V)) followed by y + M(N(y)); q, K, V come from R(N(x)). Only attention joins tokens, and it
does so through K and V. So the layer runs in chunks of tokens, forward and backward, and keeps its input only:

    forward     for every chunk: q, k, v = R(N(x))                       K, V of the whole row
                for every chunk: o = A(q, K, V);  y = M(x + P(o))

    backward    phase 0: Q, K, V again
                phase A, query chunks descending: o again (or saved), the tail x + P(o) -> M again with a graph;
                    its backward gives dx (residual part), do and the tail's weight gradients;
                    attention's backward gives dq of the chunk and adds to dK, dV of the row (at least fp32)
                phase B, a key chunk as soon as every query chunk that sees it has passed phase A:
                    R(N(x)) of the chunk again with a graph; its backward from (dq, dk, dv) completes dx

Attention's backward needs no graph: it recomputes probabilities from the log-sum-exp (ops/attention.py). For causal and
block-causal layouts a chunk's phase B follows its own phase A; for bidirectional ones all of phase B comes last. The
order comes from the layout alone (`layout/grid.py: chunk_readers`).

Every parameter's gradient is summed over chunks in fp32, into megatron-core's `main_grad` where there is one, and
handed to autograd once: data-parallel hooks fire once per micro-batch (firing per chunk races with
`overlap_grad_reduce`).

Shapes: S row tokens, C tokens of a chunk (this rank's part of them under sequence parallelism where a tensor is local),
H hidden, N query heads, G key/value heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megamem.layout.grid import ChunkGrid, chunk_readers
from megamem.ops.attention import attention_backward, attention_forward, key_gradients
from megamem.ops.attention_plan import Plan, keys_seen, plan_attention


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

    def forward(self, hidden_states: Tensor, *args, packed_seq_params=None, **kwargs):
        """As megatron-core's layer: `(hidden states, context)`. Rows without a grid take the plain path."""
        if packed_seq_params.grid is None:
            result = super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)
            return expect_plain_gradients(result[0], self.parameters()), result[1]
        steps = ChunkSteps(self, packed_seq_params)
        if not torch.is_grad_enabled():
            return steps.forward(hidden_states, keep_attention=False)[0], None
        parameters = [p for p in self.parameters() if p.requires_grad]
        return _StreamedLayer.apply(hidden_states, steps, self.stream, *parameters), None


class ChunkSteps:
    """The chunk steps of one layer on one row; knows the layer's modules and the row's plans, holds no tensors."""

    def __init__(self, layer: TransformerLayer, row):
        self.layer = layer
        self.row = row
        self.grid: ChunkGrid = row.grid
        self.spans = self.grid.spans()
        self.plans: list[Plan] = [plan_attention(row.layout, *span) for span in self.spans]
        attention = layer.self_attention
        first = (layer.input_layernorm, attention.linear_qkv, attention.q_layernorm, attention.k_layernorm)
        self.head_parameters = _parameters(first)
        self.tail_parameters = _parameters((attention.linear_proj, layer.pre_mlp_layernorm, layer.mlp))

    def project(self, x_CBH: Tensor, span: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """q `[C, N, D]`, k and v `[C, G, D]` of a chunk, after RoPE: R(N(x))."""
        attention = self.layer.self_attention
        qkv = attention.get_query_key_value_tensors(self.layer.input_layernorm(x_CBH), None)
        q, k, v = (t.squeeze(1) for t in qkv)
        q, k = attention.core_attention.rotate(q, k, self.row, slice(*span))
        return q, k, v

    def finish(self, x_CBH: Tensor, out_CND: Tensor) -> Tensor:
        """y of a chunk from its input and attention output: M(x + P(o))."""
        layer = self.layer
        context_CBH = out_CND.flatten(1).unsqueeze(1)
        middle_CBH = _residual(x_CBH, layer.self_attention.linear_proj(context_CBH))
        return _residual(middle_CBH, layer.mlp(layer.pre_mlp_layernorm(middle_CBH)))

    def project_all(self, x_SBH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of the row, without a graph."""
        whole: list[Tensor] = []
        for span in self.spans:
            parts = self.project(x_SBH[self.grid.local(span)], span)
            if not whole:
                whole = [p.new_empty(self.grid.length, *p.shape[1:]) for p in parts]
            for total, part in zip(whole, parts, strict=True):
                total[slice(*span)] = part
        return tuple(whole)

    @torch.no_grad()
    def forward(self, x_SBH: Tensor, keep_attention: bool) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The layer's output, and (output, lse) of every chunk's attention if they are to be kept."""
        q_SND, k_SGD, v_SGD = self.project_all(x_SBH)
        y_SBH, kept = torch.empty_like(x_SBH), []
        for span, plan in zip(self.spans, self.plans, strict=True):
            attended = attention_forward(q_SND[slice(*span)], k_SGD, v_SGD, plan)
            local = self.grid.local(span)
            y_SBH[local] = self.finish(x_SBH[local], attended[0])
            if keep_attention:
                kept.append(attended)
        return y_SBH, kept

    def backward(
        self, x_SBH: Tensor, dy_SBH: Tensor, kept: Sequence[tuple[Tensor, Tensor]], gradients: GradientSums
    ) -> Tensor:
        """dx of the row; weight gradients go to `gradients`."""
        with torch.no_grad():
            q_SND, k_SGD, v_SGD = self.project_all(x_SBH)
        dk_SGD, dv_SGD, dx_SBH = key_gradients(k_SGD), key_gradients(v_SGD), torch.empty_like(x_SBH)
        waiting = chunk_readers([keys_seen(plan) for plan in self.plans], self.spans)
        for i in reversed(range(len(self.spans))):
            span, local = slice(*self.spans[i]), self.grid.local(self.spans[i])
            q_CND = q_SND[span]
            out_CND, lse_CN = kept[i] if kept else attention_forward(q_CND, k_SGD, v_SGD, self.plans[i])
            dx_SBH[local], dout_CND = self._backward_tail(x_SBH[local], out_CND, dy_SBH[local], gradients)
            dq_CND = attention_backward(dout_CND, q_CND, k_SGD, v_SGD, out_CND, lse_CN, self.plans[i], dk_SGD, dv_SGD)
            q_CND.copy_(dq_CND)  # this chunk's queries are not needed again
            del out_CND, dout_CND, dq_CND
            for j, readers in enumerate(waiting):
                readers.discard(i)
                if not readers and j >= i:
                    readers.add(-1)  # never again
                    key = slice(*self.spans[j])
                    part = self.grid.local(self.spans[j])
                    dx_SBH[part] += self._backward_head(
                        x_SBH[part], self.spans[j], (q_SND[key], dk_SGD[key], dv_SGD[key]), gradients
                    )
        return dx_SBH

    def _backward_tail(
        self, x_CBH: Tensor, out_CND: Tensor, dy_CBH: Tensor, gradients: GradientSums
    ) -> tuple[Tensor, Tensor]:
        """Phase A without attention: dx (residual part) and the gradient of the attention output."""
        with torch.enable_grad():
            x_CBH, out_CND = x_CBH.detach().requires_grad_(), out_CND.detach().requires_grad_()
            y_CBH = self.finish(x_CBH, out_CND)
        return gradients.backward((y_CBH,), (dy_CBH,), (x_CBH, out_CND), self.tail_parameters)

    def _backward_head(
        self, x_CBH: Tensor, span: tuple[int, int], dqkv: tuple[Tensor, Tensor, Tensor], gradients: GradientSums
    ) -> Tensor:
        """Phase B: the part of dx that comes through q, k and v."""
        with torch.enable_grad():
            x_CBH = x_CBH.detach().requires_grad_()
            qkv = self.project(x_CBH, span)
        dqkv = tuple(d.to(t.dtype) for d, t in zip(dqkv, qkv, strict=True))
        return gradients.backward(qkv, dqkv, (x_CBH,), self.head_parameters)[0]


class GradientSums:
    """Weight gradients summed over chunks in at least fp32, handed out once."""

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}

    def backward(
        self,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> tuple[Tensor, ...]:
        """Gradients of `inputs`; those of `parameters` are added to the sums, each as soon as it exists.

        (All weight gradients of a chunk together would outweigh its activations.)
        """

        def absorb(parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
            def hook(grad: Tensor) -> Tensor:
                self.add(parameter, grad)
                return grad.new_zeros(()).expand_as(grad)

            return hook

        handles = [parameter.register_hook(absorb(parameter)) for parameter in parameters]
        try:
            return torch.autograd.grad(outputs, [*inputs, *parameters], grads)[: len(inputs)]
        finally:
            for handle in handles:
                handle.remove()

    def add(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Add one chunk's gradient."""
        main = getattr(parameter, "main_grad", None)
        if main is not None:
            main.add_(grad)
        elif parameter in self._sums:
            self._sums[parameter].add_(grad)
        else:
            self._sums[parameter] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)

    def add_product(self, parameter: nn.Parameter, dy_UV: Tensor, x_UH: Tensor, block: int = 4096) -> None:
        """Add `dy^T x`, the gradient of a matrix `[V, H]`, without a temporary of its size (a head's is large)."""
        total = getattr(parameter, "main_grad", None)
        if total is None:
            if parameter not in self._sums:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self._sums[parameter] = torch.zeros_like(parameter, dtype=wide)
            total = self._sums[parameter]
        if total.dtype == dy_UV.dtype:
            total.addmm_(dy_UV.t(), x_UH)
            return
        for begin in range(0, total.size(0), block):
            total[begin : begin + block].add_(dy_UV[:, begin : begin + block].t() @ x_UH)

    def hand_out(self, parameter: nn.Parameter) -> Tensor:
        """What autograd gets, once.

        Where the sum is in `main_grad` already, megatron-core is told so by its own mark and does not read the value:
        a view of that buffer stands in, since a dummy of a head's size would be the peak of a step. (But the gradient
        of a tied embedding is read, mark or not: autograd adds its other part. It gets zeros.)
        """
        main = getattr(parameter, "main_grad", None)
        if main is not None:
            parameter.grad_added_to_main_grad = True
            if getattr(parameter, "zero_out_wgrad", False):
                return torch.zeros_like(parameter)
            return main.flatten().view(parameter.dtype)[: parameter.numel()].view_as(parameter)
        found = self._sums.pop(parameter, None)
        return torch.zeros_like(parameter) if found is None else found.to(parameter.dtype)


class _StreamedLayer(torch.autograd.Function):
    """Autograd's view: one node per layer that saves the layer's input (and the attention output, if asked)."""

    @staticmethod
    def forward(ctx, x_SBH: Tensor, steps: ChunkSteps, options: StreamOptions, *parameters: nn.Parameter) -> Tensor:
        y_SBH, kept = steps.forward(x_SBH, keep_attention=options.save == "input+attention")
        ctx.steps, ctx.parameters, ctx.device = steps, parameters, x_SBH.device
        saved = steps.layer.to_host(x_SBH) if options.offload == "cpu" else x_SBH
        ctx.save_for_backward(saved, *[t for pair in kept for t in pair])
        return y_SBH

    @staticmethod
    def backward(ctx, dy_SBH: Tensor):
        saved, *flat = ctx.saved_tensors
        kept = list(zip(flat[::2], flat[1::2], strict=True))
        gradients = GradientSums()
        dx_SBH = ctx.steps.backward(saved.to(ctx.device, non_blocking=True), dy_SBH, kept, gradients)
        return dx_SBH, None, None, *[gradients.hand_out(p) for p in ctx.parameters]


def expect_plain_gradients(output: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Lift megatron-core's mark "already in `main_grad`" before plain gradients of `parameters` arrive; returns output.

    The mark outlives the micro-batch that set it: without this, a short row after a streamed one would be ignored.
    """
    if output.requires_grad:
        marked = [p for p in parameters if hasattr(p, "main_grad")]

        def lift(grad: Tensor) -> None:
            for parameter in marked:
                parameter.grad_added_to_main_grad = False

        output.register_hook(lift)
    return output


def to_host(x: Tensor) -> Tensor:
    """A host copy: pinned and asynchronous from a GPU; a plain copy where the device is the host."""
    host = torch.empty_like(x, device="cpu", pin_memory=not x.is_cpu)
    return host.copy_(x, non_blocking=True)


def _residual(x: Tensor, output_with_bias: tuple[Tensor, Tensor | None]) -> Tensor:
    output, bias = output_with_bias
    return x + output if bias is None else x + (output + bias)


def _parameters(modules: Sequence[nn.Module | None]) -> list[nn.Parameter]:
    return [p for module in modules if module is not None for p in module.parameters() if p.requires_grad]
