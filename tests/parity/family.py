"""What the tests of every model family need: random weights, a model with them, its gradients by Hugging Face name."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.cli.convert import FP32_NOISE, verdict_text, verify
from megamem.convert.source import RandomSource, SafetensorsSource
from megamem.convert.weights import load_weights, stage_parameters
from megamem.convert.writer import SafetensorsWriter
from megamem.models.build import build_model
from megamem.models.spec import find_spec
from megamem.stream.layer import StreamOptions


def random_weights(config: dict, dtype: torch.dtype = torch.float64):
    """A source of random weights, norms among them, large enough for every part to matter."""
    spec = find_spec(config, "here")
    arch = spec.read_config(config)
    source = RandomSource(spec.tensor_maps(arch), arch, seed=3)
    key = torch.Generator().manual_seed(4)
    drawn = {n: torch.randn(s, generator=key, dtype=torch.float64) for n, s in source.shapes.items()}
    drawn = {n: (1 + 0.3 * x if x.dim() == 1 else 0.4 * x).to(dtype) for n, x in drawn.items()}
    source.read = drawn.__getitem__
    source.dtypes = dict.fromkeys(drawn, dtype)
    return spec, arch, source, drawn


def built(config: dict, groups, dtype: torch.dtype = torch.float64, stream: StreamOptions | None = None):
    """(spec, architecture, model, its weights by Hugging Face name)."""
    spec, arch, source, drawn = random_weights(config, dtype)
    model = build_model(arch, groups, dtype, stream=stream)
    load_weights(model, spec.tensor_maps(arch), arch, source, groups)
    return spec, arch, model, drawn


def full_logits(hidden_TH: Tensor, weight_VH: Tensor, shard) -> Tensor:
    """A head for tests: differentiable logits of the real vocabulary."""
    return F.linear(hidden_TH, weight_VH)[:, : shard.valid]


def gradients_by_name(spec, arch, model, source_names) -> dict[str, Tensor]:
    """The model's gradients under their Hugging Face names, the way weights are exported."""
    named = {}
    parameters = stage_parameters(model)
    for entry in spec.tensor_maps(arch):
        if entry.core in parameters:
            named |= zip(entry.hf, entry.join([parameters[entry.core].grad], arch), strict=True)
    assert set(named) == set(source_names)
    return named


def copy_with(folder: Path, target: Path, swap: tuple[str, str]) -> Path:
    """The folder with two parts of tensor names exchanged."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    source, (a, b) = SafetensorsSource(folder), swap
    exchange = {n: n.replace(a, "*").replace(b, a).replace("*", b) for n in source.shapes}
    with SafetensorsWriter(target, [(n, source.shapes[n], source.dtypes[n]) for n in exchange]) as writer:
        for name in exchange:
            writer.write(name, source.read(exchange[name]))
    return target


def check_parity(folder: Path, tensors: int) -> None:
    """`verify` measures a small difference to the published logits that is not zero, and compares every tensor."""
    verdict = verify(folder, folder / "reference.safetensors", ())
    assert verdict.passed, verdict_text(verdict, as_json=False)
    assert 0 < verdict.max_difference <= FP32_NOISE * verdict.scale and verdict.scale > 1
    assert (verdict.tensors, verdict.unequal) == (tensors, [])


def check_parity_fails(altered: Path, folder: Path) -> None:
    """`verify` of an altered copy measures a large difference to the logits of the original."""
    verdict = verify(altered, folder / "reference.safetensors", ())
    assert not verdict.passed and verdict.max_difference > 1000 * FP32_NOISE and not verdict.unequal
