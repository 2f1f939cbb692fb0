"""What several benches need."""

from collections.abc import Sequence

from torch import Tensor

from megamem.errors import UserError


def chosen_variants(text: str, every: Sequence[str]) -> list[str]:
    """Names from a comma-separated list; all of them for an empty one.

    Raises:
        UserError: an unknown name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in every]
    if unknown:
        raise UserError(f"--variants = {text!r}: no {unknown[0]!r}; allowed, with commas between: {', '.join(every)}")
    return names or list(every)


def largest_difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Largest relative difference (Frobenius norm) over named gradients."""
    return max(((ours[n] - reference[n]).norm() / reference[n].norm()).item() for n in reference)
