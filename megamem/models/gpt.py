"""The model: megatron-core's GPTModel on packed rows, ending in a head that is an argument.

A head says what the last stage computes from the final hidden states: selected log-probs for training, sampled tokens
for rollouts, logits for verification. Full logits never leave the model.

Shapes: S packed tokens, B = 1, H hidden, T selected positions, V vocabulary rows of this shard.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megamem.layout.grid import ChunkGrid
from megamem.models.row import RowParams
from megamem.ops.vocab import Samples, VocabShard, sample_tokens, selected_logprob
from megamem.stream.head import streamed_logprob
from megamem.stream.layer import StreamOptions, expect_plain_gradients

# What a head gets: hidden states of the selected positions, this rank's output rows, and where those rows lie.
Head = Callable[[Tensor, Tensor, VocabShard], Tensor | Samples]


@dataclass(frozen=True)
class LogProbHead:
    """log p(target), `[T]`, at least fp32."""

    target_T: Tensor

    def __call__(self, hidden_TH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
        return selected_logprob(hidden_TH, weight_VH, self.target_T, shard)


@dataclass(frozen=True)
class SampleHead:
    """Sampled tokens and their statistics; `chunk` positions at a time so that float64 scores stay small."""

    key_T: Tensor
    temperature: float
    forbidden: tuple[int, ...] = ()
    chunk: int = 512

    def __call__(self, hidden_TH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Samples:
        parts = [
            sample_tokens(F.linear(hidden, weight_VH), key, self.temperature, shard, self.forbidden)
            for hidden, key in zip(hidden_TH.split(self.chunk), self.key_T.split(self.chunk), strict=True)
        ]
        return Samples(*(torch.cat([getattr(part, name) for part in parts]) for name in Samples.__dataclass_fields__))


@dataclass(frozen=True)
class LogitsHead:
    """Logits of the real vocabulary, gathered over tensor-parallel ranks, `[T, vocab_rows]`; for verification only."""

    def __call__(self, hidden_TH: Tensor, weight_VH: Tensor, shard: VocabShard) -> Tensor:
        logits_TV = F.linear(hidden_TH, weight_VH)
        parts = [torch.empty_like(logits_TV) for _ in range(shard.axis.size)]
        dist.all_gather(parts, logits_TV.contiguous(), group=shard.axis.group)
        return torch.cat(parts, -1)[:, : shard.valid]


class DiffusionGPT(GPTModel):
    """One pipeline stage of a diffusion language model."""

    vocab: VocabShard
    stream: StreamOptions | None = None
    stream_short_rows: bool = False

    def forward(self, ids_BS: Tensor, row: RowParams, position_T: Tensor, head: Head) -> Tensor | Samples:
        """Run this stage on one packed row.

        Args:
            ids_BS: token ids `[1, S]`; read by the first stage only.
            row: the layout; S must be a multiple of the tensor-parallel size under sequence parallelism. A long row
                gets its chunk grid here if the model streams.
            position_T: row indices whose hidden states the head needs.
            head: applied on the last stage.

        Returns:
            Hidden states `[S or S/tp, 1, H]` for the next stage, or what the head returns.
        """
        row.grid = self._chunk_grid(row)
        hidden_SBH = None
        if self.pre_process:
            positions_BS = torch.tensor([row.layout.positions()], device=ids_BS.device)
            if row.grid is not None and row.grid.parts > 1:
                order_S = torch.tensor(row.grid.order(), device=ids_BS.device)
                ids_BS, positions_BS = ids_BS[:, order_S], positions_BS[:, order_S]
            hidden_SBH = self.embedding(input_ids=ids_BS, position_ids=positions_BS)
        hidden_SBH = self.decoder(hidden_states=hidden_SBH, attention_mask=None, packed_seq_params=row)
        if not self.post_process:
            return hidden_SBH
        if row.grid is not None and isinstance(head, LogProbHead):
            return streamed_logprob(
                hidden_SBH, self._output_weight(), position_T, head.target_T, self.vocab, row.grid,
                self.stream.head_tokens,
            )  # fmt: skip
        weight_VH = self._output_weight()
        output = head(self._select(hidden_SBH, position_T, row.grid), weight_VH, self.vocab)
        if self.stream is not None and isinstance(output, Tensor):
            expect_plain_gradients(output, [weight_VH])
        return output

    def _chunk_grid(self, row: RowParams) -> ChunkGrid | None:
        """None for a model that does not stream, and for rows so short that all layers' activations of the row take no
        more than one layer's of a chunk (unless short rows must stream, too)."""
        if self.stream is None:
            return None
        if row.layout.length * len(self.decoder.layers) <= self.stream.chunk_tokens and not self.stream_short_rows:
            return None
        parts = self.vocab.axis.size if self.config.sequence_parallel else 1
        return ChunkGrid(row.layout.length, self.stream.chunk_tokens, parts)

    def _select(self, hidden_SBH: Tensor, position_T: Tensor, grid: ChunkGrid | None) -> Tensor:
        """Hidden states `[T, H]`, replicated; backward sums the vocabulary shards' parts over ranks."""
        group = self.pg_collection.tp
        if grid is not None and grid.parts > 1:
            place_S = torch.tensor(grid.order(), device=position_T.device).argsort()
            position_T = place_S[position_T]
        if self.config.sequence_parallel:
            full_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=True, group=group)
            return full_SBH[:, 0].index_select(0, position_T)
        return copy_to_tensor_model_parallel_region(hidden_SBH[:, 0].index_select(0, position_T), group=group)

    def _output_weight(self) -> Tensor:
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
