"""Write a Hugging Face folder of a tiny LLaDA without weights: config.json and its own sentencepiece tokenizer.

python examples/01_sudoku_demo/make_tiny_llada.py OUT
"""

import json
import sys
from pathlib import Path

from megamem.tasks.sudoku4 import vocabulary
from megamem.tasks.tokenizer import load_tokenizer, train_word_sentencepiece

SHAPE = {"d_model": 128, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 352}
# The published code's switches, at the values that make it LLaDA.
LLADA = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "init_std": 0.02,
    "layer_norm_type": "rms",
    "max_sequence_length": 32,
    "mlp_ratio": 4,
    "rms_norm_eps": 1e-5,
    # A learned table of positions instead of RoPE: it tells a masked cell's row and column apart from the first step.
    "rope": False,
    "torch_dtype": "float32",
    "weight_tying": False,
}


def main(out: Path) -> None:
    """Write `config.json` and `tokenizer.model` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    train_word_sentencepiece(vocabulary("digits"), out / "tokenizer.model")
    tokenizer = load_tokenizer(out)
    sizes = {"vocab_size": tokenizer.vocab_size, "embedding_size": tokenizer.vocab_size}
    ids = {
        "mask_token_id": tokenizer.mask_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    (out / "config.json").write_text(json.dumps(LLADA | SHAPE | sizes | ids, indent=2, sort_keys=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
