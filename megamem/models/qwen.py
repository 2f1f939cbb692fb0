"""The Qwen family: Qwen2 and Qwen3 (causal), A2D (Qwen3 or Qwen2 made fully bidirectional) and SDAR (block-causal).

Facts read in the published modelling code: half-split RoPE in fp32; Qwen2 has biases on q, k, v and none on o; Qwen3
has none but norms every head of q and k before RoPE; `head_dim` need not be hidden / heads. A causal model's state of a
token predicts the next one; A2D's and SDAR's predict the token itself. A2D says what it is by its `model_type` alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megamem.config.architecture import Architecture
from megamem.convert.maps import GateUp, Plain, Qkv, TensorMap, Vocab
from megamem.errors import UserError
from megamem.models.hf_config import check_fixed, optional_token_id, reading, size

# Switches of the published code that change the function, with the only value that this model computes.
_FIXED = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "attention_bias": None,  # Qwen3: on q, k, v and o
    "use_sliding_window": None,
    "use_mrope": None,
    "num_experts": None,
}


@dataclass(frozen=True)
class Variant:
    """What the modelling code of one `model_type` has fixed.

    Attributes:
        family: for messages.
        attention, shifted_logits: as in `Architecture`.
        qwen3: norms on q and k instead of biases on q, k, v.
    """

    family: str
    attention: Literal["full", "causal", "block"]
    shifted_logits: bool
    qwen3: bool


VARIANTS: dict[str, Variant] = {
    "qwen2": Variant("Qwen2", "causal", shifted_logits=True, qwen3=False),
    "qwen3": Variant("Qwen3", "causal", shifted_logits=True, qwen3=True),
    "a2d-qwen2": Variant("A2D Qwen2", "full", shifted_logits=False, qwen3=False),
    "a2d-qwen3": Variant("A2D Qwen3", "full", shifted_logits=False, qwen3=True),
    "sdar": Variant("SDAR", "block", shifted_logits=False, qwen3=True),
}


def read_config(hf: Mapping[str, Any]) -> Architecture:
    """Architecture of a Qwen2, Qwen3, A2D or SDAR `config.json`.

    Raises:
        UserError: a key is missing or asks for something that this family does not serve.
    """
    return read_variant(hf, VARIANTS[hf["model_type"]])


def read_variant(hf: Mapping[str, Any], variant: Variant) -> Architecture:
    """The same for modelling code that has no `model_type` of this family but its keys and weights.

    Raises:
        UserError: as `read_config`.
    """
    check_fixed(hf, _FIXED, variant.family)
    with reading(variant.family):
        heads, kv_heads = size(hf, "num_attention_heads"), size(hf, "num_key_value_heads")
        if heads % kv_heads:
            raise UserError(f"config.json: num_key_value_heads = {kv_heads} must divide num_attention_heads = {heads}")
        rows = size(hf, "vocab_size")
        eos_id = optional_token_id(hf, "eos_token_id", rows)
        return Architecture(
            layers=_full_layers(hf),
            hidden=size(hf, "hidden_size"),
            ffn=size(hf, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_head_dim(hf, heads, variant),
            vocab_rows=rows,
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(hf),
            qkv_bias=not variant.qwen3,
            qk_norm=variant.qwen3,
            tied_head=hf.get("tie_word_embeddings", False),
            max_positions=size(hf, "max_position_embeddings"),
            attention=variant.attention,
            block_length=size(hf, "block_size") if variant.attention == "block" else None,
            shifted_logits=variant.shifted_logits,
            mask_id=None if variant.attention == "causal" else optional_token_id(hf, "mask_token_id", rows),
            eos_id=eos_id,
            pad_id=eos_id if hf.get("pad_token_id") is None else optional_token_id(hf, "pad_token_id", rows),
            init_std=hf.get("initializer_range", 0.02),
        )


def _full_layers(hf: Mapping[str, Any]) -> int:
    """The number of layers; newer configs also list the kind of each."""
    other = set(hf.get("layer_types") or []) - {"full_attention"}
    if other:
        raise UserError(f"config.json: layer_types has {sorted(other)[0]!r}; allowed: 'full_attention' in every layer")
    return size(hf, "num_hidden_layers")


def _head_dim(hf: Mapping[str, Any], heads: int, variant: Variant) -> int:
    """`head_dim`; where it is absent Qwen3's code takes 128, Qwen2's hidden / heads."""
    if hf.get("head_dim") is None and variant.qwen3:
        return 128
    hidden = size(hf, "hidden_size")
    if hf.get("head_dim") is None and hidden % heads:
        raise UserError(f"config.json: hidden_size = {hidden} must be a multiple of num_attention_heads = {heads}")
    dim = hidden // heads if hf.get("head_dim") is None else size(hf, "head_dim")
    if dim % 2:
        raise UserError(f"config.json: head_dim = {dim}: rotary embeddings turn pairs; allowed: even numbers")
    return dim


def _rope_theta(hf: Mapping[str, Any]) -> float:
    """The base of plain RoPE. transformers 5 writes it, and the type of scaling, into `rope_parameters`."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = hf.get(key) or {}
        if not isinstance(scaling, Mapping):
            raise UserError(f"config.json: {key} = {scaling!r}; allowed: a JSON object or null")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise UserError(f"config.json: {key}.rope_type = {kind!r} is not computed here; allowed: 'default' or null")
    return hf.get("rope_theta", (hf.get("rope_parameters") or {}).get("rope_theta", 10000.0))


def tensor_maps(arch: Architecture) -> list[TensorMap]:
    """megatron-core parameter <-> Hugging Face tensors, every one, in export order."""
    maps: list[TensorMap] = [Vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight")]
    for i in range(arch.layers):
        core, hf = f"decoder.layers.{i}", f"model.layers.{i}"
        attention, width = f"{core}.self_attention", arch.heads * arch.head_dim
        maps.append(Plain(f"{core}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (arch.hidden,)))
        for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
            names = tuple(f"{hf}.self_attn.{x}_proj.{kind}" for x in "qkv")
            maps.append(Qkv(f"{attention}.linear_qkv.{kind}", names, bias=kind == "bias"))
        for x in "qk" if arch.qk_norm else "":
            name = f"{hf}.self_attn.{x}_norm.weight"
            maps.append(Plain(f"{attention}.{x}_layernorm.weight", name, (arch.head_dim,)))
        maps += [
            Plain(f"{attention}.linear_proj.weight", f"{hf}.self_attn.o_proj.weight", (arch.hidden, width), axis=1),
            Plain(f"{core}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", (arch.hidden,)),
            GateUp(f"{core}.mlp.linear_fc1.weight", (f"{hf}.mlp.gate_proj.weight", f"{hf}.mlp.up_proj.weight")),
            Plain(f"{core}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", (arch.hidden, arch.ffn), axis=1),
        ]
    maps.append(Plain("decoder.final_layernorm.weight", "model.norm.weight", (arch.hidden,)))
    head = "model.embed_tokens" if arch.tied_head else "lm_head"
    maps.append(Vocab("output_layer.weight", f"{head}.weight"))
    return maps
