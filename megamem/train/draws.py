"""Responses and their noise as rows: one unit of work per Monte-Carlo draw.

Rows are built when they are run, so memory does not grow with the number of draws (BGPO, Algorithm 1).

Shapes: B samples of this rank, D draws, P prompt tokens, L response tokens; of a row: S tokens, T scored tokens,
U draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.diffusion.noise import NoisePlan
from megamem.layout.packing import PackedRow, RowShape, pack
from megamem.models.gpt import LogProbHead
from megamem.models.row import Row, RowParams


@dataclass(frozen=True, eq=False)
class Sample:
    """One response to be scored under noise.

    Attributes:
        prompt_P: int64, the prompt.
        response_L: int64, the scored part of the response.
        plan: its noise.
        advantage: of the response in its group (1 for supervised fine-tuning).
        group: globally unique id of its group.
        prompt_mask_DP: bool `[D, P]`, prompt tokens that each draw hides (diffu-GRPO); None: none.
    """

    prompt_P: Tensor
    response_L: Tensor
    plan: NoisePlan
    advantage: float
    group: int
    prompt_mask_DP: Tensor | None = None

    @property
    def scored_tokens(self) -> int:
        return self.response_L.numel()


@dataclass(frozen=True, eq=False)
class DrawRow(Row):
    """A row of draws.

    Attributes:
        sample_U, draw_U: which sample and which of its draws each unit is.
        weight_U: the noise plan's factor on the draw's log-prob sum, float64.
        unit_T: the unit each scored token belongs to, 0 … U-1 of this row.
    """

    sample_U: Tensor
    draw_U: Tensor
    weight_U: Tensor
    unit_T: Tensor


class DrawRows(Sequence[DrawRow]):
    """All draws of some samples, packed in order (sample by sample), each row built on access."""

    def __init__(self, samples: Sequence[Sample], attention: str, shape: RowShape, mask_id: int, device: torch.device):
        self._samples = samples
        self._units = [(b, d) for b, s in enumerate(samples) for d in range(len(s.plan.weight_D))]
        pairs = [(len(samples[b].prompt_P), samples[b].scored_tokens) for b, _ in self._units]
        self._packed = pack(pairs, attention, shape)
        self._mask_id = mask_id
        self._device = device

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(packed.layout.length for packed in self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> DrawRow:
        packed: PackedRow = self._packed[index]
        ids, positions, targets, counts = [], [], [], []
        for unit, start in zip(packed.members, packed.starts, strict=True):
            b, d = self._units[unit]
            sample = self._samples[b]
            masked_L, prompt_P = sample.plan.masked_DL[d], sample.prompt_P
            if sample.prompt_mask_DP is not None:
                prompt_P = prompt_P.masked_fill(sample.prompt_mask_DP[d], self._mask_id)
            ids += [prompt_P, sample.response_L.masked_fill(masked_L, self._mask_id)]
            positions.append(masked_L.nonzero()[:, 0] + start + len(prompt_P))
            targets.append(sample.response_L[masked_L])
            counts.append(len(targets[-1]))
        ids_S = torch.cat(ids)
        ids_S = F.pad(ids_S, (0, packed.layout.length - len(ids_S)), value=self._mask_id)
        pairs = torch.tensor([self._units[u] for u in packed.members])
        weight_U = torch.stack([self._samples[b].plan.weight_D[d] for b, d in pairs.tolist()])
        to = self._device
        return DrawRow(
            ids_S.to(to),
            RowParams(layout=packed.layout),
            torch.cat(positions).to(to),
            LogProbHead(torch.cat(targets).to(to)),
            sample_U=pairs[:, 0].to(to),
            draw_U=pairs[:, 1].to(to),
            weight_U=weight_U.to(to),
            unit_T=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(to),
        )
