"""Responses and their noise as rows: one unit of work per Monte-Carlo draw.

A row is a sequence of trees (layout/trees.py): a prompt and the draws that see it. Draws of a fully bidirectional model
share nothing; those of a block-causal one are noisy copies beside the clean response; those of a causal one are the
responses themselves.

Rows are built when they are run, so memory does not grow with the number of draws (BGPO, Algorithm 1).

Shapes: B samples of this rank, D draws, P prompt tokens, L response tokens; of a row: S tokens, T scored tokens,
U draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamem.config.architecture import Architecture
from megamem.diffusion.noise import NoisePlan
from megamem.layout.packing import RowShape, Share, Unit, draws, pack_draws
from megamem.layout.trees import place
from megamem.models.flops import model_flops
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
        index: of the row among those of its update.
        sample_U, draw_U: which sample and which of its draws each unit is.
        weight_U: the noise plan's factor on the draw's log-prob sum, float64.
        unit_T: the unit each scored token belongs to, 0 … U-1 of this row.
    """

    index: int
    sample_U: Tensor
    draw_U: Tensor
    weight_U: Tensor
    unit_T: Tensor


@dataclass(frozen=True)
class DrawnModel:
    """What rows of draws depend on in a model.

    Attributes:
        attention: how a sequence attends (a name of `layout.packing.SEQUENCE_LAYOUTS`).
        shifted: a token is predicted at the row before it.
        mask_id: what stands where a scored token is hidden; None for a causal model, which hides nothing.
        share_prefix: whether, and how, a prompt that several draws have in common is computed once.
    """

    attention: str
    shifted: bool
    mask_id: int | None
    share_prefix: Share


class DrawRows(Sequence[DrawRow]):
    """All draws of some samples, packed in order (sample by sample), each row built on access."""

    def __init__(self, samples: Sequence[Sample], model: DrawnModel, shape: RowShape, device: torch.device):
        """Args:
        samples: those of one group (one prompt) in succession.
        model: how the model attends and predicts.
        shape: of the rows.
        device: of the rows' tensors.
        """
        self._samples, self._model, self._device = samples, model, device
        self._units = [(b, d) for b, s in enumerate(samples) for d in range(len(s.plan.weight_D))]
        self._how = draws(model.attention, model.shifted, model.share_prefix)
        units = [Unit(samples[b].group, b, len(samples[b].prompt_P), samples[b].scored_tokens) for b, _ in self._units]
        self._packed = pack_draws(units, self._how, shape)

    @property
    def tokens(self) -> int:
        """Tokens that all rows run."""
        return sum(packed.layout.length - packed.start for packed in self._packed)

    def model_flops(self, arch: Architecture) -> int:
        """Operations that a forward and backward of all rows need (`models/flops.py`)."""
        tokens = sum(packed.tokens for packed in self._packed)
        pairs = sum(packed.visible_pairs() for packed in self._packed)
        scored = sum(int(sample.plan.masked_DL.sum()) for sample in self._samples)
        return model_flops(arch, tokens, scored, pairs)

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> DrawRow:
        packed = self._packed[index]
        ids_S = torch.full((packed.layout.length,), self._model.mask_id or 0)  # where nothing is written: fillers
        units, positions, targets = [], [torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.long)]
        for tree, prompt, members, (prefix, branches) in zip(
            packed.trees, packed.prompts, packed.members, place(packed.trees), strict=True
        ):
            ids_S[prefix : prefix + tree.prefix] = self._samples[self._units[prompt][0]].prompt_P[: tree.prefix]
            for branch, drawn, placed in zip(tree.branches, members, branches, strict=True):
                if placed.copies:
                    sample = self._samples[self._units[drawn[0]][0]]
                    clean_L = torch.cat([sample.prompt_P[tree.prefix :], sample.response_L])
                    ids_S[placed.clean : placed.clean + branch.length] = clean_L
                for unit, start in zip(drawn, placed.copies or (placed.clean,), strict=True):
                    ids_S[start : start + branch.length], place_T, target_T = self._draw(unit, tree.prefix)
                    units.append(unit)
                    positions.append(place_T + start)
                    targets.append(target_T)
        pairs = [self._units[unit] for unit in units]
        pairs_U2 = torch.tensor(pairs, dtype=torch.long).view(-1, 2)
        weights = [self._samples[b].plan.weight_D[d].item() for b, d in pairs]
        counts_U = torch.tensor([len(target_T) for target_T in targets[1:]], dtype=torch.long)
        to = self._device
        return DrawRow(
            ids_S[packed.start :].to(to),
            RowParams(layout=packed.layout),
            torch.cat(positions).to(to),
            LogProbHead(torch.cat(targets).to(to)),
            index,
            sample_U=pairs_U2[:, 0].to(to),
            draw_U=pairs_U2[:, 1].to(to),
            weight_U=torch.tensor(weights, dtype=torch.float64, device=to),
            unit_T=torch.repeat_interleave(torch.arange(len(units)), counts_U).to(to),
            prefix=packed.prefix,
        )

    def _draw(self, unit: int, prefix: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of a draw behind the shared prefix, where its scored tokens lie in them, and what they are."""
        b, d = self._units[unit]
        sample, mask_id = self._samples[b], self._model.mask_id
        masked_L, prompt_P, response_L = sample.plan.masked_DL[d], sample.prompt_P, sample.response_L
        if sample.prompt_mask_DP is not None:
            prompt_P = prompt_P.masked_fill(sample.prompt_mask_DP[d], mask_id)
        shown_L = response_L if mask_id is None else response_L.masked_fill(masked_L, mask_id)
        place_T = masked_L.nonzero()[:, 0] + len(prompt_P) - prefix
        return torch.cat([prompt_P[prefix:], shown_L]), place_T, response_L[masked_L]
