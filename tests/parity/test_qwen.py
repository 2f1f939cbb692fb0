"""The Qwen family against published code (parity files, transformers), and against plain torch, gradients included.

Shapes: S packed tokens, L tokens of one sequence, T scored tokens, V vocabulary.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megamem.cli.convert import export_checkpoint, import_checkpoint, verdict_text, verify
from megamem.convert.source import SafetensorsSource
from megamem.convert.weights import export_weights, load_weights
from megamem.convert.writer import SafetensorsWriter
from megamem.layout.packing import sequence_layout
from megamem.models.build import build_model
from megamem.models.gpt import LogProbHead
from megamem.models.row import RowParams
from megamem.stream.layer import StreamOptions
from tests.helpers import qwen_config, shared
from tests.parity.family import (
    built,
    check_parity,
    check_parity_fails,
    copy_with,
    full_logits,
    gradients_by_name,
    random_weights,
)
from tests.parity.plain_qwen import plain_qwen, shifted
from tests.tol import assert_algebra, assert_exact

torch.set_num_threads(1)

CONFIGS = {
    "qwen2": qwen_config("qwen2"),
    "qwen2_tied_mqa": qwen_config("qwen2", tie_word_embeddings=True, num_key_value_heads=1, vocab_size=131),
    "qwen3": qwen_config("qwen3"),
    "qwen3_tied_mha": qwen_config("qwen3", tie_word_embeddings=True, num_key_value_heads=4, rms_norm_eps=0.3),
    "a2d_qwen2": qwen_config("a2d-qwen2", head_dim=6),
    "a2d_qwen3": qwen_config("a2d-qwen3", num_hidden_layers=1, rope_theta=1e6),
    "sdar": qwen_config("sdar"),
    "sdar_blocks_of_3": qwen_config("sdar", block_size=3, tie_word_embeddings=True),
    "dream": qwen_config("Dream"),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
PAIRS = [(3, 4), (1, 1), (5, 7)]  # prompt, response; blocks do not end where prompts do
LENGTHS = [sum(pair) for pair in PAIRS]
STREAMED = StreamOptions(chunk_tokens=3, head_tokens=2)


# --- published code


def test_verify_against_the_published_code(tmp_path):
    """A2D: small differences that are not zero, every tensor; and a large one where norms are exchanged."""
    folder = shared("data", "parity", "qwen3_full")
    check_parity(folder, 25)
    check_parity_fails(copy_with(folder, tmp_path / "swapped", ("q_norm", "k_norm")), folder)


def transformers_folder(folder: Path, kind: str, tied: bool) -> None:
    """A tiny random model of the transformers library, saved by it, and the logits it computes."""
    import transformers

    sizes = {k: v for k, v in qwen_config(rope_theta=5e5).items() if k not in ("model_type", "attention_dropout")}
    if kind == "Qwen2":
        del sizes["head_dim"]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**sizes | {"tie_word_embeddings": tied}, initializer_range=0.3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # initialised as ones and zeros
            torch.nn.init.normal_(parameter, float(not name.endswith("bias")), 0.3)
    model.save_pretrained(folder)
    ids_BL = torch.randint(0, 97, (2, 13))
    with torch.no_grad():
        save_file({"input_ids": ids_BL, "logits": model(ids_BL).logits}, folder.parent / "reference.safetensors")


@pytest.mark.parametrize(("kind", "tied"), [("Qwen2", True), ("Qwen3", False)])
def test_verify_against_transformers(tmp_path, kind, tied):
    transformers_folder(tmp_path / "hf", kind, tied)
    verdict = verify(tmp_path / "hf", tmp_path / "reference.safetensors", ())
    assert verdict.passed and verdict.max_difference > 0, verdict_text(verdict, as_json=False)
    assert verdict.scale > 1 and verdict.tensors == {"Qwen2": 26, "Qwen3": 25}[kind]


def test_import_and_export_commands(tmp_path):
    """A tied head is in the files once; everything else in the folder comes back, too."""
    transformers_folder(tmp_path / "hf", "Qwen3", tied=True)
    import_checkpoint(tmp_path / "hf", tmp_path / "checkpoint", ())
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "back", (), None)
    before, after = SafetensorsSource(tmp_path / "hf"), SafetensorsSource(tmp_path / "back")
    assert set(before.shapes) == set(after.shapes) and "lm_head.weight" not in before.shapes
    for name in before.shapes:
        assert_exact(after.read(name), before.read(name), name)
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()


# --- plain torch


def random_ids(config: dict, device) -> torch.Tensor:
    key = torch.Generator().manual_seed(6)
    return torch.randint(0, config["vocab_size"], (sum(LENGTHS),), generator=key).to(device)


@each_config
def test_logits_and_every_gradient(config, groups):
    """Three sequences in one packed row against one by one; one random cotangent on all logits, as the model returns
    them."""
    device = groups.device.torch
    spec, arch, model, drawn = built(config, groups)
    weights = {n: w.to(device).requires_grad_() for n, w in drawn.items()}
    ids_S = random_ids(config, device)
    row = RowParams(layout=sequence_layout(arch.sequence_attention, PAIRS))
    ours = model(ids_S[None], row, None, full_logits)
    plain = torch.cat([plain_qwen(weights, config, ids) for ids in ids_S.split(LENGTHS)])
    assert ours.shape == (sum(LENGTHS), config["vocab_size"])
    assert_algebra(ours, plain, "logits")
    cotangent = torch.randn(plain.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(device)
    (ours * cotangent).sum().backward()
    (plain * cotangent).sum().backward()
    for name, gradient in gradients_by_name(spec, arch, model, weights).items():
        assert weights[name].grad.abs().max() > 0, name
        assert_algebra(gradient, weights[name].grad, name)


@pytest.mark.parametrize("stream", [None, STREAMED], ids=["plain", "streamed"])
@each_config
def test_log_probs_of_tokens(config, groups, stream):
    """The training head is asked for tokens; where logits are shifted, the state before a token predicts it."""
    device = groups.device.torch
    spec, arch, model, drawn = built(config, groups, stream=stream)
    model.stream_short_rows = True
    weights = {n: w.to(device).requires_grad_() for n, w in drawn.items()}
    ids_S = random_ids(config, device)
    position_T = torch.tensor([1, 2, 6, 8, 14, 20], device=device)  # responses' first and last tokens among them
    target_T = torch.tensor([config["vocab_size"] - 1, 0, 5, 5, 64, 7], device=device)
    row = RowParams(layout=sequence_layout(arch.sequence_attention, PAIRS).filled(24))
    ids_F = torch.cat([ids_S, ids_S.new_zeros(3)])
    ours = model(ids_F[None], row, position_T, LogProbHead(target_T))
    logits = [plain_qwen(weights, config, ids) for ids in ids_S.split(LENGTHS)]
    if config["model_type"] in ("qwen2", "qwen3", "Dream"):
        logits = [shifted(x) for x in logits]
    plain = torch.cat(logits).log_softmax(-1)[position_T, target_T]
    assert_algebra(ours, plain, "log-probs")
    coefficient_T = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 1.0], dtype=torch.float64, device=device)
    (ours * coefficient_T).sum().backward()
    (plain * coefficient_T).sum().backward()
    for name, gradient in gradients_by_name(spec, arch, model, weights).items():
        assert_algebra(gradient, weights[name].grad, name)


# --- files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["qwen2_tied_mqa", "qwen3", "sdar", "dream"])
def test_import_and_export_are_bit_equal(tmp_path, groups, name, dtype):
    spec, arch, source, drawn = random_weights(CONFIGS[name], dtype)
    maps = spec.tensor_maps(arch)
    model = build_model(arch, groups, dtype)
    load_weights(model, maps, arch, source, groups)
    with SafetensorsWriter(tmp_path, [(n, tuple(x.shape), dtype) for n, x in drawn.items()], 30_000) as writer:
        export_weights(model, maps, arch, groups, writer.write)
    after = SafetensorsSource(tmp_path)
    assert set(after.shapes) == set(drawn)
    for n, x in drawn.items():
        assert_exact(after.read(n), x, n)
