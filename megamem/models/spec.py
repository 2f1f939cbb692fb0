"""A ModelSpec says how a model family is read, masked and named in Hugging Face files. One table lists them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megamem.config.architecture import Architecture
from megamem.convert.maps import TensorMap
from megamem.errors import UserError
from megamem.models import dream, llada, qwen


@dataclass(frozen=True)
class ModelSpec:
    """One model family.

    Attributes:
        name: the word in `model.family`.
        model_types: values of `model_type` in Hugging Face configs that belong to it.
        read_config: Hugging Face config -> Architecture; raises UserError on what the family cannot serve.
        tensor_maps: Architecture -> the invertible map of every parameter.
    """

    name: str
    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], Architecture]
    tensor_maps: Callable[[Architecture], list[TensorMap]]


SPECS: dict[str, ModelSpec] = {
    "llada": ModelSpec("llada", ("llada",), llada.read_config, llada.tensor_maps),
    "qwen": ModelSpec("qwen", tuple(qwen.VARIANTS), qwen.read_config, qwen.tensor_maps),
    "dream": ModelSpec("dream", ("Dream",), dream.read_config, qwen.tensor_maps),
}


def find_spec(hf_config: Mapping[str, Any], where: str) -> ModelSpec:
    """The family of a Hugging Face config.

    Raises:
        UserError: no family claims its `model_type`.
    """
    model_type = hf_config.get("model_type")
    for spec in SPECS.values():
        if model_type in spec.model_types:
            return spec
    known = ", ".join(sorted(t for spec in SPECS.values() for t in spec.model_types))
    raise UserError(f"{where}: model_type = {model_type!r} is not supported; supported: {known}")
