"""`megamem eval` and `megamem sample`: a model without an optimizer."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megamem.config.rules import LAYOUT_RULES
from megamem.config.schema import RunConfig
from megamem.errors import UserError
from megamem.platform.groups import Groups
from megamem.platform.launch import Ranks
from megamem.rollout.rollout import Request
from megamem.train.prepare import Prepared, Prompt, prepare

MakeGroups = Callable[[Ranks, RunConfig], AbstractContextManager[Groups]]


def evaluate_model(config: RunConfig, ranks: Ranks, make_groups: MakeGroups, out: Path | None) -> dict[str, float]:
    """Evaluate; optionally write one JSON object per problem to `out`."""
    prepared = prepare(config, ranks.world, LAYOUT_RULES, will_train=False)
    gen_length = config.eval.gen_length or config.rollout.gen_length
    prompts, _ = prepared.prompts(config.eval.split, gen_length, config.eval.limit)
    if out is not None:
        _check_writable(out)
    with make_groups(ranks, config) as groups:
        from megamem.train.evaluate import evaluate
        from megamem.train.run import build_run

        run = build_run(prepared, groups, training=False)
        metrics, judged = evaluate(run, prompts, 0)
        rows = [_judged_row(j, prepared) for j in judged]
        everything = _gather(rows, groups)
    if out is not None and ranks.rank == 0:
        out.write_text("".join(json.dumps(row) + "\n" for row in everything), encoding="utf-8")
    return metrics


def sample_model(
    config: RunConfig, ranks: Ranks, make_groups: MakeGroups, texts: list[str], count: int
) -> list[dict[str, Any]]:
    """Responses to `texts`, or to the first problems of `eval.split` (10, or `eval.limit`)."""
    prepared = prepare(config, ranks.world, LAYOUT_RULES, will_train=False)
    requests = _requests(prepared, texts, count)
    with make_groups(ranks, config) as groups:
        from megamem.rollout.registry import sample
        from megamem.train.run import build_run

        run = build_run(prepared, groups, training=False)
        mine = requests[groups.dp.rank :: groups.dp.size]
        rollouts = sample(run.sampler, [r for r, _ in mine], run.decoding(0, training=True))
        decode = prepared.tokenizer.decode
        rows = [
            {"prompt": text, "sample": r.sample, "response": decode(r.response), "tokens": list(r.response)}
            for r, (_, text) in zip(rollouts, mine, strict=True)
        ]
        return _gather(rows, groups)


def _requests(prepared: Prepared, texts: list[str], count: int) -> list[tuple[Request, str]]:
    config, longest = prepared.config, prepared.model.arch.max_positions - prepared.config.rollout.gen_length
    if texts:
        prompts = [(f"prompt {i}", prepared.prompt_ids(t, f"--prompt {t!r}"), t) for i, t in enumerate(texts)]
    else:
        found, _ = prepared.prompts(config.eval.split, config.rollout.gen_length, config.eval.limit or 10)
        prompts = [(p.problem.key, p.ids, p.problem.prompt) for p in found]
    for _, ids, text in prompts:
        if len(ids) > longest:
            raise UserError(f"--prompt {text[:40]!r}…: {len(ids)} tokens; the model's positions leave {longest}")
    return [(Request(key, i, ids), text) for key, ids, text in prompts for i in range(count)]


def _judged_row(judged: Any, prepared: Prepared) -> dict[str, Any]:
    prompt: Prompt = judged.prompt
    return {
        "problem": prompt.problem.key,
        "prompt": prompt.problem.prompt,
        "response": prepared.tokenizer.decode(judged.rollout.response),
        "reward": judged.score.reward,
        "exact": judged.score.exact,
    }


def _gather(rows: list[dict[str, Any]], groups: Groups) -> list[dict[str, Any]]:
    """All data-parallel ranks' rows in the order of the problems, on every process."""
    if groups.dp.size == 1:
        return rows
    parts: list[Any] = [None] * groups.dp.size
    dist.all_gather_object(parts, rows, group=groups.dp.group)
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from None
