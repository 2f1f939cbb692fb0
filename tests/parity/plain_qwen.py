"""Qwen2, Qwen3, A2D, SDAR and Dream in plain torch: one sequence, a dense mask.

Shapes: L tokens of one sequence, H hidden, N query heads, G key/value heads, D head dim, V vocabulary.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def sight(config: Mapping, length: int) -> Tensor:
    """Bool `[L, L]`: which key (column) a query (row) sees."""
    place = torch.arange(length)
    size = {"qwen2": 1, "qwen3": 1, "sdar": config.get("block_size")}.get(config["model_type"], length)
    return place[:, None] // size >= place // size


def plain_qwen(weights: Mapping[str, Tensor], config: Mapping, ids_L: Tensor) -> Tensor:
    """Logits `[L, V]` as the published modelling code returns them (unshifted), in the weights' precision."""
    heads, kv_heads, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    unseen_LL = ~sight(config, len(ids_L)).to(ids_L.device)

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weights[f"{name}.weight"]

    def linear(x, name):
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def turned_heads(x, i, which, count):
        """Heads `[L, count, D]` of q or k, normed where the model norms them, turned by RoPE."""
        x_LND = linear(x, f"model.layers.{i}.self_attn.{which}_proj").unflatten(-1, (count, dim))
        if f"model.layers.{i}.self_attn.{which}_norm.weight" in weights:
            x_LND = norm(x_LND, f"model.layers.{i}.self_attn.{which}_norm")
        place = torch.arange(len(ids_L), dtype=x.dtype, device=x.device)
        frequency = config["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=x.dtype, device=x.device) / dim)
        angle = torch.cat([place[:, None] * frequency] * 2, -1)[:, None]
        first, second = x_LND.chunk(2, -1)
        return x_LND * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    x_LH = weights["model.embed_tokens.weight"][ids_L]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(x_LH, f"{layer}.input_layernorm")
        q, k = turned_heads(h, i, "q", heads), turned_heads(h, i, "k", kv_heads)
        v = linear(h, f"{layer}.self_attn.v_proj").unflatten(-1, (kv_heads, dim))
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        score = torch.einsum("lnd,mnd->nlm", q, k) / math.sqrt(dim)
        p = score.masked_fill(unseen_LL, -torch.inf).softmax(-1)
        x_LH = x_LH + linear(torch.einsum("nlm,mnd->lnd", p, v).flatten(1), f"{layer}.self_attn.o_proj")
        h = norm(x_LH, f"{layer}.post_attention_layernorm")
        gated = F.silu(linear(h, f"{layer}.mlp.gate_proj")) * linear(h, f"{layer}.mlp.up_proj")
        x_LH = x_LH + linear(gated, f"{layer}.mlp.down_proj")
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return linear(norm(x_LH, "model.norm"), head)


def shifted(logits_LV: Tensor) -> Tensor:
    """As Dream's published sampler shifts them."""
    return torch.cat([logits_LV[:1], logits_LV[:-1]])
