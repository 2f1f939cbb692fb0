"""Partitioned attention: one exact primitive (DESIGN section 1, idea 2).

Each call of the plan is a plain flash call over one key range that returns its output and the log-sum-exp of its
scores. Forward merges the (out, lse) pairs of a query. Backward calls each partition's flash backward with the
*merged* (out, lse): flash backward recomputes P = exp(score - lse) and D = rowsum(dO * O), so with the global lse and
output each partition yields exactly its columns' share of dK, dV and its part of dQ. Never differentiate the merge
itself: the lse has no gradient in torch, and the result would be silently wrong.

Shapes: S tokens of the row, Q queries of a plan, N query heads, G key/value heads (N a multiple of G), D head dim,
C tiles of a call.
"""

import math

import torch
from torch import Tensor

from megamem.layout.dense import dense_mask
from megamem.layout.layout import Layout
from megamem.ops.attention_plan import Call, Plan, plan_attention, split_keys

# Keys of one backward call. A call returns fresh dK and dV of its keys; for a chunk of queries over a long row these
# would be as large as the row's own accumulators.
KEYS_AT_ONCE = 1024


def naive_attend(q_SND: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Tensor:
    """Reference: dense mask, full softmax. `[S, N, D]`, differentiable, any dtype."""
    repeat = q_SND.size(1) // k_SGD.size(1)
    k_SND, v_SND = k_SGD.repeat_interleave(repeat, 1), v_SGD.repeat_interleave(repeat, 1)
    score_NSS = torch.einsum("snd,tnd->nst", q_SND, k_SND) / math.sqrt(q_SND.size(-1))
    mask_SS = dense_mask(layout).to(q_SND.device)
    return torch.einsum("nst,tnd->snd", score_NSS.masked_fill(~mask_SS, -math.inf).softmax(-1), v_SND)


def attend(q_SND: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Tensor:
    """Exact attention of a packed row.

    Args:
        q_SND, k_SGD, v_SGD: query, key and value after RoPE, one dtype; G divides N (grouped-query attention).
        layout: who sees whom; its length is S.

    Returns:
        `[S, N, D]`, contiguous. Merges and gradient sums are at least fp32.
    """
    plan = plan_attention(layout)
    return _Attend.apply(q_SND, k_SGD, v_SGD, plan)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_SND: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: Plan) -> Tensor:
        out_SND, lse_SN = attention_forward(q_SND, k_SGD, v_SGD, plan)
        ctx.save_for_backward(q_SND, k_SGD, v_SGD, out_SND, lse_SN)
        ctx.plan = plan
        return out_SND

    @staticmethod
    def backward(ctx, grad_SND: Tensor):
        q_SND, k_SGD, v_SGD, out_SND, lse_SN = ctx.saved_tensors
        dk_SGD, dv_SGD = key_gradients(k_SGD), key_gradients(v_SGD)
        dq_SND = attention_backward(grad_SND, q_SND, k_SGD, v_SGD, out_SND, lse_SN, ctx.plan, dk_SGD, dv_SGD)
        return dq_SND, dk_SGD.to(k_SGD.dtype), dv_SGD.to(v_SGD.dtype), None


def attention_forward(q_QND: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Attention of the plan's Q queries over the row's keys, without autograd.

    Returns:
        Output `[Q, N, D]` in q's dtype and natural-log lse `[Q, N]`, merged over calls in at least fp32.
    """
    assert q_QND.size(0) == plan.queries and k_SGD.size(0) == plan.keys, (q_QND.shape, k_SGD.shape, plan)
    wide = _accumulator_dtype(q_QND.dtype)
    shape = (q_QND.size(0), q_QND.size(1), v_SGD.size(2))
    lse_QN = torch.full(shape[:2], -math.inf, dtype=wide, device=q_QND.device)
    out_QND = torch.zeros(shape, dtype=wide if plan.merge else q_QND.dtype, device=q_QND.device)
    for call in plan.calls:
        part_CLND, part_lse_CLN = _flash_forward(
            _queries(q_QND, call), _keys(k_SGD, call), _keys(v_SGD, call), call.first.causal
        )
        out_CLND, lse_CLN = _queries(out_QND, call), _queries(lse_QN, call)
        if not plan.merge:
            out_CLND.copy_(part_CLND)
            lse_CLN.copy_(part_lse_CLN)
            continue
        merged_CLN = torch.logaddexp(lse_CLN, part_lse_CLN.to(wide))
        out_CLND.mul_((lse_CLN - merged_CLN).exp()[..., None])
        out_CLND.add_(part_CLND * (part_lse_CLN - merged_CLN).exp()[..., None])
        lse_CLN.copy_(merged_CLN)
    return out_QND.to(q_QND.dtype), lse_QN


def key_gradients(x_SGD: Tensor) -> Tensor:
    """A zero accumulator for the gradient of keys or values: at least fp32, since many chunks add to it."""
    return torch.zeros_like(x_SGD, dtype=_accumulator_dtype(x_SGD.dtype), memory_format=torch.contiguous_format)


def attention_backward(
    grad_QND: Tensor,
    q_QND: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_QND: Tensor,
    lse_QN: Tensor,
    plan: Plan,
    dk_SGD: Tensor,
    dv_SGD: Tensor,
) -> Tensor:
    """Backward of `attention_forward` from its merged output and lse.

    Adds to `dk_SGD` and `dv_SGD` (from `key_gradients`) in place, so that chunks of queries share them.

    Returns:
        The queries' gradient `[Q, N, D]` in their dtype.
    """
    dq_QND = torch.zeros_like(q_QND, dtype=_accumulator_dtype(q_QND.dtype), memory_format=torch.contiguous_format)
    for call in (part for whole in plan.calls for part in split_keys(whole, KEYS_AT_ONCE)):
        parts = _flash_backward(
            _queries(grad_QND, call), _queries(q_QND, call), _keys(k_SGD, call), _keys(v_SGD, call),
            _queries(out_QND, call), _queries(lse_QN, call), call.first.causal,
        )  # fmt: skip
        for total, part, tiles in zip((dq_QND, dk_SGD, dv_SGD), parts, (_queries, _keys, _keys), strict=True):
            tiles(total, call).add_(part)
    return dq_QND.to(q_QND.dtype)


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _tiles(x: Tensor, start: int, length: int, count: int, stride: int) -> Tensor:
    """View `[C, L, …]` of rows `start + c * stride …` of `x` `[S, …]`; no copy."""
    if count == 1:
        return x[None, start : start + length]
    return x.as_strided(
        (count, length, *x.shape[1:]),
        (stride * x.stride(0), *x.stride()),
        x.storage_offset() + start * x.stride(0),
    )


def _queries(x: Tensor, call: Call) -> Tensor:
    return _tiles(x, call.first.q, call.first.q_len, call.count, call.q_stride)


def _keys(x: Tensor, call: Call) -> Tensor:
    return _tiles(x, call.first.k, call.first.k_len, call.count, call.k_stride)


def _flash_forward(q_CLND: Tensor, k_CMGD: Tensor, v_CMGD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """One kernel call: output `[C, L, N, D]` and natural-log lse `[C, L, N]`."""
    q, k, v = (x.transpose(1, 2) for x in (q_CLND, k_CMGD, v_CMGD))
    if q.is_cpu:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif _has_flash_kernel(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    else:
        out, lse = _dense_forward(q, k, v, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _flash_backward(
    grad_CLND: Tensor, q_CLND: Tensor, k_CMGD: Tensor, v_CMGD: Tensor, out_CLND: Tensor, lse_CLN: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One kernel call with the merged output and lse; gradients in the layout of the inputs."""
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_CLND, q_CLND, k_CMGD, v_CMGD, out_CLND))
    lse = lse_CLN.transpose(1, 2)
    if q.is_cpu:
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
    elif _has_flash_kernel(q):
        no_lengths, no_dropout = None, torch.zeros(2, dtype=torch.uint64, device=q.device)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), no_lengths, no_lengths, q.size(2), k.size(2), 0.0, causal,
            no_dropout, no_dropout[0],
        )  # fmt: skip
    else:
        parts = _dense_backward(grad, q, k, v, out, lse, causal)
    return tuple(x.transpose(1, 2) for x in parts)


def _has_flash_kernel(q: Tensor) -> bool:
    """On accelerators flash serves half precision and these head dims; the rest goes tile by tile through scores."""
    return q.dtype in (torch.bfloat16, torch.float16) and q.size(-1) % 8 == 0 and q.size(-1) <= 256


def _dense_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scaled scores `[C, G, N/G, L, M]` of one tile in at least fp32."""
    wide = _accumulator_dtype(q.dtype)
    grouped = q.to(wide).unflatten(1, (k.size(1), -1))
    score = torch.einsum("cgrld,cgmd->cgrlm", grouped, k.to(wide)) / math.sqrt(q.size(-1))
    if causal:
        score = score.masked_fill(torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return score


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The flash call's contract by explicit scores of one tile, for what no flash kernel serves (fp32 on a GPU)."""
    score = _dense_scores(q, k, causal)
    lse = score.logsumexp(-1)
    out = torch.einsum("cgrlm,cgmd->cgrld", (score - lse[..., None]).exp(), v.to(score.dtype))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _dense_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The flash backward's formulas: P = exp(score - lse), dS = P * (dP - rowsum(dO * O))."""
    score = _dense_scores(q, k, causal)
    heads = (k.size(1), -1)
    p = (score - lse.unflatten(1, heads)[..., None]).exp()
    grad, out = (x.to(p.dtype).unflatten(1, heads) for x in (grad, out))
    dv = torch.einsum("cgrlm,cgrld->cgmd", p, grad)
    dp = torch.einsum("cgrld,cgmd->cgrlm", grad, v.to(p.dtype))
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    dq = torch.einsum("cgrlm,cgmd->cgrld", ds, k.to(p.dtype)).flatten(1, 2)
    dk = torch.einsum("cgrlm,cgrld->cgmd", ds, q.to(p.dtype).unflatten(1, heads))
    return dq, dk, dv
