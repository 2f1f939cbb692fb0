"""Steps, evaluations, checkpoints, logging: everything around `train_step`."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megamem.config.load import dump_config
from megamem.convert.source import CODES
from megamem.errors import UserError
from megamem.platform.groups import Groups
from megamem.train.checkpoint import CheckpointInfo, prune_checkpoints, read_info, save_checkpoint, step_folder
from megamem.train.evaluate import evaluate
from megamem.train.metrics import MetricsLog
from megamem.train.prepare import Prepared, describe
from megamem.train.run import Run, build_run
from megamem.train.step import train_step


def train(prepared: Prepared, groups: Groups, console: Console) -> None:
    """Train from where the run folder stands to `train.steps`; a collective call."""
    config, out = prepared.config, Path(prepared.config.out)
    run = build_run(prepared, groups, training=True)
    dtypes = _source_dtypes(prepared)  # now: the checkpoint that is resumed from will be pruned
    _require_answers(run)
    # Identical on every rank, so the decision to evaluate is too.
    eval_prompts = _evaluation_prompts(prepared)
    log = None
    if groups.is_main:
        dump_config(config, out / "config.yaml")
        log = MetricsLog(out, run.finished + 1 if run.finished else 0, config.tensorboard)
        _announce(run, eval_prompts, console)
    if run.finished == 0 and eval_prompts and config.eval.at_start:
        before, _ = evaluate(run, eval_prompts, 0)
        if log:
            log.write(0, before)
            console.print(f"step 0  {_line(before)}")
    with _progress(console, enabled=groups.is_main) as progress:
        bar = progress.add_task("training", total=config.train.steps, completed=run.finished, told="")
        for step in range(run.finished, config.train.steps):
            metrics = train_step(run, step)
            done = step + 1 == config.train.steps
            if eval_prompts and config.eval.every and ((step + 1) % config.eval.every == 0 or done):
                metrics |= evaluate(run, eval_prompts, step + 1)[0]
            # Logged before it is saved: a run killed in between resumes earlier and drops the line, none goes missing.
            if log:
                log.write(step + 1, metrics)
            if (step + 1) % config.train.save_every == 0 or done:
                save(run, dtypes)
            if log:
                progress.update(bar, advance=1, told=_line(metrics))
                if not console.is_terminal or "eval_exact" in metrics:
                    progress.console.print(f"step {step + 1}/{config.train.steps}  {_line(metrics)}")


def save(run: Run, dtypes: dict[str, str]) -> None:
    """Write this step's checkpoint with the resolved configuration beside it; drop the oldest."""
    config, folder = run.prepared.config, run.prepared.model
    info = CheckpointInfo(folder.spec.name, run.finished, has_optimizer=True, weights=config.model.dtype, dtypes=dtypes)
    target = step_folder(Path(config.out), run.finished)
    save_checkpoint(target, info, run.model, run.groups, folder.hf, run.optimizer, config)
    if run.groups.is_main:
        prune_checkpoints(Path(config.out), config.train.keep)


def _source_dtypes(prepared: Prepared) -> dict[str, str]:
    """Dtype codes of the Hugging Face tensors the model came from, for the export."""
    source = prepared.resume_from or prepared.model.path
    if prepared.resume_from or prepared.model.info:
        return read_info(source).dtypes
    return {name: CODES[dtype] for name, dtype in prepared.weights.dtypes.items()}


def _require_answers(run: Run) -> None:
    config = run.prepared.config
    if config.objective.name != "sft":
        return
    if run.prepared.task.answer(run.prompts[0].problem) is None:
        raise UserError(f"objective.name = sft: the task {config.task.name} has no reference answers to learn from")


def _evaluation_prompts(prepared: Prepared):
    config = prepared.config
    if not config.eval.every and not config.eval.at_start:
        return []
    prompts, _ = prepared.prompts(
        config.eval.split, config.eval.gen_length or config.rollout.gen_length, config.eval.limit
    )
    return prompts


def _announce(run: Run, eval_prompts: list, console: Console) -> None:
    config, g = run.prepared.config, run.groups
    _, skipped = run.prepared.prompts("train", config.rollout.gen_length)
    facts = {
        "model": run.prepared.model.spec.name,
        "tensor": g.tp.size,
        "pipeline": g.pp.size,
        "data": g.dp.size,
        "device": str(g.device.torch),
        "objective": config.objective.name,
        "train prompts": len(run.prompts),
        **{f"prompts {k}": v for k, v in skipped.items() if v},
        "eval prompts": len(eval_prompts),
        **run.prepared.task.report(),
    }
    console.print(describe(facts))
    if run.finished:
        console.print(f"resumed after step {run.finished} from {run.prepared.resume_from}")


def _progress(console: Console, enabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[told]}"),
        console=console,
        disable=not enabled or not console.is_terminal,
    )


_SHOWN = ("reward", "exact", "elbo", "grad_norm", "zero_variance", "seconds", "eval_reward", "eval_exact")


def _line(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {metrics[name]:.3f}" for name in _SHOWN if name in metrics)
