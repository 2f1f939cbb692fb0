"""Steps, evaluations, checkpoints, and stopping when asked to: everything around `train_step`."""

from collections.abc import Callable

from rich.console import Console

from megamem.config.schema import RunConfig
from megamem.convert.source import CODES
from megamem.errors import UserError
from megamem.platform.groups import Groups
from megamem.train.checkpoint import read_info
from megamem.train.evaluate import evaluate
from megamem.train.interrupt import Interrupted, Interrupts
from megamem.train.journal import Journal, Planned
from megamem.train.phases import Phases
from megamem.train.prepare import Prepared, Prompt
from megamem.train.profile import StepProfile
from megamem.train.run import Run, build_run
from megamem.train.saver import Saver
from megamem.train.step import train_step
from megamem.train.stragglers import gather_times, straggler_report


def train(
    prepared: Prepared,
    groups: Groups,
    console: Console,
    asked: Callable[[], bool] = lambda: False,
    phases: Phases | None = None,
    planned: Planned = lambda: None,
) -> bool:
    """Train from where the run folder stands to `train.steps`; a collective call.

    Args:
        asked: whether this process knows of a request to stop.
        phases: told what this process does.
        planned: what the planner found; of the main process.

    Returns:
        Whether the run is finished; if not, it was asked to stop, has saved, and goes on when it is started again.
    """
    config, resumed = prepared.config, prepared.resume_from
    run = build_run(prepared, groups, True, phases, Interrupts(groups, asked))
    # All read now: the checkpoint that is resumed from will be pruned.
    dtypes, unlogged = _source_dtypes(prepared), read_info(resumed).unlogged if resumed else {}
    _require_answers(run)
    # Identical on every rank, so the decision to evaluate is too.
    eval_prompts = _evaluation_prompts(prepared)
    first = run.finished + 1 if run.finished and not unlogged else run.finished
    journal = Journal(run, console, first, planned)
    saver = Saver(run, dtypes, journal.tell)
    journal.announce(eval_prompts)
    journal.state("running")
    metrics: dict[str, float] = {}  # of the last finished step
    try:
        with journal, StepProfile(run, journal.tell) as profile:
            if unlogged or (run.finished == 0 and eval_prompts and config.eval.at_start):
                journal.write(run.finished, unlogged | _evaluated(run, eval_prompts))
            for step in range(run.finished, config.train.steps):
                unlogged = {}
                profile.before(step + 1)
                metrics = train_step(run, step)
                if eval_prompts and _is_due(config.eval.every, step + 1, config):
                    unlogged = metrics
                    metrics = metrics | _evaluated(run, eval_prompts)
                # Logged before it is saved: killed in between, a run resumes earlier and drops the line; none is lost.
                journal.write(step + 1, metrics)
                unlogged = {}
                _save(run, saver, metrics, journal)
                if config.train.straggler_every and (step + 1) % config.train.straggler_every == 0:
                    journal.tell(f"slowest ranks: {straggler_report(gather_times(run.phases.take_own(), groups))}")
                run.interrupts.agree()
    except Interrupted:
        # Weights are those of the last finished step. If it was being evaluated, its line is written on resuming.
        saver.save(metrics, unlogged)
    saver.finish()
    finished = run.finished == config.train.steps and not unlogged
    journal.state("finished" if finished else "interrupted")
    if not finished:
        journal.tell(f"asked to stop: saved after step {run.finished}; start it again to go on")
    return finished


def _is_due(every: int, step: int, config: RunConfig) -> bool:
    """Whether something done every so many steps (0: never), and at the end, is due after `step`."""
    return bool(every) and (step % every == 0 or step == config.train.steps)


def _evaluated(run: Run, prompts: list[Prompt]) -> dict[str, float]:
    with run.phases("evaluate"):
        return evaluate(run, prompts, run.finished)[0]


def _save(run: Run, saver: Saver, metrics: dict[str, float], journal: Journal) -> None:
    """Complete what is on its way; write a checkpoint if one is due, and say what a stop would take."""
    before = saver.seconds
    with run.phases("checkpoint"):
        saver.poll()
        if _is_due(run.prepared.config.train.save_every, run.finished, run.prepared.config):
            saver.save(metrics)
    if saver.seconds != before:
        needed, grace = run.interrupts.longest + saver.seconds, run.prepared.config.train.grace
        if before is None or needed > grace:
            journal.tell(
                f"a stop takes up to about {needed:.1f} s: {run.interrupts.longest:.1f} s of work that is finished "
                f"first, {saver.seconds:.1f} s to save; the launcher leaves train.grace = {grace:g} s"
                + (" and would kill the run before it has saved: raise both" if needed > grace else "")
            )
    run.interrupts.restart_clock()


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


def _evaluation_prompts(prepared: Prepared) -> list[Prompt]:
    config = prepared.config
    if not config.eval.every and not config.eval.at_start:
        return []
    prompts, _ = prepared.prompts(
        config.eval.split, config.eval.gen_length or config.rollout.gen_length, config.eval.limit
    )
    return prompts
