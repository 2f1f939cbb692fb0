"""The LLaDA family: LLaDA-8B, LLaDA-1.5 and any size of the same code (grouped-query attention, tied head too).

Facts read in the published modelling code: `ff_proj` is the gate and `up_proj` the value of the SwiGLU;
`ff_out` names both the head and every block's down-projection; RoPE is half-split in fp32;
attention is fully bidirectional and logits are not shifted.
"""

from collections.abc import Mapping
from typing import Any

from megamem.config.architecture import Architecture
from megamem.convert.maps import GateUp, Plain, Qkv, TensorMap, Vocab
from megamem.errors import UserError
from megamem.models.hf_config import check_fixed, reading, size, token_id

# Switches of the published code that change the function, with the only value that this model computes.
_FIXED = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "multi_query_attention": None,
    "clip_qkv": None,
    "block_group_size": 1,
}


def read_config(hf: Mapping[str, Any]) -> Architecture:
    """Architecture of a LLaDA `config.json`.

    Raises:
        UserError: a key is missing or asks for something else than the LLaDA architecture.
    """
    check_fixed(hf, _FIXED, "LLaDA")
    with reading("LLaDA"):
        hidden, heads, kv_heads = size(hf, "d_model"), size(hf, "n_heads"), size(hf, "n_kv_heads", "n_heads")
        if hidden % (2 * heads):
            raise UserError(f"config.json: d_model = {hidden} must be an even multiple of n_heads = {heads}")
        if heads % kv_heads:
            raise UserError(f"config.json: n_kv_heads = {kv_heads} must divide n_heads = {heads}")
        rows = size(hf, "embedding_size", "vocab_size")
        return Architecture(
            layers=size(hf, "n_layers"),
            hidden=hidden,
            ffn=hf.get("mlp_hidden_size") or hf["mlp_ratio"] * hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads,
            vocab_rows=rows,
            norm_eps=hf.get("rms_norm_eps", 1e-5),
            # Without RoPE (and ALiBi) the published code adds a learned table of positions, `wpe`.
            positions="rope" if hf.get("rope", False) else "learned",
            rope_theta=hf.get("rope_theta", 10000.0),
            tied_head=hf.get("weight_tying", False),
            max_positions=hf.get("max_sequence_length", 1024),
            mask_id=token_id(hf, "mask_token_id", rows),
            eos_id=token_id(hf, "eos_token_id", rows),
            pad_id=token_id(hf, "pad_token_id", rows),
            init_std=hf.get("init_std", 0.02),
        )


def tensor_maps(arch: Architecture) -> list[TensorMap]:
    """megatron-core parameter <-> Hugging Face tensors, every one, in export order."""
    root = "model.transformer"
    maps: list[TensorMap] = [Vocab("embedding.word_embeddings.weight", f"{root}.wte.weight")]
    if arch.positions == "learned":
        table = (arch.max_positions, arch.hidden)
        maps.append(Plain("embedding.position_embeddings.weight", f"{root}.wpe.weight", table))
    for i in range(arch.layers):
        core, hf = f"decoder.layers.{i}", f"{root}.blocks.{i}"
        maps += [
            Plain(f"{core}.input_layernorm.weight", f"{hf}.attn_norm.weight", (arch.hidden,)),
            Qkv(
                f"{core}.self_attention.linear_qkv.weight",
                (f"{hf}.q_proj.weight", f"{hf}.k_proj.weight", f"{hf}.v_proj.weight"),
            ),
            Plain(
                f"{core}.self_attention.linear_proj.weight",
                f"{hf}.attn_out.weight",
                (arch.hidden, arch.heads * arch.head_dim),
                axis=1,
            ),
            Plain(f"{core}.pre_mlp_layernorm.weight", f"{hf}.ff_norm.weight", (arch.hidden,)),
            GateUp(f"{core}.mlp.linear_fc1.weight", (f"{hf}.ff_proj.weight", f"{hf}.up_proj.weight")),
            Plain(f"{core}.mlp.linear_fc2.weight", f"{hf}.ff_out.weight", (arch.hidden, arch.ffn), axis=1),
        ]
    maps.append(Plain("decoder.final_layernorm.weight", f"{root}.ln_f.weight", (arch.hidden,)))
    head = "wte" if arch.tied_head else "ff_out"
    maps.append(Vocab("output_layer.weight", f"{root}.{head}.weight"))
    return maps
