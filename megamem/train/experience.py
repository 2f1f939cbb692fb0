"""From prompts to scored responses: what a step learns from.

Shapes: P prompts of this rank, G responses per prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megamem.config.schema import RunConfig
from megamem.platform.groups import Groups
from megamem.platform.rng import generator
from megamem.rollout.registry import sample
from megamem.rollout.rollout import Request, Rollout, record_rollouts, replay_rollouts
from megamem.tasks.base import Score
from megamem.train.prepare import Prompt
from megamem.train.run import Run


@dataclass(frozen=True, eq=False)
class Experience:
    """Responses of this rank's prompts, grouped by prompt.

    Attributes:
        rollouts: P x G, prompt by prompt; prompts in order of the optimizer step that learns from them.
        scores: of each rollout.
        reward_PG: float64.
    """

    rollouts: list[Rollout]
    scores: list[Score]
    reward_PG: Tensor


def prompt_indices(count: int, per_step: int, step: int, seed: int) -> list[int]:
    """Indices of the prompts of a step: epochs are permutations, keyed by (seed, epoch); stateless, so resumable."""
    first = step * per_step
    orders: dict[int, list[int]] = {}
    indices = []
    for i in range(first, first + per_step):
        epoch, place = divmod(i, count)
        if epoch not in orders:
            orders[epoch] = torch.randperm(count, generator=generator(seed, "prompts", epoch)).tolist()
        indices.append(orders[epoch][place])
    return indices


def rank_share(indices: Sequence[int], updates: int, rank: int, size: int) -> list[int]:
    """This data-parallel rank's prompts: of every update's slice of the batch, its own slice.

    Which prompts an optimizer step learns from does not depend on the number of ranks.
    """
    per_update = len(indices) // updates
    per_rank = per_update // size
    return [index for update in range(updates) for index in indices[update * per_update + rank * per_rank :][:per_rank]]


def step_prompts(run: Run, step: int) -> list[Prompt]:
    """This rank's training prompts of a step."""
    config = run.prepared.config
    indices = prompt_indices(len(run.prompts), config.rollout.prompts, step, config.seed)
    share = rank_share(indices, config.train.updates, run.groups.dp.rank, run.groups.dp.size)
    return [run.prompts[i] for i in share]


def roll_out(run: Run, prompts: Sequence[Prompt], step: int) -> list[Rollout]:
    """Sample (or replay) a group of responses for every prompt; record them if asked."""
    r = run.prepared.config.rollout
    requests = [Request(p.problem.key, i, p.ids) for p in prompts for i in range(r.group)]
    if r.replay:
        return replay_rollouts(Path(r.replay), step, requests)
    rollouts = sample(run.sampler, requests, run.decoding(step, training=True))
    if r.record and run.groups.mp.rank == 0:
        record_rollouts(Path(r.record), step, run.groups.dp.rank, rollouts)
    return rollouts


def judge(run: Run, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Score]:
    """Scores of responses, computed once per model replica and shared (a reward may be slow or not repeatable)."""
    scores = None
    if run.groups.mp.rank == 0:
        per_prompt = len(rollouts) // len(prompts)
        scores = [
            run.prepared.task.score(prompts[i // per_prompt].problem, run.prepared.tokenizer.decode(rollout.response))
            for i, rollout in enumerate(rollouts)
        ]
    return run.groups.from_replica_head(scores)


def demonstrations(run: Run, prompts: Sequence[Prompt]) -> list[Rollout]:
    """Reference answers as rollouts, filled with EOS to `gen_length` (LLaDA's SFT trains on that EOS)."""
    length, eos = run.prepared.config.rollout.gen_length, run.prepared.model.arch.eos_id
    return [Rollout(p.problem.key, 0, p.ids, tuple([*answer_ids(run, p), *[eos] * length][:length])) for p in prompts]


def answer_ids(run: Run, prompt: Prompt) -> list[int]:
    """Token ids of a problem's reference answer; `Task.answer` must give one (checked when the run starts)."""
    return run.prepared.tokenizer.encode(run.prepared.task.answer(prompt.problem))


def gather_experience(run: Run, prompts: Sequence[Prompt], step: int) -> Experience:
    """Responses and their rewards for this rank's prompts."""
    with run.phases("rollout"):
        rollouts = roll_out(run, prompts, step)
        run.phases.waits()
        run.interrupts.agree()
    with run.phases("reward"):
        scores = judge(run, prompts, rollouts)
    reward = torch.tensor([s.reward for s in scores], dtype=torch.float64)
    return Experience(rollouts, scores, reward.view(len(prompts), -1))


def response_length(rollout: Rollout, eos_id: int) -> int:
    """Tokens up to and including the first EOS."""
    return rollout.response.index(eos_id) + 1 if eos_id in rollout.response else len(rollout.response)


def group_ids(config: RunConfig, groups: Groups) -> Tensor:
    """Globally unique group id of every rollout of this rank, `[P * G]` (G = 1 for supervised fine-tuning)."""
    per_rank = config.rollout.prompts // groups.dp.size
    size = 1 if config.objective.name == "sft" else config.rollout.group
    return (torch.arange(per_rank) + groups.dp.rank * per_rank).repeat_interleave(size)
