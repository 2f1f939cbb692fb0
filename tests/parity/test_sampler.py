"""Block denoising against a plain loop over one canvas, as LLaDA's published `generate` does it.

Shapes: L tokens of a canvas, V vocabulary.
"""

import pytest
import torch
from torch import Tensor

from megamem.convert.source import RandomSource
from megamem.convert.weights import load_weights
from megamem.layout.layout import rows
from megamem.models.build import build_model
from megamem.models.gpt import LogitsHead
from megamem.models.row import RowParams
from megamem.models.runner import Runner
from megamem.models.spec import find_spec
from megamem.platform.device import resolve_device
from megamem.platform.groups import process_groups
from megamem.platform.launch import Ranks
from megamem.platform.rng import derive_seed, uniform_hash
from megamem.rollout.rollout import Request
from megamem.rollout.sampler import Decoding, sample
from tests.helpers import llada_config, qwen_config
from tests.parity.plain_qwen import shifted

torch.set_num_threads(1)
SEED, STEP = 7, 3


CONFIGS = {"llada": llada_config(init_std=0.4), "dream": qwen_config("Dream", initializer_range=0.4)}


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS)
def runner(request):
    """A random model; sharp logits, so that argmax does not hang on rounding."""
    spec = find_spec(request.param, "test")
    arch = spec.read_config(request.param)
    maps = spec.tensor_maps(arch)
    with process_groups(Ranks(0, 1, 0, None, "single process"), resolve_device("auto", 0), 1, 1) as groups:
        model = build_model(arch, groups, torch.float64)
        load_weights(model, maps, arch, RandomSource(maps, arch, 1), groups)
        yield Runner(model, groups, "full"), arch


@torch.no_grad()
def plain_generate(runner: Runner, arch, request: Request, d: Decoding) -> tuple[int, ...]:
    """One canvas, one forward of everything per step, top-k by a sorted list."""
    canvas = torch.tensor([*request.prompt, *[arch.mask_id] * d.gen_length])
    begin, blocks = len(request.prompt), d.gen_length // d.block_length
    per_block = d.steps // blocks
    for block in range(blocks):
        start = begin + block * d.block_length
        stop = start + d.block_length
        for turn in range(per_block):
            logits_LV = _logits(runner, canvas)
            key = derive_seed(SEED, "sample", STEP, request.problem, request.sample, block, turn)
            key_L = torch.arange(len(canvas)) + key
            noise_LV = -torch.log(-torch.log(uniform_hash(key_L, torch.arange(logits_LV.size(1)))))
            score_LV = logits_LV + d.temperature * noise_LV if d.temperature else logits_LV.clone()
            score_LV[:, arch.mask_id] = -torch.inf
            token_L = score_LV.argmax(-1)
            confidence_L = logits_LV.softmax(-1).gather(-1, token_L[:, None])[:, 0]
            masked = [i for i in range(start, stop) if canvas[i] == arch.mask_id]
            keep = d.block_length // per_block + (turn < d.block_length % per_block)
            for i in sorted(masked, key=lambda i: -float(confidence_L[i]))[:keep]:
                canvas[i] = token_L[i]
        if d.stop_at_eos and canvas[stop - 1] == arch.eos_id:
            canvas[canvas == arch.mask_id] = arch.eos_id
            break
    return tuple(canvas[begin:].tolist())


def _logits(runner: Runner, canvas: Tensor) -> Tensor:
    """Logits of every token of the canvas."""
    logits_LV = runner.model(canvas[None], RowParams(layout=rows([len(canvas)])), None, LogitsHead()).double()
    return shifted(logits_LV) if runner.model.shifted_logits else logits_LV


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("gen_length", "block_length", "steps"), [(8, 8, 8), (8, 8, 3), (12, 4, 6), (6, 3, 2)])
@pytest.mark.parametrize("stop_at_eos", [False, True])
def test_equals_the_plain_loop(runner, temperature, gen_length, block_length, steps, stop_at_eos):
    run, arch = runner
    decoding = Decoding(
        gen_length, block_length, steps, temperature, "low_confidence", "free", stop_at_eos, 40,
        arch.eos_id, arch.mask_id, SEED, STEP,
    )  # fmt: skip
    prompts = [(5, 6, 7), (3,), (9, 8, 7, 6, 5, 4, 3), (5, 6, 7)]
    requests = [Request(f"p{i}", i % 2, prompt) for i, prompt in enumerate(prompts)]
    got = [rollout.response for rollout in sample(run, requests, decoding)]
    assert got == [plain_generate(run, arch, request, decoding) for request in requests]
    assert all(arch.mask_id not in response for response in got)
