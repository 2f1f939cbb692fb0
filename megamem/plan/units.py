"""Sizes as people write them."""

import re

from megamem.errors import UserError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(text: str, option: str) -> int:
    """`80GB` (10^9 each), `80GiB` (2^30 each), `1TB`, `500MB`, or plain bytes.

    Raises:
        UserError: anything else, or nothing.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    size = float(match[1]) * units.get(match[2].lower(), 0) if match else 0
    if size < 1:
        raise UserError(f"{option} = {text!r}; allowed: a size such as 80GB, 79.5GiB, 1TB")
    return int(size)


def gigabytes(size: float) -> str:
    """For a person, in units of 10^9 bytes."""
    return f"{size / 1e9:.2f}"
