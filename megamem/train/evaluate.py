"""Greedy (or sampled) evaluation on a split, shared over data-parallel ranks."""

from dataclasses import dataclass

from megamem.rollout.registry import sample
from megamem.rollout.rollout import Request, Rollout
from megamem.tasks.base import Score
from megamem.train.experience import judge, response_length
from megamem.train.metrics import mean_over_data
from megamem.train.prepare import Prompt
from megamem.train.run import Run


@dataclass(frozen=True, eq=False)
class Judged:
    """One evaluated problem."""

    prompt: Prompt
    rollout: Rollout
    score: Score


def evaluate(run: Run, prompts: list[Prompt], step: int) -> tuple[dict[str, float], list[Judged]]:
    """Mean reward, exact rate and length over `prompts`, equal on every rank; and this rank's responses.

    A collective call. Rank r of R takes every R-th problem.
    """
    mine = prompts[run.groups.dp.rank :: run.groups.dp.size]
    rollouts = sample(run.sampler, [Request(p.problem.key, 0, p.ids) for p in mine], run.decoding(step, training=False))
    run.interrupts.agree()
    scores = judge(run, mine, rollouts) if mine else []
    eos_id = run.prepared.model.arch.eos_id
    means = {
        "eval_reward": [s.reward for s in scores],
        "eval_exact": [float(s.exact) for s in scores],
        "eval_length": [response_length(r, eos_id) for r in rollouts],
    }
    metrics = mean_over_data(means, run) | {"eval_problems": float(len(prompts))}
    return metrics, [Judged(*row) for row in zip(mine, rollouts, scores, strict=True)]
