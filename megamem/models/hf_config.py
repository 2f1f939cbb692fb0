"""What every family's config reader needs: values of a Hugging Face config, checked, and errors that name the key."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from megamem.config.architecture import Architecture
from megamem.config.load import explain
from megamem.errors import UserError


@contextmanager
def reading(family: str) -> Iterator[None]:
    """A missing key or a value of the wrong type, met inside, becomes a UserError that names it."""
    try:
        yield
    except KeyError as missing:
        raise UserError(f"config.json: the key {missing.args[0]!r} is missing ({family})") from None
    except ValidationError as error:
        raise UserError(f"config.json: {explain(error.errors()[0], Architecture)}") from None


def check_fixed(hf: Mapping[str, Any], fixed: Mapping[str, Any], family: str) -> None:
    """Keys that change the function hold the only value that our model computes, or are absent.

    Args:
        fixed: that value of each key; None also stands for false.

    Raises:
        UserError: another value.
    """
    for key, only in fixed.items():
        value = hf.get(key, only)
        if value != only and not (only is None and value is False):
            allowed = "null or false" if only is None else repr(only)
            raise UserError(f"config.json: {key} = {value!r} is not the {family} architecture; allowed: {allowed}")


def size(hf: Mapping[str, Any], *keys: str) -> int:
    """The first of these keys that is set; a KeyError names the last.

    Raises:
        UserError: not a positive integer.
    """
    key = next((key for key in keys if hf.get(key) is not None), keys[-1])
    value = hf[key]
    if type(value) is not int or value < 1:
        raise UserError(f"config.json: {key} = {value!r}; allowed: a positive integer")
    return value


def token_id(hf: Mapping[str, Any], key: str, rows: int) -> int:
    """A token id below the number of vocabulary rows; a KeyError where there is none.

    Raises:
        UserError: not such a number.
    """
    value = hf[key]
    if type(value) is not int or not 0 <= value < rows:
        raise UserError(f"config.json (or generation_config.json): {key} = {value!r}; allowed: 0 … {rows - 1}")
    return value


def optional_token_id(hf: Mapping[str, Any], key: str, rows: int) -> int | None:
    """The same where a model may do without."""
    return None if hf.get(key) is None else token_id(hf, key, rows)
