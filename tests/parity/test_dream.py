"""Dream against the published code: full attention, and logits shifted by one for everyone who asks for a token.

Shapes: L tokens of a sequence, B sequences, V vocabulary.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megamem.cli.convert import FP32_NOISE
from megamem.convert.source import SafetensorsSource
from megamem.convert.weights import load_weights
from megamem.diffusion.noise import NoisePlan
from megamem.layout.layout import rows
from megamem.models.build import build_model
from megamem.models.gpt import LogitsHead
from megamem.models.row import RowParams
from megamem.models.runner import Runner, StreamedPipeline
from megamem.platform.groups import StageLinks
from megamem.stream.layer import StreamOptions
from megamem.train.draws import DrawnModel, DrawRows, Sample
from megamem.train.prepare import Prepared, open_model
from tests.helpers import qwen_config, refused, shared
from tests.parity.family import built, check_parity, check_parity_fails, copy_with
from tests.parity.plain_qwen import plain_qwen, shifted
from tests.tol import assert_algebra

torch.set_num_threads(1)


def test_verify_against_the_published_code(tmp_path):
    """On logits as the published model returns them, before its sampler shifts them."""
    folder = shared("data", "parity", "dream")
    check_parity(folder, 27)
    check_parity_fails(copy_with(folder, tmp_path / "swapped", ("q_proj.weight", "o_proj.weight")), folder)


@torch.no_grad()
def test_logits_of_tokens_are_the_published_ones_shifted(groups):
    """`cat([logits[:, :1], logits[:, :-1]], 1)` of each of two packed sequences."""
    folder = shared("data", "parity", "dream")
    opened, device = open_model(folder), groups.device.torch
    model = build_model(opened.arch, groups, torch.float32)
    load_weights(model, opened.spec.tensor_maps(opened.arch), opened.arch, SafetensorsSource(folder), groups)
    reference = {name: x.to(device) for name, x in load_file(folder / "reference.safetensors").items()}
    ids_BL, logits_BLV = reference["input_ids"], reference["logits"]
    count, length = ids_BL.shape
    position_T = torch.arange(count * length, device=device)
    ours = model(ids_BL.view(1, -1), RowParams(layout=rows([length] * count)), position_T, LogitsHead())
    expected = torch.cat([shifted(logits_LV) for logits_LV in logits_BLV])
    assert (ours - expected).abs().max() <= FP32_NOISE * expected.abs().max()


@pytest.mark.parametrize("pipeline", [None, StreamedPipeline(StageLinks())], ids=["megatron", "streamed"])
def test_training_rows(groups, pipeline):
    """Log-probs of masked tokens in rows of draws, against one sequence at a time in plain torch."""
    config, device = qwen_config("Dream"), groups.device.torch
    _, arch, model, drawn = built(config, groups, stream=StreamOptions(3, 2) if pipeline else None)
    key = torch.Generator().manual_seed(2)
    samples, expected = [], []
    for group, (prompt, response) in enumerate([(1, 5), (4, 3)]):
        prompt_P, response_L = (torch.randint(0, 90, (n,), generator=key) for n in (prompt, response))
        masked_DL = torch.rand(2, response, generator=key) < 0.6
        masked_DL[:, 0] = True  # predicted by the prompt's last token
        plan = NoisePlan(masked_DL, *torch.ones(2, 2, dtype=torch.float64))
        samples.append(Sample(prompt_P, response_L, plan, 1.0, group))
        for masked_L in masked_DL:
            ids_L = torch.cat([prompt_P, response_L.masked_fill(masked_L, arch.mask_id)])
            logp_LV = shifted(plain_qwen(drawn, config, ids_L)).log_softmax(-1)[prompt:]
            expected.append(logp_LV[masked_L, response_L[masked_L]])
    runner = Runner(model, groups, arch.sequence_attention, pipeline)
    of_model = DrawnModel(arch.sequence_attention, arch.shifted_logits, arch.mask_id, share_prefix="none")
    drawn_rows = DrawRows(samples, of_model, runner.row_shape(14), device)
    reports = runner.forward_backward(drawn_rows, lambda row, logp_T: (logp_T.sum(), {"logp": logp_T.detach()}))
    assert len(reports) > 1
    for found in (runner.forward(drawn_rows), [report["logp"] for report in reports]):
        assert_algebra(torch.cat(found).cpu(), torch.cat(expected))


@pytest.mark.parametrize("model_type", ["Dream", "qwen3"])
def test_a_prompt_has_a_token(groups, model_type):
    _, arch, _, _ = built(qwen_config(model_type), groups)
    tokenizer = SimpleNamespace(encode_prompt=lambda text: [ord(c) for c in text])
    prepared = SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(arch=arch))
    assert Prepared.prompt_ids(prepared, "a", "problem 'x'") == (97,)
    message = refused(Prepared.prompt_ids, prepared, "", "problem 'x' (train)")
    assert "problem 'x' (train)" in message and "prompt has no token" in message
