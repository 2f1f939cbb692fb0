"""The model: megatron-core's GPTModel on packed rows, ending in a head that is an argument.

A head says what the last stage computes from the final hidden states: selected log-probs for training, sampled tokens
for rollouts, logits for verification. Full logits never leave the model.

Shapes: S packed tokens, B = 1, H hidden, T selected positions, V vocabulary rows of this shard.
"""

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
from megamem.layout.shift import segment_predecessors
from megamem.models.row import Head, RowParams
from megamem.ops.vocab import Samples, VocabShard, sample_tokens, selected_logprob
from megamem.stream.gradients import GradientSums, expect_plain_gradients
from megamem.stream.head import HeadSteps, streamed_logprob
from megamem.stream.layer import StreamOptions


@dataclass(frozen=True)
class LogProbHead:
    """log p(target), `[T]`, at least fp32.

    Attributes:
        target_T: token ids.
        known_T: the gradient these log-probs will get, where it does not depend on them (see `Runner`): a streamed
            head then makes one pass.
    """

    target_T: Tensor
    known_T: Tensor | None = None

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
    shifted_logits: bool = False
    stream: StreamOptions | None = None
    stream_short_rows: bool = False

    def forward(self, ids_BS: Tensor, row: RowParams, position_T: Tensor | None, head: Head) -> Tensor | Samples:
        """Run this stage on one packed row.

        Args:
            ids_BS: token ids `[1, S]`; read by the first stage only.
            row: the layout; S must be a multiple of the tensor-parallel size under sequence parallelism. A long row
                gets its chunk grid here if the model streams.
            position_T: row indices of the tokens that the head predicts, of which `hidden_rows` makes those of hidden
                states; None: the head gets every hidden state in row order, unshifted.
            head: applied on the last stage.

        Returns:
            Hidden states `[S or S/tp, 1, H]` for the next stage, or what the head returns.
        """
        row.grid = self.chunk_grid(row)
        row.idle = self.idle_chunks(row, position_T, head)
        hidden_SBH = self.embed(ids_BS, row) if self.pre_process else None
        hidden_SBH = self.decoder(hidden_states=hidden_SBH, attention_mask=None, packed_seq_params=row)
        return self.predict(hidden_SBH, row, position_T, head) if self.post_process else hidden_SBH

    def chunk_grid(self, row: RowParams, short_rows: bool = False, start: int = 0) -> ChunkGrid | None:
        """None for a model that does not stream, for new tokens of a cache, and for rows so short that all layers'
        activations of the row take no more than one layer's of a chunk (unless short rows must stream, too)."""
        if self.stream is None or row.cache is not None:
            return None
        short = row.layout.length * len(self.decoder.layers) <= self.stream.chunk_tokens
        if short and not (short_rows or self.stream_short_rows):
            return None
        parts = self.vocab.axis.size if self.config.sequence_parallel else 1
        return ChunkGrid(row.layout.length, self.stream.chunk_tokens, parts, start)

    def idle_chunks(self, row: RowParams, position_T: Tensor | None, head: Head) -> frozenset[int]:
        """Chunks of the row whose final hidden states the head does not need; known on the last stage only."""
        if not self.post_process or row.grid is None or not isinstance(head, LogProbHead):
            return frozenset()
        return self.head_steps(row, position_T, head).idle()

    def embed(self, ids_BS: Tensor, row: RowParams) -> Tensor:
        """Embeddings `[S or S/tp, 1, H]` in the order of the row's grid; first stage only."""
        positions_BS = torch.tensor([row.layout.positions()[-ids_BS.size(1) :]], device=ids_BS.device)
        if row.grid is not None and row.grid.parts > 1:
            order_S = torch.tensor(row.grid.order(), device=ids_BS.device)
            ids_BS, positions_BS = ids_BS[:, order_S], positions_BS[:, order_S]
        return self.embedding(input_ids=ids_BS, position_ids=positions_BS)

    def embedding_gradient(
        self, ids_C: Tensor, position_C: Tensor | None, dx_CBH: Tensor, gathered: bool, gradients: GradientSums
    ) -> None:
        """Add the embeddings' gradient of some tokens, row by row (autograd's would be as large as the vocabulary).

        Args:
            ids_C: of the tokens.
            position_C: of the tokens, for a model with learned positions.
            dx_CBH: gradient of their embeddings, or of this rank's part of them if `gathered`.
            gathered: ranks of the tensor-parallel group hold parts in order.
        """
        dx_CH = dx_CBH[:, 0]
        if gathered:
            whole_CH = dx_CH.new_empty(len(ids_C), dx_CH.size(1))
            dist.all_gather_into_tensor(whole_CH, dx_CH.contiguous(), group=self.vocab.axis.group)
            dx_CH = whole_CH
        row_C = ids_C - self.vocab.start
        mine_C = ((row_C >= 0) & (row_C < self.vocab.rows)).nonzero()[:, 0]
        gradients.add_rows(self.embedding.word_embeddings.weight, row_C[mine_C], dx_CH[mine_C])
        if self.embedding.add_position_embedding:
            gradients.add_rows(self.embedding.position_embeddings.weight, position_C, dx_CH)

    def predict(self, hidden_SBH: Tensor, row: RowParams, position_T: Tensor | None, head: Head) -> Tensor | Samples:
        """What the head makes of the final hidden states (after the last norm); last stage only."""
        if row.grid is not None and isinstance(head, LogProbHead):
            return streamed_logprob(hidden_SBH, self.head_steps(row, position_T, head), head.known_T)
        weight_VH = self.output_weight()
        output = head(self._select(hidden_SBH, self.hidden_rows(row, position_T), row.grid), weight_VH, self.vocab)
        if self.stream is not None and isinstance(output, Tensor):
            expect_plain_gradients(output, [weight_VH])
        return output

    def head_steps(self, row: RowParams, position_T: Tensor | None, head: LogProbHead) -> HeadSteps:
        """The head's chunk steps on a row that has a grid."""
        row_T = self.hidden_rows(row, position_T)
        return HeadSteps(self.output_weight(), row_T, head.target_T, self.vocab, row.grid, self.stream.head_tokens)

    def hidden_rows(self, row: RowParams, position_T: Tensor | None) -> Tensor | None:
        """Row indices of the hidden states that predict the tokens at row indices `position_T`.

        The one place that knows of shifted logits: everyone else names the tokens to predict (rows over a cache do not,
        see `RowParams`).
        """
        if position_T is None or not self.shifted_logits or row.cache is not None:
            return position_T
        before_S = torch.arange(-1, row.layout.length - 1, device=position_T.device)
        for start, before in segment_predecessors(row.layout):
            before_S[start] = before
        return before_S[position_T]

    def output_weight(self) -> Tensor:
        """This rank's rows of the output matrix."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _select(self, hidden_SBH: Tensor, position_T: Tensor | None, grid: ChunkGrid | None) -> Tensor:
        """Hidden states `[T, H]`, replicated; backward sums the vocabulary shards' parts over ranks."""
        group = self.pg_collection.tp
        if grid is not None and position_T is not None:
            position_T = position_T - grid.start
        if grid is not None and grid.parts > 1:
            place_S = torch.tensor(grid.order(), device=hidden_SBH.device).argsort()
            position_T = place_S if position_T is None else place_S[position_T]
        if self.config.sequence_parallel:
            full_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=True, group=group)
            return full_SBH[:, 0] if position_T is None else full_SBH[:, 0].index_select(0, position_T)
        hidden_TH = hidden_SBH[:, 0] if position_T is None else hidden_SBH[:, 0].index_select(0, position_T)
        return copy_to_tensor_model_parallel_region(hidden_TH, group=group)
