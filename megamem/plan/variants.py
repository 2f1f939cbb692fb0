"""The ways to run a step that are compared, and megatron-core's own head, their baseline."""

from dataclasses import dataclass, replace

import torch.nn.functional as F
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from megamem.ops.vocab import VocabShard
from megamem.stream.layer import StreamOptions


@dataclass(frozen=True)
class Variant:
    """How a step runs.

    Attributes:
        stream: options of the streamed layers and head; None: whole rows and megatron-core's head.
        recompute: every layer is recomputed whole.
        own_head: without streams, training's head and not the one it is compared with.
    """

    stream: StreamOptions | None = None
    recompute: bool = False
    own_head: bool = False


class StockHead:
    """megatron-core's own: all logits, its vocabulary-parallel cross-entropy."""

    def __init__(self, target_T: Tensor):
        self.target_T = target_T

    def __call__(self, hidden_TH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
        logits_T1V = F.linear(hidden_TH, weight_VH)[:, None]
        return -vocab_parallel_cross_entropy(logits_T1V, self.target_T[:, None])[:, 0]


def variants(stream: StreamOptions) -> dict[str, Variant]:
    """By name, in the order of the table. `recompute_streamed_head` recomputes layers and streams only the head: beside
    `streamed` it shows what the layers alone gain."""
    return {
        "plain": Variant(),
        "recompute": Variant(recompute=True),
        "recompute_streamed_head": Variant(replace(stream, offload="none"), recompute=True),
        "streamed": Variant(replace(stream, offload="none")),
        "streamed_offload": Variant(replace(stream, offload="cpu")),
    }
