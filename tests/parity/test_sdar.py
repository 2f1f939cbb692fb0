"""SDAR against the published code: block-causal attention, blocks counted from the start of each sequence."""

import json

import torch

from megamem.layout.packing import sequence_layout
from megamem.models.gpt import LogitsHead
from megamem.models.row import RowParams
from tests.helpers import qwen_config, shared
from tests.parity.family import built, check_parity, check_parity_fails, copy_with
from tests.tol import assert_algebra

torch.set_num_threads(1)


def test_verify_against_the_published_code():
    check_parity(shared("data", "parity", "sdar"), 25)


def test_verify_sees_other_blocks_and_swapped_weights(tmp_path):
    folder = shared("data", "parity", "sdar")
    check_parity_fails(copy_with(folder, tmp_path / "swapped", ("gate_proj", "up_proj")), folder)
    other = copy_with(folder, tmp_path / "blocks_of_5", ("none", "none"))
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"block_size": 5}))
    check_parity_fails(other, folder)


@torch.no_grad()
def test_later_blocks_change_nothing(groups):
    """A prompt of 6 and a response of 6: tokens 4 and 5 see 6 and 7, the response's first two, and nothing later."""
    _, arch, model, _ = built(qwen_config("sdar"), groups)
    ids_S = torch.arange(12, device=groups.device.torch)

    def logits(ids, pairs):
        return model(ids[None], RowParams(layout=sequence_layout(arch.sequence_attention, pairs)), None, LogitsHead())

    whole = logits(ids_S, [(6, 6)])
    assert_algebra(logits(ids_S[:8], [(6, 2)]), whole[:8], "cut at a block's end")
    assert (logits(ids_S[:6], [(6, 0)])[4:] - whole[4:6]).abs().max() > 1e-3, "cut inside a block"
