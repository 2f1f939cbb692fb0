"""What a task is: problems in three splits, a score for a response, and where there is one a reference answer.

A response is text that a model under training wrote, so it is treated as hostile: `Task.score` never raises, never
executes it, and takes time bounded by a small multiple of its length. Files that a user brings are read here, and
whatever is wrong with one is a `UserError` that names the option, the file and the line.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict

from megamem.errors import UserError

Split = Literal["train", "valid", "test"]

_OPEN, _CLOSE = "<answer>", "</answer>"
_SHOWN = 60  # characters of a user's value that an error message repeats


@dataclass(frozen=True)
class Problem:
    """One problem of a task.

    Attributes:
        key: stable id, unique within the task; noise and sampling are keyed by it.
        prompt: the text of the user's turn, without any chat template.
        data: what `Task.score` needs beyond the prompt; belongs to the task.
    """

    key: str
    prompt: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """The judgement on one response.

    Attributes:
        reward: the shaped reward that training maximises.
        exact: whether the response is right; the rate of it is the accuracy that evaluation reports.
        parts: further numbers worth averaging in the log, by name.
    """

    reward: float
    exact: bool
    parts: Mapping[str, float] = field(default_factory=dict)


class TaskOptions(BaseModel):
    """Base of every task's options: unknown keys are errors, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Task(ABC):
    """Base of the built-in tasks and of a user's own.

    A subclass names its options in `Options` and gets them validated; what is wrong with the options or the files
    they name should be raised by `__init__`, before any model is built.
    """

    Options: ClassVar[type[BaseModel]] = TaskOptions

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split, always the same and in the same order for the same options."""

    @abstractmethod
    def score(self, problem: Problem, response: str) -> Score:
        """Judge a response, decoded text without special tokens. Never raises, whatever the text."""

    def answer(self, problem: Problem) -> str | None:
        """A response that earns the full reward, for supervised fine-tuning; None where there is none."""
        return None

    def report(self) -> Mapping[str, Any]:
        """Facts about the splits to print once, such as their sizes and overlaps."""
        return {}


def last_answer(response: str) -> str | None:
    """The text inside the last `<answer>...</answer>` of a response, stripped; None where there is no such pair.

    Pairs are read from left to right, each from an opening tag to the first closing tag after it, over line breaks:
    the rule of d1 (arXiv 2504.12216) and of BGPO. Two string searches per pair, so linear in the length.
    """
    found, position = None, 0
    while (start := response.find(_OPEN, position)) >= 0:
        end = response.find(_CLOSE, start + len(_OPEN))
        if end < 0:
            break
        found = (start + len(_OPEN), end)
        position = end + len(_CLOSE)
    return None if found is None else response[slice(*found)].strip()


def shown(value: object) -> str:
    """A value as an error message repeats it: its repr, cut to one short line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def read_text(path: str | Path, option: str) -> str:
    """The text of a UTF-8 file that a user named in `option` (a dotted key, for the message).

    Raises:
        UserError: the file is missing, is not a file, cannot be read, is not UTF-8, or holds nothing but space.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        problem = "is not a file" if file.exists() else f"does not exist (working directory: {Path.cwd()})"
        raise UserError(f"{option}: {str(path)!r} {problem}")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{option}: {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: {str(path)!r} is not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise UserError(f"{option}: {str(path)!r} is empty")
    return text


def read_jsonl(path: str | Path, option: str, fields: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Read a file with one JSON object per line; blank lines are skipped.

    Args:
        path: the file.
        option: the dotted key that named it, for messages.
        fields: the keys every object must have, with the type of each: `str`, `int`, `float`, or `list[...]` of these.

    Returns:
        pairs of a place ("task.options.file: 'a.jsonl' line 3", to begin a message with) and the object.

    Raises:
        UserError: as `read_text`; or a line is not a JSON object, lacks a key, or holds another type.
    """
    records = []
    # Not splitlines(): JSON strings may hold U+2028 and other characters that it takes for line ends.
    for number, line in enumerate(read_text(path, option).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{option}: {str(path)!r} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place} is not valid JSON: {shown(line)}") from error
        if not isinstance(record, dict):
            raise UserError(f"{place} must be a JSON object with the keys {', '.join(fields)}, got {shown(record)}")
        for key, kind in fields.items():
            if key not in record:
                raise UserError(f"{place} lacks the key {key!r} (keys needed: {', '.join(fields)})")
            if not _has_type(record[key], kind):
                name = kind.__name__ if get_origin(kind) is None else str(kind)
                raise UserError(f"{place}: {key!r} must be {name}, got {shown(record[key])}")
        records.append((place, record))
    return records


def _has_type(value: object, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_has_type(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool):  # JSON's true is not the number 1
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
