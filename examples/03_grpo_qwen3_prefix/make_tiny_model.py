"""Write a Hugging Face folder of a tiny Qwen3 or SDAR without weights: config.json and a sentencepiece tokenizer.

python examples/03_grpo_qwen3_prefix/make_tiny_model.py OUT [qwen3|sdar]
"""

import json
import sys
from pathlib import Path

from megamem.tasks.countdown import vocabulary
from megamem.tasks.tokenizer import load_tokenizer, train_word_sentencepiece

LARGEST = 40  # number in a problem; `task.options.target` of the yaml files ends there
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 352,
}
# What tells one family from the other. SDAR is Qwen3 with block-causal attention.
FAMILIES = {
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "sdar": {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "block_size": 4},
}
# The published code's switches, at the values both have.
SWITCHES = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
}


def main(out: Path, family: str) -> None:
    """Write `config.json` and `tokenizer.model` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    train_word_sentencepiece(vocabulary(LARGEST), out / "tokenizer.model")
    tokenizer = load_tokenizer(out)
    words = {
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    if family == "sdar":
        words["mask_token_id"] = tokenizer.mask_id
    config = SWITCHES | FAMILIES[family] | SHAPE | words
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:] or ["qwen3"])
