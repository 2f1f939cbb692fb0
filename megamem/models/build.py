"""From a spec's architecture to this rank's stage of the model."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megamem.config.architecture import Architecture
from megamem.models.gpt import DiffusionGPT
from megamem.models.layers import Attend, block_submodules
from megamem.ops.attention import attend
from megamem.ops.vocab import VocabShard
from megamem.platform.groups import Groups
from megamem.stream.layer import StreamOptions


def _leave_alone(weight: Tensor) -> Tensor:
    return weight


def transformer_config(
    arch: Architecture, groups: Groups, dtype: torch.dtype, sequence_parallel: bool, recompute: bool
) -> TransformerConfig:
    """megatron-core's configuration of the model on this process grid."""
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.ffn,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=groups.tp.size,
        pipeline_model_parallel_size=groups.pp.size,
        sequence_parallel=sequence_parallel and groups.tp.size > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are loaded or drawn by name afterwards (convert/source.py). Initialisation itself must run: there
        # megatron-core marks which parameters are split, and gradient norms depend on that.
        init_method=_leave_alone,
        output_layer_init_method=_leave_alone,
        embedding_init_method=_leave_alone,
        # The objective divides once, in objectives/reduction.py; this stops megatron-core's own two divisions.
        calculate_per_token_loss=True,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        batch_p2p_comm=not groups.device.is_cpu,
        deallocate_pipeline_outputs=True,
        # Fusions that need CUDA kernels or CUDA-only assumptions.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def build_model(
    arch: Architecture,
    groups: Groups,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    recompute: bool = False,
    stream: StreamOptions | None = None,
    attend: Attend = attend,
) -> DiffusionGPT:
    """This rank's stage, with uninitialised weights, on the groups' device.

    Args:
        dtype: of parameters and activations (fp32, bf16; fp64 for checks).
        sequence_parallel: split norms and residuals over tensor-parallel ranks by tokens.
        recompute: recompute every layer in the backward.
        stream: run layers and head in chunks of tokens; None: whole rows.
        attend: attention of whole rows.
    """
    config = transformer_config(arch, groups, dtype, sequence_parallel, recompute)
    vocab = arch.padded_vocab(groups.tp.size)
    model = DiffusionGPT(
        config,
        block_submodules(arch, arch.layers // groups.pp.size, stream, attend),
        vocab_size=vocab,
        max_sequence_length=arch.max_positions,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=arch.tied_head,
        position_embedding_type="learned_absolute" if arch.positions == "learned" else "none",
        pg_collection=groups.collection,
    )
    model.stream = stream
    model.shifted_logits = arch.shifted_logits
    rows = vocab // groups.tp.size
    model.vocab = VocabShard(groups.tp.rank * rows, rows, arch.vocab_rows, groups.tp)
    if groups.is_first_stage and arch.positions == "learned":
        model.embedding.position_embeddings.to(dtype)  # megatron-core makes it in torch's default dtype
    return model.to(groups.device.torch)
