"""Rows through the model by megatron-core's forward-backward function: the one place that runs the network.

Every micro-batch is one packed row. The same calls serve one process and any tensor x pipeline grid.

Shapes: S packed tokens, T positions the head needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megamem.layout.packing import RowShape
from megamem.models.gpt import Head
from megamem.models.row import RowParams
from megamem.ops.vocab import Samples
from megamem.platform.groups import Groups

Report = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Row:
    """One micro-batch: int64 `ids_S`, its layout, and what the head computes at which row indices `position_T`."""

    ids_S: Tensor
    params: RowParams
    position_T: Tensor
    head: Head


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs rows on this rank's stage.

    Attributes:
        model: the stage, wrapped in megatron-core's DistributedDataParallel for training or bare.
        groups: the process grid.
        attention: how a sequence attends (a name of `layout.packing.SEQUENCE_LAYOUTS`).
    """

    model: nn.Module
    groups: Groups
    attention: str

    def row_shape(self, tokens: int) -> RowShape:
        """Row lengths that this grid can run, at most `tokens` each."""
        config = self.model.config
        multiple = self.groups.tp.size if config.sequence_parallel else 1
        return RowShape(tokens, multiple, equal=self.groups.pp.size > 1)

    @torch.no_grad()
    def forward(self, rows: Sequence[Row]) -> list[Tensor | Samples]:
        """What the head returns for every row, on the last stage; an empty list elsewhere."""
        return self._run(rows, lambda row, output: output, forward_only=True)

    def forward_backward(self, rows: Sequence[R], loss: Callable[[R, Tensor], tuple[Tensor, Report]]) -> list[Report]:
        """Forward and backward of every row; gradients add up in the parameters' buffers.

        Args:
            rows: built on demand if the sequence is lazy, so that only rows in flight take memory.
            loss: (row, output of its head) -> the scalar whose gradient is wanted, and something to report. Called on
                the last stage. Nothing divides after it.

        Returns:
            What was reported for every row, on the last stage; an empty list elsewhere.
        """

        def evaluate(row: R, output: Tensor):
            scalar, report = loss(row, output)
            # The second entry would be a divisor (tokens); megatron-core is given none.
            return scalar, torch.zeros((), dtype=torch.int, device=scalar.device), report

        return self._run(rows, evaluate, forward_only=False)

    def _run(self, rows: Sequence[R], evaluate: Callable[[R, Any], Any], forward_only: bool) -> list[Any]:
        def step(iterator, model):
            row = next(iterator)
            output = model(row.ids_S[None], row.params, row.position_T, row.head)
            return output, lambda tensor, non_loss_data=False: evaluate(row, tensor)

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(rows),
            model=[self.model],
            num_microbatches=len(rows),
            seq_length=rows[0].ids_S.numel(),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
