"""`megamem convert import | export | verify`: the jobs behind them, run on as many processes as the layout needs."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from megamem.config.load import explain
from megamem.config.schema import ParallelConfig, Section
from megamem.convert.source import CODES, DTYPES, SafetensorsSource, check_coverage
from megamem.convert.weights import export_weights, load_weights
from megamem.convert.writer import SafetensorsWriter
from megamem.errors import UserError
from megamem.layout.packing import pack
from megamem.platform.device import DeviceName, resolve_device
from megamem.platform.groups import Groups, process_groups
from megamem.platform.launch import Ranks
from megamem.platform.local import run_locally
from megamem.train.checkpoint import CheckpointInfo, copy_small_files, load_model
from megamem.train.prepare import ModelFolder, open_model
from megamem.train.save import begin_checkpoint

# Largest logit difference, relative to the largest logit, that fp32 rounding explains: parity checkpoints measure 1e-6.
FP32_NOISE = 2e-5


class ConvertConfig(Section):
    """Settings of the convert commands: the layout of the processes that do the work."""

    parallel: ParallelConfig = ParallelConfig()
    device: DeviceName = "auto"


def layout_settings(folder: ModelFolder, overrides: Sequence[str]) -> ConvertConfig:
    """Parse `parallel.tensor=…` and check that the model can be laid out that way.

    Raises:
        UserError: unknown key, wrong type, or a degree that does not divide the model.
    """
    for text in overrides:
        if "=" not in text:
            raise UserError(f"override {text!r} is not of the form key=value, e.g. parallel.tensor=2")
    try:
        settings = ConvertConfig.model_validate(OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides))))
    except ValidationError as error:
        raise UserError("\n".join(explain(e, ConvertConfig) for e in error.errors()[:2])) from None
    from megamem.config.rules import model_fits_layout

    problems = list(model_fits_layout(settings.parallel, folder.arch))
    if problems:
        raise UserError("\n".join(problems[:2]))
    return settings


def _world(settings: ConvertConfig) -> int:
    return settings.parallel.tensor * settings.parallel.pipeline


def _build(folder: ModelFolder, settings: ConvertConfig, groups: Groups, dtype: torch.dtype):
    from megamem.models.build import build_model

    return build_model(folder.arch, groups, dtype, settings.parallel.sequence)


def _holding_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The narrowest parameter dtype that holds all of these exactly (fp16 and mixtures: fp32)."""
    kinds = set(dtypes)
    if kinds in ({torch.bfloat16}, {torch.float64}):
        return kinds.pop()
    return torch.float64 if torch.float64 in kinds else torch.float32


def import_checkpoint(hf: Path, out: Path, overrides: Sequence[str]) -> None:
    """Hugging Face folder -> checkpoint.

    Raises:
        UserError: anything wrong with the folder, or `out` exists or cannot be written.
    """
    if out.exists():
        raise UserError(f"{out}: exists already; choose another folder or remove it")
    folder = open_model(hf)
    settings = layout_settings(folder, overrides)
    check_coverage(folder.spec.tensor_maps(folder.arch), folder.arch, SafetensorsSource(hf))
    run_locally(_import_job, _world(settings), hf, out, settings)


def _import_job(ranks: Ranks, hf: Path, out: Path, settings: ConvertConfig) -> None:
    folder, source = open_model(hf), SafetensorsSource(hf)
    device = resolve_device(settings.device, ranks.local_rank)
    with process_groups(ranks, device, settings.parallel.tensor, settings.parallel.pipeline) as groups:
        dtype = _holding_dtype(list(source.dtypes.values()))
        model = _build(folder, settings, groups, dtype)
        load_weights(model, folder.spec.tensor_maps(folder.arch), folder.arch, source, groups)
        begin_checkpoint(out, _import_info(folder, source, dtype), model, groups, hf).advance(wait=True)


def _import_info(folder: ModelFolder, source: SafetensorsSource, dtype: torch.dtype) -> CheckpointInfo:
    codes = {name: CODES[d] for name, d in source.dtypes.items()}
    return CheckpointInfo(folder.spec.name, 0, False, str(dtype).removeprefix("torch."), codes)


def export_checkpoint(checkpoint: Path, hf: Path, overrides: Sequence[str], dtype: str | None) -> None:
    """Checkpoint -> Hugging Face folder, in the dtypes of the import (or `dtype` for all tensors).

    Raises:
        UserError: not a checkpoint, `hf` exists or cannot be written, unknown dtype.
    """
    if hf.exists():
        raise UserError(f"{hf}: exists already; choose another folder or remove it")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype = {dtype!r}; allowed: {', '.join(DTYPES)}")
    folder = open_model(checkpoint)
    if folder.info is None:
        raise UserError(f"{checkpoint}: not a megamem checkpoint (no megamem.json)")
    settings = layout_settings(folder, overrides)
    run_locally(_export_job, _world(settings), checkpoint, hf, settings, dtype)


def _export_job(ranks: Ranks, checkpoint: Path, hf: Path, settings: ConvertConfig, dtype: str | None) -> None:
    folder = open_model(checkpoint)
    device = resolve_device(settings.device, ranks.local_rank)
    with process_groups(ranks, device, settings.parallel.tensor, settings.parallel.pipeline) as groups:
        model = _build(folder, settings, groups, getattr(torch, folder.info.weights))
        load_model(checkpoint, model)
        codes = dict(folder.info.dtypes)
        write_hf_folder(hf, folder, model, groups, codes if dtype is None else dict.fromkeys(codes, dtype))


def write_hf_folder(hf: Path, folder: ModelFolder, model: Any, groups: Groups, codes: dict[str, str]) -> None:
    """Write a complete Hugging Face folder under a temporary name and rename it; a collective call."""
    maps = folder.spec.tensor_maps(folder.arch)
    if not groups.is_main:
        export_weights(model, maps, folder.arch, groups, None)
        return
    infos = {n: (n, s, DTYPES[codes[n]]) for m in maps for n, s in zip(m.hf, m.shapes(folder.arch), strict=True)}
    temporary = hf.with_name(hf.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        copy_small_files(folder.hf, temporary)
        with SafetensorsWriter(temporary, list(infos.values())) as writer:
            export_weights(model, maps, folder.arch, groups, writer.write)
        temporary.rename(hf)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{hf}: cannot be written ({error.strerror})") from None


@dataclass(frozen=True)
class Verdict:
    """What `verify` found.

    Attributes:
        max_difference, scale: largest absolute logit difference to the reference, and largest absolute logit; None
            without a reference.
        tensors: Hugging Face tensors compared after import and export.
        unequal: those that did not come back bit-equal.
    """

    max_difference: float | None
    scale: float | None
    tensors: int
    unequal: list[str]

    @property
    def passed(self) -> bool:
        close = self.max_difference is None or self.max_difference <= FP32_NOISE * self.scale
        return close and not self.unequal


def verify(hf: Path, reference: Path | None, overrides: Sequence[str]) -> Verdict:
    """Import, compare logits with a reference, export, compare weights.

    Args:
        reference: safetensors file with int64 `input_ids` `[B, L]` and `logits` `[B, L, V]`, as the published model
            returns them (before any shift).

    Raises:
        UserError: wrong folder or reference file.
    """
    folder = open_model(hf)
    settings = layout_settings(folder, overrides)
    check_coverage(folder.spec.tensor_maps(folder.arch), folder.arch, SafetensorsSource(hf))
    if reference is not None:
        _read_reference(reference)
    with tempfile.TemporaryDirectory(prefix="megamem_verify_") as scratch:
        run_locally(verify_job, _world(settings), hf, reference, settings, Path(scratch))
        return read_verdict(hf, Path(scratch))


def read_verdict(hf: Path, scratch: Path) -> Verdict:
    """What `verify_job` has left in `scratch`."""
    difference, scale = json.loads((scratch / "logits.json").read_text())
    before, after = SafetensorsSource(hf), SafetensorsSource(scratch / "export")
    unequal = [n for n in before.shapes if n not in after.shapes or not _bit_equal(before.read(n), after.read(n))]
    return Verdict(difference, scale, len(before.shapes), unequal)


def _bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _read_reference(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as handle:
            ids, logits = handle.get_tensor("input_ids"), handle.get_tensor("logits")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: needs the tensors input_ids and logits in a safetensors file ({error})") from None
    if ids.dim() != 2 or logits.shape[:2] != ids.shape:
        raise UserError(
            f"{path}: input_ids {list(ids.shape)} and logits {list(logits.shape)} must be [B, L], [B, L, V]"
        )
    return ids, logits


def verify_job(ranks: Ranks, hf: Path, reference: Path | None, settings: ConvertConfig, scratch: Path) -> None:
    """Every process's part of `verify`; leaves checkpoint, export and logit differences in the folder `scratch`."""
    folder, source = open_model(hf), SafetensorsSource(hf)
    device = resolve_device(settings.device, ranks.local_rank)
    maps = folder.spec.tensor_maps(folder.arch)
    with process_groups(ranks, device, settings.parallel.tensor, settings.parallel.pipeline) as groups:
        imported = _build(folder, settings, groups, _holding_dtype(list(source.dtypes.values())))
        load_weights(imported, maps, folder.arch, source, groups)
        codes = {name: CODES[d] for name, d in source.dtypes.items()}
        info = CheckpointInfo(
            folder.spec.name, 0, False, str(imported.config.params_dtype).removeprefix("torch."), codes
        )
        begin_checkpoint(scratch / "import", info, imported, groups, hf).advance(wait=True)
        model = _build(folder, settings, groups, imported.config.params_dtype)
        load_model(scratch / "import", model)
        write_hf_folder(scratch / "export", folder, model, groups, info.dtypes)
        numbers: tuple[float | None, float | None] = (None, None)
        if reference is not None:
            numbers = _compare_logits(folder, model.float(), groups, *_read_reference(reference))
        if groups.is_main:
            (scratch / "logits.json").write_text(json.dumps(numbers))


def _compare_logits(
    folder: ModelFolder, model: Any, groups: Groups, ids_BL: torch.Tensor, logits_BLV: torch.Tensor
) -> tuple[float, float]:
    """Largest absolute difference over the common vocabulary, and the reference's largest absolute logit."""
    from megamem.models.gpt import LogitsHead
    from megamem.models.row import Row, RowParams
    from megamem.models.runner import Runner

    rows_count, length = ids_BL.shape
    runner = Runner(model, groups, folder.arch.sequence_attention)
    shape = runner.row_shape(length)
    rows = []
    for ids_L, packed in zip(ids_BL, pack([(0, length)] * rows_count, runner.attention, shape), strict=True):
        ids_S = torch.nn.functional.pad(ids_L, (0, packed.layout.length - length)).to(groups.device.torch)
        rows.append(Row(ids_S, RowParams(layout=packed.layout), None, LogitsHead()))  # as the model returns them
    outputs = runner.forward(rows)
    result = torch.zeros(2, dtype=torch.float64, device=groups.device.torch)
    if groups.is_last_stage:
        ours_BLV = torch.stack(outputs)[:, :length].cpu()
        common = min(ours_BLV.size(-1), logits_BLV.size(-1))
        difference = (ours_BLV[..., :common].double() - logits_BLV[..., :common].double()).abs().max()
        result = torch.stack([difference, logits_BLV.double().abs().max()]).to(result.device)
    difference, scale = groups.from_last_stage(result).tolist()
    return difference, scale


def verdict_text(verdict: Verdict, as_json: bool) -> str:
    """The verdict as one JSON object or as lines for a person."""
    if as_json:
        return json.dumps(asdict(verdict) | {"passed": verdict.passed, "bound": FP32_NOISE})
    lines = [
        f"weights  {verdict.tensors - len(verdict.unequal)} of {verdict.tensors} tensors bit-equal after the round trip"
    ]
    if verdict.unequal:
        lines.append(f"unequal  {', '.join(verdict.unequal[:3])}")
    if verdict.max_difference is not None:
        lines.append(
            f"logits   largest difference {verdict.max_difference:.3g}, largest logit {verdict.scale:.3g}, "
            f"allowed {FP32_NOISE * verdict.scale:.3g}"
        )
    return "\n".join([*lines, "passed" if verdict.passed else "FAILED"])
