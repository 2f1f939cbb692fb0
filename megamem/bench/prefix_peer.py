"""The published Prefix Grouper (PyPI `prefix_grouper`, arXiv 2506.05433) in a plain torch model with our weights.

The package stays what it is: it ungroups q, k, v, repeats the prefix's keys and values for every response, calls
attention twice and groups the outputs. What is around it is written so that it looks its best: attention is torch's
(the package names none for CPU; its 2-D padding mask says nothing about causality, so the second call gets the
bottom-right causal mask that flash-attn would imply), and only rows that predict response tokens reach the head, where
the package's recipe projects the whole prompt.

Shapes: P prompt tokens, R response tokens, G responses; S = P + G * R tokens of the row, H hidden, N query heads, K
key/value heads, D head dim.
"""

import importlib.util
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.architecture import Architecture
from megamem.layout.trees import shared_prefix
from megamem.models.row import RowParams, apply_rope

INSTALL = "prefix_grouper is not installed, so it is not measured: pip install --no-deps prefix_grouper"


def installed() -> bool:
    """Whether the package can be imported."""
    return importlib.util.find_spec("prefix_grouper") is not None


class PrefixGrouperModel:
    """A causal model whose attention goes through the package.

    Attributes:
        parameters: copies of ours by the same names, with gradients that exist beforehand, as ours do.
    """

    def __init__(self, arch: Architecture, parameters: Mapping[str, nn.Parameter]):
        self._arch = arch
        self.parameters = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, prompt_P: Tensor, response_GR: Tensor, coefficient_GR: Tensor) -> None:
        """Adds the gradient of `sum coefficient * log p(response token)`."""
        from prefix_grouper import PrefixGrouper

        group, length = response_GR.shape
        prompt = len(prompt_P)
        grouper = PrefixGrouper([[prompt] + [length] * group], device=prompt_P.device)
        rope = RowParams(layout=shared_prefix([(prompt, [length] * group)]))
        hidden_SH = F.embedding(torch.cat([prompt_P, response_GR.flatten()]), self._of("embedding.word_embeddings"))
        mask_RK = bottom_right(length, prompt + length, hidden_SH)
        for i in range(self._arch.layers):
            hidden_SH = self._layer(f"decoder.layers.{i}", hidden_SH, grouper, rope, mask_RK)
        hidden_SH = self._norm(hidden_SH, "decoder.final_layernorm")
        suffix_GRH = grouper.split_output(hidden_SH[None], include_prefix_last=1)[2][:, :-1]
        logits_TV = F.linear(suffix_GRH.flatten(0, 1), self._of("output_layer"))[:, : self._arch.vocab_rows]
        loss_T = F.cross_entropy(logits_TV, response_GR.flatten(), reduction="none")
        (-loss_T * coefficient_GR.flatten()).sum().backward()

    def _layer(self, name: str, x_SH: Tensor, grouper, rope: RowParams, mask_RK: Tensor) -> Tensor:
        arch = self._arch
        normed_SH = self._norm(x_SH, f"{name}.input_layernorm")
        qkv_SX = F.linear(normed_SH, self._of(f"{name}.self_attention.linear_qkv"))
        per_group = arch.heads // arch.kv_heads  # megatron-core's order: of every key/value head, its q heads, k, v
        qkv_SKXD = qkv_SX.unflatten(1, (arch.kv_heads, per_group + 2, arch.head_dim))
        q_SND = qkv_SKXD[:, :, :per_group].flatten(1, 2)
        k_SKD, v_SKD = qkv_SKXD[:, :, -2], qkv_SKXD[:, :, -1]
        tables = rope.rope_tables(arch.head_dim, arch.rope_theta, x_SH)
        q_SND, k_SKD = apply_rope(q_SND, *tables), apply_rope(k_SKD, *tables)
        q, k, v = (t.transpose(0, 1)[None] for t in (q_SND, k_SKD, v_SKD))

        def attend(q, k, v, _padding_mask):
            whole = q.size(2) == k.size(2)
            mask = None if whole else mask_RK
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=whole, enable_gqa=per_group > 1)
            return out.transpose(1, 2)

        context_SND = grouper.forward(attend, q, k, v)[0]
        x_SH = x_SH + F.linear(context_SND.flatten(1), self._of(f"{name}.self_attention.linear_proj"))
        gate_SF, up_SF = F.linear(
            self._norm(x_SH, f"{name}.pre_mlp_layernorm"), self._of(f"{name}.mlp.linear_fc1")
        ).chunk(2, -1)
        return x_SH + F.linear(F.silu(gate_SF) * up_SF, self._of(f"{name}.mlp.linear_fc2"))

    def _norm(self, x_SH: Tensor, name: str) -> Tensor:
        return F.rms_norm(x_SH, (x_SH.size(-1),), self._of(name), self._arch.norm_eps)

    def _of(self, name: str) -> Tensor:
        return self.parameters[f"{name}.weight"]


def bottom_right(queries: int, keys: int, like: Tensor) -> Tensor:
    """Additive causal mask `[queries, keys]`: the last query sees the last key."""
    mask_QK = like.new_zeros(queries, keys)
    hidden_QK = torch.ones(queries, keys, dtype=torch.bool, device=like.device).triu(keys - queries + 1)
    return mask_QK.masked_fill_(hidden_QK, -torch.inf)
