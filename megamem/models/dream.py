"""The Dream family (Dream-7B, DiffuCoder-7B): Qwen2's weights, fully bidirectional, logits shifted by one.

The published sampler reads `cat([logits[:, :1], logits[:, :-1]])`: the state of a token predicts the next one, and the
first token, which has none before it, is predicted by its own.
"""

from collections.abc import Mapping
from typing import Any

from megamem.config.architecture import Architecture
from megamem.models import qwen

_DREAM = qwen.Variant("Dream", "full", shifted_logits=True, qwen3=False)


def read_config(hf: Mapping[str, Any]) -> Architecture:
    """Architecture of a Dream `config.json`.

    Raises:
        UserError: a key is missing or asks for something that this family does not serve.
    """
    return qwen.read_variant(hf, _DREAM)
