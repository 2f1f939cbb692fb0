"""One training step, top to bottom.

rollout -> reward -> advantage -> noise -> (old log-probs only if off-policy) -> rows through megatron-core's schedule
or the streamed one -> finalize -> clip -> optimizer -> numbers to log.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megamem.config.schema import RunConfig
from megamem.diffusion.noise import draw_noise, mask_prompt
from megamem.objectives.advantages import ADVANTAGES
from megamem.objectives.reduction import sample_weights
from megamem.platform.rng import generator
from megamem.rollout.rollout import Rollout
from megamem.tasks.base import Score
from megamem.train.checks import check_in_sync, check_shares, check_skipped
from megamem.train.draws import DrawRows, Sample
from megamem.train.experience import (
    demonstrations,
    gather_experience,
    group_ids,
    judge,
    response_length,
    step_prompts,
)
from megamem.train.metrics import Result, step_metrics
from megamem.train.optim import gradients_finite, learning_rate, set_learning_rate
from megamem.train.run import Run
from megamem.train.update import Update, backward, score


@dataclass(frozen=True, eq=False)
class Batch:
    """Everything a step learns from, on this rank: responses, scores, advantages `[N]`."""

    rollouts: list[Rollout]
    scores: list[Score]
    advantage_N: Tensor


def train_step(run: Run, step: int) -> dict[str, float]:
    """Train on one batch of prompts.

    Args:
        step: index of the step, from 0; all randomness is keyed by (seed, step, problem, sample, draw).

    Returns:
        What `metrics.step_metrics` names, averaged over the whole batch, on every rank.
    """
    config, started = run.prepared.config, time.perf_counter()
    batch = learn_from_answers(run, step) if config.objective.name == "sft" else learn_from_rollouts(run, step)
    updates = make_updates(run, batch, step)
    results = []
    for index, update in enumerate(updates):
        # Until the first optimizer step a step can be given up; then it is finished.
        with run.interrupts.held_off() if index else nullcontext(), run.phases("update"):
            results.append(optimize(run, update, step * len(updates) + index))
    run.finished = step + 1
    run.skipped = 0 if all(r.norm is not None for r in results) else run.skipped + 1
    check_skipped(run.skipped, config.train.max_skipped, run.finished)
    if config.train.checks:
        check_in_sync(run.model, run.groups, step)
    return step_metrics(run, batch, updates, results, time.perf_counter() - started)


def optimize(run: Run, update: Update, index: int) -> Result:
    """One optimizer step, the `index`-th of the run; skipped on all ranks where one has a loss or gradient that is not
    finite."""
    config = run.prepared.config
    run.trainer.model.zero_grad_buffer()
    run.optimizer.zero_grad()
    sums = backward(run.trainer, update, run.prepared.objective, config.objective.length_norm)
    if run.groups.any(not (bool(torch.isfinite(sums["loss"])) and gradients_finite(run.trainer.model))):
        return Result(sums, None)
    total = config.train.steps * config.train.updates
    set_learning_rate(run.optimizer, learning_rate(config.optimizer, index, total))
    _, norm, _ = run.optimizer.step()
    return Result(sums, float(norm))


def learn_from_rollouts(run: Run, step: int) -> Batch:
    """Sample, judge, and compare within groups."""
    experience = gather_experience(run, step_prompts(run, step), step)
    advantage_PG = ADVANTAGES[run.prepared.config.objective.advantage](experience.reward_PG)
    return Batch(experience.rollouts, experience.scores, advantage_PG.flatten())


def learn_from_answers(run: Run, step: int) -> Batch:
    """Reference answers, each with advantage 1."""
    prompts = step_prompts(run, step)
    rollouts = demonstrations(run, prompts)
    return Batch(rollouts, judge(run, prompts, rollouts), torch.ones(len(rollouts), dtype=torch.float64))


def make_updates(run: Run, batch: Batch, step: int) -> list[Update]:
    """Noise, weights and rows of every optimizer step of this batch; old log-probs for all but the first."""
    config, objective = run.prepared.config, run.prepared.objective
    groups_N = group_ids(config, run.groups)
    size = len(batch.rollouts) // config.train.updates
    updates = []
    for index in range(config.train.updates):
        part = slice(index * size, (index + 1) * size)
        samples = [
            make_sample(config, rollout, advantage, group, step, run.prepared.model.arch.eos_id)
            for rollout, advantage, group in zip(
                batch.rollouts[part], batch.advantage_N[part].tolist(), groups_N[part].tolist(), strict=True
            )
        ]
        weight_B = _weights(run, samples, config)
        if config.train.checks:
            check_shares(weight_B, samples, objective, config, run.groups)
        if objective.penalty is None:
            samples, weight_B = _drop_silent(samples, weight_B)
        shape = run.trainer.row_shape(config.train.row_tokens)
        rows = DrawRows(samples, run.drawn_model, shape, run.groups.device.torch)
        # The first optimizer step trains the policy that sampled: old and new log-probs are the same numbers.
        with run.phases("old_logprobs"):
            old = score(run.sampler, rows, objective) if index and objective.uses_old else None
            reference = score(run.reference, rows, objective) if objective.penalty is not None else None
            run.interrupts.agree()
        updates.append(Update(samples, weight_B, rows, old, reference))
    return updates


def make_sample(config: RunConfig, rollout: Rollout, advantage: float, group: int, step: int, eos_id: int) -> Sample:
    """A response with its noise plan."""
    key = (step, rollout.problem, rollout.sample)
    length = response_length(rollout, eos_id) if config.objective.score_eos == "first" else len(rollout.response)
    plan = draw_noise(config.noise.estimator, length, config.noise.draws, generator(config.seed, "noise", *key))
    hidden_DP = None
    if config.objective.name == "diffu_grpo":
        stream = generator(config.seed, "prompt mask", *key)
        masks = (mask_prompt(len(rollout.prompt), config.objective.prompt_mask, stream) for _ in plan.weight_D)
        hidden_DP = torch.stack(list(masks))
    prompt_P, response_L = torch.tensor(rollout.prompt), torch.tensor(rollout.response[:length])
    return Sample(prompt_P, response_L, plan, advantage, group, hidden_DP)


def _weights(run: Run, samples: Sequence[Sample], config: RunConfig) -> Tensor:
    level, draws, device = run.prepared.objective.level, config.noise.draws, run.groups.device.torch
    each = draws if level == "token" else 1
    tokens_B = torch.tensor([s.scored_tokens * each for s in samples], device=device)
    groups_B = torch.tensor([s.group for s in samples], device=device)
    reduction, longest = config.objective.reduction, config.rollout.gen_length * each
    return sample_weights(reduction, tokens_B, groups_B, draws, level, run.groups.sum_over_data, longest)


def _drop_silent(samples: Sequence[Sample], weight_B: Tensor) -> tuple[list[Sample], Tensor]:
    """Leave out samples whose advantage is 0: their gradient is. One stays, so that every rank runs a micro-batch."""
    keep = [b for b, sample in enumerate(samples) if sample.advantage != 0] or [0]
    return [samples[b] for b in keep], weight_B[keep]
