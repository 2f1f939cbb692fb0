"""One optimizer step's gradient: draws -> log-probs -> coefficients -> backward.

The model only ever sees `loss = sum stopgrad(c) * logp` (DESIGN section 4). Where c depends on the draw alone it is
computed between the row's forward and backward; a coupled objective off-policy takes a no-grad pass first.

Shapes: B samples, D draws, U units of a row (draws, or scored tokens at level "token"), T scored tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamem.diffusion.elbo import elbo_terms
from megamem.models.runner import Runner
from megamem.objectives.base import Objective, coefficients
from megamem.train.draws import DrawRow, DrawRows, Sample


@dataclass(frozen=True, eq=False)
class Update:
    """What one optimizer step learns from, on this rank.

    Attributes:
        samples: responses with noise and advantages.
        weight_B: each unit's share in the global mean, from `objectives/reduction.py`, float64.
        rows: their draws as rows.
        old: of every row, the units' log-probs under the rollout policy (last stage only); None on-policy, where the
            trained policy is the rollout policy.
        reference: the same under the reference policy of a KL term; None without one.
    """

    samples: Sequence[Sample]
    weight_B: Tensor
    rows: DrawRows
    old: list[Tensor] | None = None
    reference: list[Tensor] | None = None


def unit_values(row: DrawRow, logp_T: Tensor, objective: Objective) -> Tensor:
    """The log-probs that the objective is a function of: tokens `[T]`, or ELBO estimates of draws `[U]`."""
    return logp_T if objective.level == "token" else elbo_terms(logp_T, row.unit_T, row.weight_U)


def score(runner: Runner, rows: DrawRows, objective: Objective) -> list[Tensor]:
    """`unit_values` of every row without gradients; filled on the last stage only. A collective call."""
    outputs = runner.forward(rows)
    return [unit_values(rows[i], logp_T, objective) for i, logp_T in enumerate(outputs)]


def backward(runner: Runner, update: Update, objective: Objective, length_norm: bool) -> dict[str, Tensor]:
    """Add the gradient of the update to the parameters' buffers.

    Returns:
        Sums over this rank's units, on the last stage (zeros elsewhere): `loss` (minus the weighted objective), `elbo`,
        `draws`, `ratio` (sum of d), float64 scalars.
    """
    device = update.weight_B.device
    adv_B = torch.tensor([s.advantage for s in update.samples], dtype=torch.float64, device=device)
    tokens_B = torch.tensor([s.scored_tokens for s in update.samples], dtype=torch.float64, device=device)
    scale_B = 1 / tokens_B.clamp(min=1) if length_norm else torch.ones_like(tokens_B)
    coupled_BD, coupled_loss = None, 0.0
    if objective.level == "sample":
        coupled_BD, value_B = _coupled_coefficients(runner, update, objective, adv_B, scale_B)
        coupled_loss = -(update.weight_B * value_B).sum()

    def loss(row: DrawRow, logp_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        new_U = unit_values(row, logp_T, objective)
        sample_U = row.sample_U[row.unit_T] if objective.level == "token" else row.sample_U
        old_U = _old_values(objective, new_U, update.old[row.index] if update.old is not None else None)
        scale_U, adv_U, weight_U = scale_B[sample_U], adv_B[sample_U], update.weight_B[sample_U]
        ratio_U = (new_U.detach() - old_U) * scale_U
        if coupled_BD is not None:
            c_U, value_U = coupled_BD[sample_U, row.draw_U], torch.zeros_like(adv_U)
        else:
            ref_U = None if update.reference is None else update.reference[row.index]
            drift_U = None if ref_U is None else (new_U.detach() - ref_U).double()
            c_U = coefficients(objective, new_U, old_U, adv_U, scale_U, ref_U)
            value_U = objective.value(ratio_U.double(), adv_U, drift_U)
        report = {
            "loss": -(weight_U * value_U).sum(),
            "elbo": elbo_terms(logp_T.detach(), row.unit_T, row.weight_U).sum(),
            "draws": torch.tensor(float(len(row.weight_U)), dtype=torch.float64, device=device),
            "ratio": ratio_U.double().sum(),
        }
        return (weight_U * c_U * new_U).sum(), report

    # On-policy and supervised coefficients, and coupled ones by now, do not depend on the log-probs of this pass.
    linear = coupled_BD is not None or (update.old is None and objective.penalty is None)
    reports = runner.forward_backward(update.rows, loss, linear)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = {name: sum((r[name] for r in reports), zero) for name in ("loss", "elbo", "draws", "ratio")}
    return sums | {"loss": sums["loss"] + coupled_loss}


def _old_values(objective: Objective, new_U: Tensor, recorded: Tensor | None) -> Tensor:
    if not objective.uses_old:
        return torch.zeros_like(new_U)
    return new_U.detach() if recorded is None else recorded


def _coupled_coefficients(
    runner: Runner, update: Update, objective: Objective, adv_B: Tensor, scale_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Exact coefficients `[B, D]` (replayed afterwards) and values `[B]` of an objective that couples a sample's draws.

    On-policy all log-ratios are zero and no pass is needed. Off-policy only the last stage's result is meant.
    """
    shape = (len(update.samples), len(update.samples[0].plan.weight_D))
    new_BD = old_BD = torch.zeros(shape, dtype=torch.float64, device=adv_B.device)
    if update.old is not None:
        new = score(runner, update.rows, objective)
        if runner.groups.is_last_stage:
            new_BD, old_BD = torch.cat(new).view(shape), torch.cat(update.old).view(shape)
    c_BD = coefficients(objective, new_BD, old_BD, adv_B, scale_B[:, None])
    return c_BD, objective.surrogate((new_BD - old_BD).double() * scale_B[:, None], adv_B)
