"""Floating-point operations that a model needs for rows, whatever way it runs them; a multiplication and an addition
are two.

Matrix products only. A backward has two of them for each of the forward: one for the gradient of either factor. What
an implementation does again (layers that are recomputed, the scores of a flash kernel) is not counted, nor is what it
leaves out or adds (idle chunks of the last layer, fillers, padding of the vocabulary over ranks).
"""

from megamem.config.architecture import Architecture


def forward_flops(arch: Architecture, tokens: int, scored: int, pairs: int) -> int:
    """Operations of a forward.

    Args:
        tokens: through the layers.
        scored: through the head.
        pairs: (query, key) pairs of tokens that see each other, in one layer (`Layout.visible_pairs`).
    """
    width = arch.heads * arch.head_dim
    attention = arch.hidden * (2 * width + 2 * arch.kv_heads * arch.head_dim)
    layer = 2 * tokens * (attention + 3 * arch.hidden * arch.ffn) + 4 * width * pairs
    return arch.layers * layer + 2 * scored * arch.hidden * arch.padded_vocab(1)


def model_flops(arch: Architecture, tokens: int, scored: int, pairs: int) -> int:
    """Operations of a forward and backward; arguments as in `forward_flops`."""
    return 3 * forward_flops(arch, tokens, scored, pairs)
