"""Where weights come from: a folder of safetensors, or named random numbers.

Both answer by Hugging Face name, one tensor at a time, so a model is loaded (or drawn) the same way on every
tensor-parallel and pipeline layout.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamem.config.architecture import Architecture
from megamem.convert.maps import Plain, TensorMap
from megamem.errors import UserError
from megamem.platform.rng import generator

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class WeightSource(Protocol):
    """Tensors by Hugging Face name."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    where: str

    def read(self, name: str) -> Tensor: ...


def read_hf_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face folder, with the token ids that its generation would use.

    `mask_token_id`, `eos_token_id` and `pad_token_id` come from the first file that gives one: generation_config.json,
    config.json, tokenizer_config.json. (Chat models end a turn by an id that config.json does not name; A2D's mask and
    Qwen's padding are known to the tokenizer alone.)

    Raises:
        UserError: no folder, no config.json, or a file that is not a JSON object.
    """
    path = Path(folder) / "config.json"
    config = _json_object(path)
    if config is None:
        raise UserError(f"{path}: no such file; a Hugging Face folder has a config.json")
    generation = _json_object(Path(folder) / "generation_config.json") or {}
    tokens = _tokenizer_ids(_json_object(Path(folder) / "tokenizer_config.json") or {})
    for name in ("mask", "eos", "pad"):
        key = f"{name}_token_id"
        found = (source.get(key) for source in (generation, config, tokens))
        value = next((value for value in found if value is not None), None)
        if value is not None:  # a list names every token that may end a text; the first one is what the model writes
            config[key] = value[0] if isinstance(value, list) and value else value
    return config


def _json_object(path: Path) -> dict[str, Any] | None:
    """A JSON file that must hold an object; None where it does not exist."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value


def _tokenizer_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the special tokens that a tokenizer_config.json names and numbers."""

    def text(token: Any) -> Any:
        return token.get("content") if isinstance(token, dict) else token

    added = config.get("added_tokens_decoder")
    number = {text(t): int(i) for i, t in added.items() if i.isdigit()} if isinstance(added, dict) else {}
    named = {f"{name}_token_id": text(config.get(f"{name}_token")) for name in ("mask", "eos", "pad")}
    return {key: number[token] for key, token in named.items() if isinstance(token, str) and token in number}


class SafetensorsSource:
    """A Hugging Face folder. Opening reads headers only; `read` maps one tensor.

    Raises:
        UserError: no weights, a shard named by the index is missing, a file is truncated or garbled, or a tensor
            stands in another file than the index says.
    """

    def __init__(self, folder: Path):
        self.where = str(folder)
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for path, expected in _weight_files(Path(folder)).items():
            self._read_header(path, expected)

    def _read_header(self, path: Path, expected: set[str] | None) -> None:
        try:
            handle = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a whole safetensors file ({error}); copy or download it again") from None
        names = set(handle.keys())
        if expected is not None and names != expected:
            name = sorted(names ^ expected)[0]
            raise UserError(f"{path}: its tensors are not those that model.safetensors.index.json lists (e.g. {name})")
        self._open[path] = handle
        for name in names:
            view = handle.get_slice(name)
            if view.get_dtype() not in DTYPES:
                raise UserError(f"{path}: {name} has dtype {view.get_dtype()}; allowed: {', '.join(DTYPES)}")
            self._file_of[name] = path
            self.shapes[name] = tuple(view.get_shape())
            self.dtypes[name] = DTYPES[view.get_dtype()]

    def read(self, name: str) -> Tensor:
        return self._open[self._file_of[name]].get_tensor(name)


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Weight files of a folder, each with the tensor names that an index promises for it (None: no index)."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files: dict[Path, set[str] | None] = {}
            for name, file in weight_map.items():
                files.setdefault(folder / file, set()).add(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: not a safetensors index ({error!r})") from None
        missing = sorted(path.name for path in files if not path.exists())
        if missing:
            raise UserError(f"{folder}: {len(missing)} of {len(files)} weight files are missing, e.g. {missing[0]}")
        return files
    if (folder / "model.safetensors").exists():
        return {folder / "model.safetensors": None}
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise UserError(f"{folder}: no *.safetensors file here (other weight formats are not read)")
    return dict.fromkeys(found)


class RandomSource:
    """Freshly initialised weights: every tensor drawn from (seed, its name), so any layout starts from one model.

    Matrices are normal with `arch.init_std`; those that write into the residual stream are scaled by
    1/sqrt(2 * layers); norms are one and biases zero.
    """

    def __init__(self, maps: Sequence[TensorMap], arch: Architecture, seed: int):
        self.where = f"random weights, seed {seed}"
        self.seed = seed
        self.shapes = {n: s for m in maps for n, s in zip(m.hf, m.shapes(arch), strict=True)}
        self.dtypes = dict.fromkeys(self.shapes, torch.float32)
        residual = {m.name for m in maps if isinstance(m, Plain) and m.axis == 1}
        narrow = arch.init_std / math.sqrt(2 * arch.layers)
        self._std = {name: narrow if name in residual else arch.init_std for name in self.shapes}

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        return torch.randn(shape, generator=generator(self.seed, "init", name)) * self._std[name]


def check_coverage(maps: Sequence[TensorMap], arch: Architecture, source: WeightSource) -> None:
    """Every tensor that the model needs is there with its shape, and nothing else is.

    Raises:
        UserError: names missing, unexpected and wrongly shaped tensors (up to three of each).
    """
    expected = {n: s for m in maps for n, s in zip(m.hf, m.shapes(arch), strict=True)}
    wrong = [
        f"{n} {list(source.shapes[n])} should be {list(s)}"
        for n, s in expected.items()
        if n in source.shapes and source.shapes[n] != s
    ]
    faults = {
        "missing": sorted(expected.keys() - source.shapes.keys()),
        "unexpected": sorted(source.shapes.keys() - expected.keys()),
        "wrong shape": wrong,
    }
    told = [f"{len(v)} {kind}: {', '.join(v[:3])}{' …' if len(v) > 3 else ''}" for kind, v in faults.items() if v]
    if told:
        raise UserError(f"{source.where}: tensors do not match config.json; {'; '.join(told)}")
