"""The three tolerances of this repository (DESIGN section 7). A test uses nothing else without a reason beside it."""

from collections.abc import Mapping

import torch
from torch import Tensor

ALGEBRA = 1e-12  # the same algebra in another order, in fp64: largest error relative to the largest entry
FLOOR = 1.5  # low precision: our error against fp64 is at most this many times the trusted path's own


def assert_exact(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Bit-equal: same dtype, shape and bytes (so that NaN equals itself and -0.0 is not 0.0)."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), (what, actual.dtype, actual.shape)
    bytes_of = [x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in (actual, expected)]
    assert torch.equal(*bytes_of), f"{what}: not bit-equal"


def assert_algebra(actual: Tensor, expected: Tensor, what: str = "", bound: float = ALGEBRA) -> None:
    """Equal in fp64 up to the order of operations."""
    assert actual.dtype == expected.dtype == torch.float64, (what, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    difference, scale = (x.detach().abs().max().item() for x in (actual - expected, expected))
    assert difference <= bound * scale, f"{what}: {difference:.3g} is off by {difference / scale if scale else 1:.3g}"


def assert_floor(actual: Tensor, trusted: Tensor, truth: Tensor, what: str = "", k: float = FLOOR) -> None:
    """No further from the fp64 truth than k times the trusted path in the same precision (root mean square)."""
    assert actual.dtype == trusted.dtype, (what, actual.dtype, trusted.dtype)
    ours, theirs = ((x.detach().double() - truth).square().mean().sqrt().item() for x in (actual, trusted))
    assert ours <= k * theirs, f"{what}: error {ours:.3g}, trusted path {theirs:.3g}, allowed {k} times that"


def assert_floor_together(
    actual: Mapping[str, Tensor], trusted: Mapping[str, Tensor], truth: Mapping[str, Tensor], k: float = FLOOR
) -> None:
    """The same of many tensors at once, each by the truth's root mean square: small ones are off by chance."""
    assert actual.keys() == trusted.keys() == truth.keys()
    scale = {name: value.square().mean().sqrt() for name, value in truth.items()}
    assert all(value > 0 for value in scale.values())
    ours, theirs, exact = (
        torch.cat([(side[name].double() / value).flatten() for name, value in scale.items()])
        for side in (actual, trusted, truth)
    )
    assert_floor(ours, theirs, exact, "all together", k)
