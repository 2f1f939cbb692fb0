"""LLaDA against the published code's logits, and against a plain torch model written here, gradients included.

Shapes: S packed tokens, L tokens of one sequence, H hidden, N query heads, G key/value heads, D head dim, V vocabulary.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.cli.convert import FP32_NOISE, verdict_text, verify
from megamem.convert.source import DTYPES, RandomSource, SafetensorsSource
from megamem.convert.weights import export_weights, load_weights
from megamem.convert.writer import SafetensorsWriter
from megamem.layout.layout import FULL, Edge, Layout, Segment, prefix_lm, rows
from megamem.models.build import build_model
from megamem.models.gpt import LogitsHead, LogProbHead
from megamem.models.row import RowParams
from tests.helpers import llada_config, refused, shared, write_config
from tests.parity.family import built, copy_with, full_logits, gradients_by_name, random_weights
from tests.tol import assert_algebra, assert_exact

torch.set_num_threads(1)


# --- the published code


def test_verify_against_the_published_code():
    """It measures: on a passing checkpoint a small difference that is not zero, and every tensor."""
    folder = shared("data", "parity", "llada")
    verdict = verify(folder, folder / "reference.safetensors", ())
    assert verdict.passed, verdict_text(verdict, as_json=False)
    assert 0 < verdict.max_difference <= FP32_NOISE * verdict.scale and verdict.scale > 1
    assert (verdict.tensors, verdict.unequal) == (21, [])
    told = verdict_text(verdict, as_json=False)
    assert f"{verdict.max_difference:.3g}" in told and "21 of 21 tensors bit-equal" in told and "passed" in told


@pytest.mark.parametrize("swap", [("ff_proj", "up_proj"), ("q_proj", "k_proj")], ids=["gate_and_up", "q_and_k"])
def test_verify_sees_swapped_weights(tmp_path, swap):
    folder = shared("data", "parity", "llada")
    swapped = copy_with(folder, tmp_path / "swapped", swap)
    verdict = verify(swapped, folder / "reference.safetensors", ())
    assert not verdict.passed and verdict.max_difference > 1000 * FP32_NOISE and not verdict.unequal
    assert "FAILED" in verdict_text(verdict, as_json=False)


def test_verify_refuses_another_file_as_reference():
    folder = shared("data", "parity", "llada")
    message = refused(verify, folder, folder / "model.safetensors", ())
    assert "model.safetensors" in message and "input_ids and logits" in message


# --- a plain model


def plain_llada(weights: dict[str, Tensor], config: dict, ids_L: Tensor) -> Tensor:
    """Logits `[L, V]` of one sequence: LLaDA as its modelling code computes it, in the weights' precision."""
    heads, kv_heads = config["n_heads"], config["n_kv_heads"]
    dim = config["d_model"] // heads

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    def rope(x_LND):
        if not config["rope"]:
            return x_LND
        place = torch.arange(len(ids_L), dtype=x_LND.dtype, device=x_LND.device)
        frequency = config["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=x_LND.dtype, device=x_LND.device) / dim)
        angle = torch.cat([place[:, None] * frequency] * 2, -1)[:, None]
        first, second = x_LND.chunk(2, -1)
        return x_LND * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    x_LH = weights["model.transformer.wte.weight"][ids_L]
    if not config["rope"]:
        x_LH = x_LH + weights["model.transformer.wpe.weight"][: len(ids_L)]
    for i in range(config["n_layers"]):
        block = f"model.transformer.blocks.{i}"
        h = norm(x_LH, f"{block}.attn_norm")
        q = rope(linear(h, f"{block}.q_proj").unflatten(-1, (heads, dim)))
        k = rope(linear(h, f"{block}.k_proj").unflatten(-1, (kv_heads, dim)))
        v = linear(h, f"{block}.v_proj").unflatten(-1, (kv_heads, dim))
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        p = (torch.einsum("lnd,mnd->nlm", q, k) / math.sqrt(dim)).softmax(-1)  # everyone sees everyone
        x_LH = x_LH + linear(torch.einsum("nlm,mnd->lnd", p, v).flatten(1), f"{block}.attn_out")
        h = norm(x_LH, f"{block}.ff_norm")
        x_LH = x_LH + linear(F.silu(linear(h, f"{block}.ff_proj")) * linear(h, f"{block}.up_proj"), f"{block}.ff_out")
    head = "wte" if config["weight_tying"] else "ff_out"
    return linear(norm(x_LH, "model.transformer.ln_f"), f"model.transformer.{head}")


CONFIGS = {
    "gqa": llada_config(),
    "mha": llada_config(n_kv_heads=4),
    "mqa": llada_config(n_kv_heads=1),
    "vocab_is_not_rows": llada_config(embedding_size=131),
    "tied_head": llada_config(weight_tying=True, n_kv_heads=1),
    "learned_positions": llada_config(rope=False),
    "one_layer_wide": llada_config(n_layers=1, d_model=40, mlp_hidden_size=131, rope_theta=500000.0, rms_norm_eps=0.3),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
LENGTHS = [7, 1, 12]


def random_ids(config: dict, device) -> Tensor:
    key = torch.Generator().manual_seed(6)
    return torch.randint(0, config["embedding_size"], (sum(LENGTHS),), generator=key).to(device)


@each_config
def test_logits_and_every_gradient(config, groups):
    """Three sequences in one packed row against one by one; one random cotangent on all logits."""
    device = groups.device.torch
    spec, arch, model, drawn = built(config, groups)
    weights = {n: w.to(device).requires_grad_() for n, w in drawn.items()}
    ids_S = random_ids(config, device)
    ours = model(ids_S[None], RowParams(layout=rows(LENGTHS)), torch.arange(len(ids_S), device=device), full_logits)
    plain = torch.cat([plain_llada(weights, config, ids) for ids in ids_S.split(LENGTHS)])
    assert ours.shape == (sum(LENGTHS), config["embedding_size"])
    assert_algebra(ours, plain, "logits")
    cotangent = torch.randn(plain.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(device)
    (ours * cotangent).sum().backward()
    (plain * cotangent).sum().backward()
    for name, gradient in gradients_by_name(spec, arch, model, weights).items():
        assert weights[name].grad.abs().max() > 0, name
        assert_algebra(gradient, weights[name].grad, name)
    padded = model.embedding.word_embeddings.weight.grad[arch.vocab_rows :]
    assert len(padded) and not padded.any(), "padded vocabulary rows get no gradient"


@each_config
def test_log_prob_head(config, groups):
    """The training head: log-probs of some positions, in any order, and their gradients."""
    device = groups.device.torch
    spec, arch, model, drawn = built(config, groups)
    weights = {n: w.to(device).requires_grad_() for n, w in drawn.items()}
    ids_S = random_ids(config, device)
    position_T = torch.tensor([18, 0, 7, 3, 4], device=device)
    target_T = torch.tensor([config["embedding_size"] - 1, 0, 5, 5, 64], device=device)
    ours = model(ids_S[None], RowParams(layout=rows(LENGTHS)), position_T, LogProbHead(target_T))
    plain = torch.cat([plain_llada(weights, config, ids) for ids in ids_S.split(LENGTHS)]).log_softmax(-1)
    plain = plain[position_T, target_T]
    assert_algebra(ours, plain, "log-probs")
    coefficient_T = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64, device=device)
    (ours * coefficient_T).sum().backward()
    (plain * coefficient_T).sum().backward()
    for name, gradient in gradients_by_name(spec, arch, model, weights).items():
        assert_algebra(gradient, weights[name].grad, name)


@pytest.mark.parametrize("name", ["gqa", "learned_positions"])
def test_positions_come_from_the_layout(groups, name):
    """`[P | A | B]` with both suffixes at the positions after P: each is what it is in a row `[P | own]`.

    (Packed rows alone would not tell under RoPE: it is relative, and theirs are shifted as a whole.)
    """
    _, _, model, _ = built(CONFIGS[name], groups)
    device = groups.device.torch
    ids_S = random_ids(CONFIGS[name], device)[:12]
    prompt, a, b = Segment(0, 5), Segment(5, 4, 5), Segment(9, 3, 5)
    edges = [Edge(i, i, FULL) for i in range(3)] + [Edge(1, 0, FULL), Edge(2, 0, FULL)]

    def logits(ids, layout):
        with torch.no_grad():
            place = torch.arange(len(ids), device=device)
            return model(ids[None], RowParams(layout=layout), place, LogitsHead())

    joined = logits(ids_S, Layout((prompt, a, b), tuple(edges)))
    with_a = logits(ids_S[:9], prefix_lm([(5, 4)]))
    with_b = logits(torch.cat([ids_S[:5], ids_S[9:]]), prefix_lm([(5, 3)]))
    assert_algebra(joined[:9], with_a, "prompt and A")
    assert_algebra(joined[9:], with_b[5:], "B")
    assert_algebra(joined[:5], logits(ids_S[:5], rows([5])), "the prompt does not see the suffixes")


# --- files


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["gqa", "vocab_is_not_rows", "tied_head", "learned_positions"])
def test_import_and_export_are_bit_equal(tmp_path, groups, name, dtype):
    """fp16 goes through a fp32 model, as `convert` does."""
    config = CONFIGS[name]
    spec, arch, source, drawn = random_weights(config, dtype)
    infos = [(n, tuple(x.shape), dtype) for n, x in drawn.items()]
    maps = spec.tensor_maps(arch)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with SafetensorsWriter(tmp_path / "a", infos, file_bytes=20_000) as writer:
        for n, x in drawn.items():
            writer.write(n, x)
    model = build_model(arch, groups, torch.float32 if dtype == torch.float16 else dtype)
    before = SafetensorsSource(tmp_path / "a")
    load_weights(model, maps, arch, before, groups)
    with SafetensorsWriter(tmp_path / "b", infos, file_bytes=30_000) as writer:
        export_weights(model, maps, arch, groups, writer.write)
    after = SafetensorsSource(tmp_path / "b")
    assert set(after.shapes) == set(before.shapes) == set(drawn)
    for n, x in drawn.items():
        assert_exact(after.read(n), x, n)


@pytest.mark.parametrize("name", ["vocab_is_not_rows", "tied_head"])
def test_verify_bf16_files(tmp_path, name):
    """Through a checkpoint on disk; no reference: weights only."""
    config = CONFIGS[name]
    write_config(tmp_path, config)
    _, _, _, drawn = random_weights(config, torch.bfloat16)
    infos = [(n, tuple(x.shape), x.dtype) for n, x in drawn.items()]
    with SafetensorsWriter(tmp_path, infos, file_bytes=20_000) as writer:
        for n, x in drawn.items():
            writer.write(n, x)
    verdict = verify(tmp_path, None, ())
    assert verdict.passed and verdict.max_difference is None
    assert (verdict.tensors, verdict.unequal) == (len(drawn), [])


def test_nothing_changes_when_tensors_are_missing(groups):
    config = CONFIGS["gqa"]
    spec, arch, model, drawn = built(config, groups)
    other = RandomSource(spec.tensor_maps(arch), arch, seed=9)
    del other.shapes["model.transformer.ln_f.weight"]
    message = refused(load_weights, model, spec.tensor_maps(arch), arch, other, groups)
    assert "1 missing: model.transformer.ln_f.weight" in message
    weight = model.embedding.word_embeddings.weight.detach().cpu()
    assert_exact(weight[: arch.vocab_rows], drawn["model.transformer.wte.weight"])
