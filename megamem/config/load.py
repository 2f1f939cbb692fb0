"""YAML plus dotted overrides -> RunConfig, and back. Imports no torch."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from megamem.config.schema import RunConfig, Section
from megamem.errors import UserError


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration.

    Args:
        path: YAML file.
        overrides: OmegaConf dot-list, e.g. `parallel.tensor=2`; they win over the file.

    Raises:
        UserError: no such file, not YAML, a malformed override, an unknown key or a value of the wrong kind.
    """
    return parse(_read_yaml(Path(path)), overrides, str(path))


def parse(settings: dict[str, Any], overrides: Sequence[str], where: str) -> RunConfig:
    """Settings plus overrides -> RunConfig; raises like `load_config`."""
    return _validated(RunConfig, _merged(settings, overrides, where), where)


def config_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: cannot be read as YAML ({_first_line(error)})") from None
    return _container(loaded, str(path))


def _merged(settings: dict[str, Any], overrides: Sequence[str], where: str) -> dict[str, Any]:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override {override!r} is not of the form key=value, e.g. parallel.tensor=2")
    try:
        settings = dict(settings)
        if isinstance(settings.get("task"), str):  # so that task.options.x=… can be merged into it
            settings["task"] = {"name": settings["task"]}
        long = [_long_task(override) for override in overrides]
        if long != list(overrides):  # another task starts without the file's options
            settings.pop("task", None)
        changes = OmegaConf.from_dotlist(long)
        return _container(OmegaConf.merge(OmegaConf.create(settings), changes), where)
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{where}: overrides {list(overrides)} cannot be applied ({_first_line(error)})") from None


def _long_task(override: str) -> str:
    """`task=name` as `task.name=name`, so that `task.options.x=…` beside it is merged and does not replace it."""
    key, _, value = override.partition("=")
    return f"task.name={value}" if key.strip() == "task" and value[:1] not in "{[" else override


def _container(node: Any, where: str) -> dict[str, Any]:
    try:
        settings = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{where}: {_first_line(error)}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{where}: must be a mapping of keys, found {type(settings).__name__}")
    return settings


def _validated(model: type[RunConfig], settings: dict[str, Any], where: str) -> RunConfig:
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"{where}: " + "\n".join(explain(e, model) for e in error.errors()[:2])) from None


def explain(error: Any, model: type[BaseModel]) -> str:
    """One pydantic error as one line: the dotted key, its value, what is allowed."""
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    if error["type"] == "missing":
        return f"{key}: this key is required and has no default"
    if error["type"] == "extra_forbidden":
        known = _keys_at(model, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"{key} = {error['input']!r}: unknown key; {hint}allowed: {', '.join(known)}"
    return f"{key} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _keys_at(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            return []
        model = annotation
    return list(model.model_fields)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
