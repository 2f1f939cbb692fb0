"""Write a Hugging Face folder of a tiny Qwen3 without weights: config.json and its own sentencepiece tokenizer.

python examples/03_grpo_qwen3_prefix/make_tiny_qwen3.py OUT
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
# The published code's switches, at the values that make it Qwen3.
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
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


def main(out: Path) -> None:
    """Write `config.json` and `tokenizer.model` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    train_word_sentencepiece(vocabulary(LARGEST), out / "tokenizer.model")
    tokenizer = load_tokenizer(out)
    words = {
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    (out / "config.json").write_text(json.dumps(QWEN3 | SHAPE | words, indent=2, sort_keys=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
