"""Every model family on TP 2 x PP 2 with sequence parallelism: published logits, and weights back bit-equal.

One start of four processes.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megamem.cli.convert import ConvertConfig, read_verdict, verdict_text, verify_job
from megamem.config.schema import ParallelConfig
from tests.dist.harness import run_ranks
from tests.helpers import qwen_config, shared, write_config
from tests.parity.family import random_weights
from tests.parity.plain_qwen import plain_qwen

SETTINGS = ConvertConfig(parallel=ParallelConfig(tensor=2, pipeline=2, sequence=True), device="cpu")
PUBLISHED = ["qwen3_full", "sdar", "dream"]
# Both pipeline stages hold its embedding; 131 vocabulary rows are padded to 256, 13 tokens to 14 (7 on each TP rank).
TIED = {"tied_qwen2": qwen_config("qwen2", tie_word_embeddings=True, vocab_size=131, intermediate_size=22)}


def make_folder(folder: Path, config: dict) -> None:
    """A checkpoint with random weights, and the logits that plain torch computes for it."""
    write_config(folder, config)
    _, _, _, drawn = random_weights(config, torch.float32)
    save_file(drawn, folder / "model.safetensors")
    ids_BL = torch.randint(0, config["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(1))
    logits_BLV = torch.stack([plain_qwen(drawn, config, ids_L) for ids_L in ids_BL])
    save_file({"input_ids": ids_BL, "logits": logits_BLV}, folder / "reference.safetensors")


def job(ranks, folders: dict[str, tuple[str, str]]) -> None:
    for name, (hf, scratch) in folders.items():
        own = dataclasses.replace(ranks, init_method=f"{ranks.init_method}_{name}")
        verify_job(own, Path(hf), Path(hf) / "reference.safetensors", SETTINGS, Path(scratch))


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    folders = {name: shared("data", "parity", name) for name in PUBLISHED}
    for name, config in TIED.items():
        folders[name] = tmp_path_factory.mktemp(name) / "hf"
        make_folder(folders[name], config)
    scratch = {name: tmp_path_factory.mktemp(f"{name}_scratch") for name in folders}
    run_ranks(job, 4, {name: (str(folders[name]), str(scratch[name])) for name in folders})
    return {name: read_verdict(folders[name], scratch[name]) for name in folders}


@pytest.mark.parametrize("name", [*PUBLISHED, *TIED])
def test_logits_and_weights(verdicts, name):
    verdict = verdicts[name]
    assert verdict.passed and 0 < verdict.max_difference and verdict.scale > 1, verdict_text(verdict, as_json=False)
    assert verdict.tensors > 20 and not verdict.unequal
