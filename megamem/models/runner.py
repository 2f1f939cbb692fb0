"""Rows through the model: the one place that runs the network.

Every micro-batch is one packed row. The same calls serve one process and any tensor x pipeline grid, under
megatron-core's own schedule or the streamed one.

Shapes: S packed tokens, T positions the head needs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megamem.layout.packing import RowShape
from megamem.models.gpt import LogProbHead
from megamem.models.row import Row
from megamem.models.stage import Loss, StagePass, Window, cut_row, unit_costs
from megamem.ops.vocab import Samples
from megamem.platform.groups import Groups, StageLinks
from megamem.stream.pipeline import run_stage
from megamem.stream.schedule import choose_slack, stage_order
from megamem.stream.simulate import check_deadlock
from megamem.stream.trace import Event

R = TypeVar("R", bound=Row)


@dataclass(frozen=True, eq=False)
class StreamedPipeline:
    """The streamed schedule.

    Attributes:
        links: to this stage's neighbours, from `platform.groups.connect_stages`.
        window: `stage`: units cross stage boundaries as soon as they are done; `layer`: whole rows do.
        slack: forwards by which a stage runs ahead of the next; None: chosen from the units' costs.
        record: called with what this stage did in a step.
    """

    links: StageLinks
    window: Window = "stage"
    slack: int | None = None
    record: Callable[[list[Event]], None] | None = None


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs rows on this rank's stage.

    Attributes:
        model: the stage, wrapped in megatron-core's DistributedDataParallel for training or bare.
        groups: the process grid.
        attention: how a sequence attends (a name of `layout.packing.SEQUENCE_LAYOUTS`).
        pipeline: the streamed schedule, for a model that streams; None: megatron-core's.
        poll: called, by all ranks of a model replica alike, before every pass without gradients and, under
            megatron-core's schedule, before every row of one with gradients; may raise to give the pass up.
    """

    model: nn.Module
    groups: Groups
    attention: str
    pipeline: StreamedPipeline | None = None
    poll: Callable[[], None] | None = None

    def row_shape(self, tokens: int) -> RowShape:
        """Row lengths that this grid can run, at most `tokens` each."""
        config = self.model.config
        multiple = self.groups.tp.size if config.sequence_parallel else 1
        # Stock schedules exchange one shape.
        return RowShape(tokens, multiple, equal=self.groups.pp.size > 1 and self.pipeline is None)

    @torch.no_grad()
    def forward(self, rows: Sequence[Row]) -> list[Tensor | Samples]:
        """What the head returns for every row, on the last stage; an empty list elsewhere.

        A row over a cache goes alone, and under megatron-core's schedule.
        """
        if self.poll:
            self.poll()
        if self.pipeline is not None and rows[0].params.cache is None:
            return self._run_streamed(rows, lambda row, output: output, training=False)
        return self._run_megatron(rows, lambda row, output: output, training=False)

    def forward_backward(self, rows: Sequence[R], loss: Loss, linear: bool = False) -> list[dict[str, Any]]:
        """Forward and backward of every row; gradients add up in the parameters' buffers.

        Args:
            rows: built on demand if the sequence is lazy, so that only rows in flight take memory.
            loss: (row, output of its head) -> the scalar whose gradient is wanted, and something to report. Called on
                the last stage. Nothing divides after it.
            linear: the gradient does not depend on the log-probs (supervised, on-policy, replayed coefficients). It is
                then taken beforehand, and a streamed head makes one pass instead of two.

        Returns:
            What was reported for every row, on the last stage, in the order in which rows went backward; an empty list
            elsewhere.
        """
        if self.pipeline is not None:
            return self._run_streamed(rows, loss, training=True, linear=linear)
        return self._run_megatron(rows, loss, training=True, linear=linear)

    def _run_megatron(
        self, rows: Sequence[R], evaluate: Callable[[R, Any], Any], training: bool, linear: bool = False
    ) -> list[Any]:
        streams = getattr(self.model, "module", self.model).stream is not None

        def finish(row: R, output: Any):
            if not training:
                return evaluate(row, output)
            scalar, report = evaluate(row, output)
            # The second entry would be a divisor (tokens); megatron-core is given none.
            return scalar, torch.zeros((), dtype=torch.int, device=scalar.device), report

        def step(iterator, model):
            if training and self.poll:
                self.poll()
            row = next(iterator)
            known = linear and streams and self.groups.is_last_stage
            head = with_known_gradient(row, evaluate, self.model.config.params_dtype) if known else row.head
            output = model(row.ids_S[None], row.params, row.position_T, head)
            return output, lambda tensor, non_loss_data=False: finish(row, tensor)

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(rows),
            model=[self.model],
            num_microbatches=len(rows),
            seq_length=rows[0].ids_S.numel(),
            micro_batch_size=1,
            forward_only=not training,
            collect_non_loss_data=not training,
        )

    def _run_streamed(
        self, rows: Sequence[R], evaluate: Callable[[R, Any], Any], training: bool, linear: bool = False
    ) -> list[Any]:
        model, pp, pipeline = getattr(self.model, "module", self.model), self.groups.pp, self.pipeline
        cuts = [cut_row(model, row, pipeline.window) for row in rows]
        units = [len(cut.units) for cut in cuts]
        prefixes, slack = [cut.prefix for cut in cuts], pipeline.slack or 1
        if pipeline.slack is None and pp.size > 1:
            slack = choose_slack(units, [cost.forward for cut in cuts for cost in unit_costs(model, cut)])
        if training and pp.size > 1:  # forwards alone cannot wait for each other
            check_deadlock(units, pp.size, slack, prefixes=prefixes)
        stage = StagePass(self.model, rows, cuts, evaluate, training, linear)
        program = stage_order(units, pp.rank, pp.size, slack, not training, prefixes)
        device = self.groups.device.torch
        recording = training and pipeline.record is not None
        clock = self.groups.device.time if recording else time.time
        events = run_stage(program, stage, pipeline.links, slack, model.config.params_dtype, device, clock)
        if recording:
            pipeline.record([replace(event, stage=pp.rank) for event in events])
        if training and model.config.finalize_model_grads_func is not None:
            model.config.finalize_model_grads_func([self.model], pg_collection=self.groups.collection)
        return stage.results


def with_known_gradient(row: R, loss: Loss, dtype: torch.dtype) -> LogProbHead:
    """The row's head with the gradient its log-probs will get, which does not depend on them."""
    zero_T = torch.zeros_like(row.head.target_T, dtype=torch.promote_types(dtype, torch.float32))
    with torch.enable_grad():
        scalar, _ = loss(row, zero_T.requires_grad_())
    return replace(row.head, known_T=torch.autograd.grad(scalar, zero_T)[0])
