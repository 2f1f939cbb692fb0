"""Randomness as an argument.

Two kinds of streams, both keyed by *what* is drawn and never by who draws it, so that data-parallel ranks, batch
sizes and vocabulary shards cannot change a result (DESIGN section 1, idea 5):

* `generator(seed, *key)`: a CPU `torch.Generator` for small plans (noise plans, prompt order).
* `uniform_hash(key_..., column)`: a counter-based uniform for large grids of which every rank evaluates its own
  part (sampling noise over positions and vocabulary ids).
"""

import hashlib

import torch
from torch import Tensor

# Multipliers of the splitmix64 finaliser (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def derive_seed(seed: int, *key: int | str) -> int:
    """A 63-bit seed from a base seed and a key of integers and names; stable across machines and Python versions."""
    text = repr((seed, *key))  # repr tells ("a", "b") from ("a/b",), and 1 from "1"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *key: int | str) -> torch.Generator:
    """A fresh CPU generator for the stream named by `key`."""
    return torch.Generator().manual_seed(derive_seed(seed, *key))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (unsigned) right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform_hash(row_key: Tensor, column: Tensor) -> Tensor:
    """Uniform numbers in the open interval (0, 1), a pure function of (row key, column).

    Args:
        row_key: int64 `[P]`, e.g. `derive_seed(seed, step, sample, decode step, position)`.
        column: int64 `[V]`, e.g. global vocabulary ids; a shard passes its own ids and gets its own columns.

    Returns:
        float64 `[P, V]`, 53 random bits each, never 0 or 1 (so that `log(-log(u))` is finite).
    """
    mixed = _mix(_mix(row_key)[:, None] + (column[None, :] + 1) * _GOLDEN)
    # The largest of the 2^53 values would round up to 1.
    return ((_shift_right(mixed, 11).double() + 0.5) * 2.0**-53).clamp_(max=1 - 2.0**-53)
