"""Everything that can be known, and refused, before a process group starts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamem.config.architecture import Architecture
from megamem.config.rules import RULES, Rule, check
from megamem.config.schema import RunConfig
from megamem.convert.source import RandomSource, SafetensorsSource, WeightSource, check_coverage, read_hf_config
from megamem.errors import UserError
from megamem.models.spec import ModelSpec, find_spec
from megamem.objectives.base import Objective
from megamem.objectives.registry import build_objective
from megamem.tasks.base import Problem, Split, Task
from megamem.tasks.registry import load_task
from megamem.tasks.tokenizer import Tokenizer, load_tokenizer
from megamem.train.checkpoint import CheckpointInfo, choose_checkpoint, is_checkpoint, read_info


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk: a Hugging Face folder or a megamem checkpoint.

    Attributes:
        path: the folder.
        hf: the folder with config.json and tokenizer files.
        info: of a checkpoint, else None.
    """

    path: Path
    hf: Path
    info: CheckpointInfo | None
    spec: ModelSpec
    arch: Architecture


def open_model(path: Path) -> ModelFolder:
    """Read what a model folder says about itself.

    Raises:
        UserError: neither a Hugging Face folder of a known family nor a checkpoint.
    """
    info = read_info(path) if is_checkpoint(path) else None
    hf = path / "hf" if info else path
    hf_config = read_hf_config(hf)
    spec = find_spec(hf_config, str(hf / "config.json"))
    return ModelFolder(path, hf, info, spec, spec.read_config(hf_config))


def weight_source(folder: ModelFolder, config: RunConfig) -> WeightSource | None:
    """Where the first weights come from, headers checked; None if from a checkpoint."""
    maps = folder.spec.tensor_maps(folder.arch)
    if config.model.init == "random":
        return RandomSource(maps, folder.arch, config.seed)
    if folder.info is not None:
        return None
    source = SafetensorsSource(folder.path)
    check_coverage(maps, folder.arch, source)
    return source


@dataclass(frozen=True)
class Prompt:
    """A problem and its prompt's token ids."""

    problem: Problem
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check: nothing here needs a device or a process group.

    Attributes:
        resume_from: the checkpoint to go on from, or None.
        notes: lines for the user about checkpoints that were left out.
    """

    config: RunConfig
    model: ModelFolder
    weights: WeightSource | None
    tokenizer: Tokenizer
    task: Task
    objective: Objective
    resume_from: Path | None
    notes: tuple[str, ...] = ()

    def prompt_ids(self, text: str, where: str) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
            UserError: it has none, and the model predicts a token from the one before it.
        """
        ids = tuple(self.tokenizer.encode_prompt(text))
        if not ids and self.model.arch.shifted_logits:
            raise UserError(
                f"{where}: its prompt has no token; this model predicts a token from the one before it, so a response "
                "must follow at least one"
            )
        return ids

    def prompts(
        self, split: Split, gen_length: int, limit: int | None = None
    ) -> tuple[list[Prompt], Mapping[str, int]]:
        """Token ids of a split's prompts, and how many were dropped or truncated for their length.

        Raises:
            UserError: a prompt is over-long and `rollout.overlong` says refuse, or none is left.
        """
        r = self.config.rollout
        longest = min(r.max_prompt or self.model.arch.max_positions, self.model.arch.max_positions - gen_length)
        kept: list[Prompt] = []
        counts = {"dropped": 0, "truncated": 0}
        for problem in self.task.problems(split)[:limit]:
            ids = self.prompt_ids(problem.prompt, f"problem {problem.key!r} ({split})")
            if len(ids) > longest:
                if r.overlong == "refuse":
                    raise UserError(
                        f"problem {problem.key!r} ({split}): its prompt has {len(ids)} tokens, more than {longest}; "
                        "rollout.overlong = refuse, allowed instead: drop, truncate"
                    )
                counts["dropped" if r.overlong == "drop" else "truncated"] += 1
                if r.overlong == "drop":
                    continue
                ids = ids[-longest:]
            kept.append(Prompt(problem, ids))
        if not kept:
            raise UserError(f"task.name = {self.config.task.name}: no usable problem in split {split!r} ({counts})")
        return kept, counts


def prepare(config: RunConfig, world: int, rules: Sequence[Rule] = RULES, will_train: bool = True) -> Prepared:
    """Check a configuration against the model, the task, the files and the number of processes.

    Args:
        world: number of processes.
        rules: the cross-field rules that matter for the command.
        will_train: also look for a checkpoint to resume from, and make the run folder.

    Raises:
        UserError: anything a user can mend.
    """
    resume_from, notes = None, ()
    if will_train:
        resume_from, notes = _open_run_folder(Path(config.out), config)
    folder = open_model(Path(config.model.path))
    check(config, folder.arch, world, tuple(rules))
    tokenizer = load_tokenizer(config.tokenizer.path or folder.hf, config.tokenizer.chat)
    if tokenizer.vocab_size > folder.arch.vocab_rows:
        raise UserError(
            f"tokenizer.path: ids go up to {tokenizer.vocab_size - 1}, the model has {folder.arch.vocab_rows} "
            "vocabulary rows; they do not belong together"
        )
    return Prepared(
        config,
        folder,
        None if resume_from else weight_source(folder, config),
        tokenizer,
        load_task(config.task.name, config.task.options),
        build_objective(config.objective),
        resume_from,
        notes,
    )


def _open_run_folder(out: Path, config: RunConfig) -> tuple[Path | None, tuple[str, ...]]:
    """Make the run folder; the newest whole checkpoint in it, if the run may resume, and lines about the others.

    Raises:
        UserError: it cannot be written, or holds a finished or foreign run that must not be overwritten.
    """
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"out = {str(out)!r}: the run folder cannot be written ({error.strerror})") from None
    found, notes = choose_checkpoint(out)
    if found is not None and not config.train.resume:
        raise UserError(
            f"out = {str(out)!r}: holds checkpoints up to {found.name} and train.resume = false; "
            "choose another folder, or train.resume=true"
        )
    return found, notes


def describe(facts: Mapping[str, Any]) -> str:
    """Facts as one short line."""
    return ", ".join(f"{key} {json.dumps(value)}" for key, value in facts.items())
