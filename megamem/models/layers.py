"""Layer specs: megatron-core's transformer layer with our norm and our attention inside.

Shapes: S packed tokens, B = 1, N query heads and G key/value heads of this tensor-parallel rank, D head dim, H hidden.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megamem.config.architecture import Architecture
from megamem.layout.layout import Layout
from megamem.models.row import RowParams, apply_rope
from megamem.stream.layer import StreamedTransformerLayer, StreamOptions

# q `[S, N, D]`, k and v `[S, G, D]` after RoPE, and the row's layout -> `[S, N, D]`.
Attend = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]


class RMSNorm(torch.nn.Module):
    """RMS norm that allows sequence parallelism (megatron-core's torch fallback refuses it)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        # Each rank norms its own tokens; megatron-core sums the gradient over ranks where this mark is set.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class LayoutAttention(MegatronModule):
    """RoPE (if the model has it) at the layout's positions, then exact attention over the layout.

    megatron-core's `position_ids` never reach RoPE, so RoPE lives here, where the layout is.
    """

    def __init__(self, config: TransformerConfig, rope_theta: float | None, attend: Attend, layer_number: int, **_):
        super().__init__(config)
        self.rope_theta = rope_theta
        self.attend = attend
        self.layer_number = layer_number

    def forward(
        self,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: RowParams,
        **_,
    ) -> Tensor:
        """Context `[S, 1, N * D]` of one packed row."""
        row = packed_seq_params
        q, k, v = (x.squeeze(1) for x in (q_SBND, k_SBGD, v_SBGD))
        q, k = self.rotate(q, k, row)
        if row.cache is None:
            out_SND = self.attend(q, k, v, row.layout)
        else:
            out_SND = row.cache.attend(self.layer_number, q, k, v)
        return out_SND.flatten(1).unsqueeze(1)

    def rotate(self, q_CND: Tensor, k_CGD: Tensor, row: RowParams, span: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """RoPE for the row's tokens `span` (all of them by default); the identity for a model without RoPE."""
        if self.rope_theta is None:
            return q_CND, k_CGD
        cos, sin = (table[span] for table in row.rope_tables(q_CND.size(-1), self.rope_theta, q_CND))
        return apply_rope(q_CND, cos, sin), apply_rope(k_CGD, cos, sin)


class CallableSpec(ModuleSpec):
    """A spec that is also its own builder: megatron-core 0.16 calls the core attention entry, later ones build it."""

    def __call__(self, *args, **kwargs) -> torch.nn.Module:
        return build_module(self, *args, **kwargs)


def local_layer_spec(arch: Architecture, stream: StreamOptions | None, attend: Attend) -> ModuleSpec:
    """A transformer layer from megatron-core's own linears, plain or streamed: runs everywhere."""
    qk_norm = RMSNorm if arch.qk_norm else IdentityOp
    rope_theta = arch.rope_theta if arch.positions == "rope" else None
    return ModuleSpec(
        module=TransformerLayer if stream is None else StreamedTransformerLayer,
        params={} if stream is None else {"stream": stream},
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.no_mask},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=CallableSpec(LayoutAttention, params={"rope_theta": rope_theta, "attend": attend}),
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_submodules(
    arch: Architecture, layers_on_stage: int, stream: StreamOptions | None, attend: Attend
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage and the final norm (built on the last stage only)."""
    return TransformerBlockSubmodules(
        layer_specs=[local_layer_spec(arch, stream, attend)] * layers_on_stage, layer_norm=RMSNorm
    )
