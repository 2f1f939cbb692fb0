"""From a task's name in the configuration to a task."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megamem.errors import UserError
from megamem.tasks.base import Task, shown

BUILT_IN = {
    "sudoku4": "megamem.tasks.sudoku4:Sudoku4",
    "countdown": "megamem.tasks.countdown:Countdown",
}


def load_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build a task.

    Args:
        name: a key of `BUILT_IN`, or `package.module:Class` of a subclass of `megamem.tasks.base.Task`, importable
            as usual or from the working directory.
        options: the section `task.options` of the configuration.

    Raises:
        UserError: no such task, not a task, or wrong options.
    """
    kind = task_class(name)
    return kind(_validate(kind.Options, {} if options is None else options))


def task_class(name: str) -> type[Task]:
    """The class behind a name; arguments and errors as `load_task`."""
    if not isinstance(name, str) or (name not in BUILT_IN and ":" not in name):
        known = ", ".join(BUILT_IN)
        raise UserError(
            f"task.name: {shown(name)} is not a task; allowed: {known}, or package.module:Class of your own"
        )
    module_name, _, class_name = BUILT_IN.get(name, name).partition(":")
    found = getattr(_import(name, module_name), class_name, None)
    if found is None:
        raise UserError(f"task.name: {name!r}: module {module_name!r} has no class {class_name!r}")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(f"task.name: {name!r} is not a subclass of megamem.tasks.base.Task")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise UserError(f"task.name: {name!r} does not define {', '.join(missing)}")
    if not (isinstance(found.Options, type) and issubclass(found.Options, BaseModel)):
        raise UserError(f"task.name: {name!r}: Options must be a pydantic model (a subclass of TaskOptions)")
    return found


def _import(name: str, module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        # A console script does not search the working directory. Last, so that a stray file there hides no package;
        # and for good, because a user's module may import its neighbours when it runs.
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a user's module can fail in any way while it is imported
        parents = [module_name.rsplit(".", cut)[0] for cut in range(module_name.count(".") + 1)]
        if isinstance(error, ModuleNotFoundError) and error.name in parents:
            problem = f"there is no module {error.name!r} (searched installed packages and {here})"
        else:
            problem = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        raise UserError(f"task.name: {shown(name)}: {problem}") from error


def _validate(kind: type[BaseModel], options: Mapping[str, Any]) -> BaseModel:
    if not isinstance(options, Mapping):
        raise UserError(f"task.options: must be keys and values, got {shown(options)}")
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
    key = ".".join(["task.options", *map(str, first["loc"])])
    if first["type"] == "extra_forbidden":
        raise UserError(f"{key}: no such option; allowed: {', '.join(kind.model_fields) or 'none'}")
    if first["type"] == "missing":
        raise UserError(f"{key}: is required")
    raise UserError(f"{key}: {shown(first['input'])} is not allowed: {first['msg'].removeprefix('Value error, ')}")
