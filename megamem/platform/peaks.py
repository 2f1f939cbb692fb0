"""What GPUs can do at most, from NVIDIA's data sheets: dense matrix products, TFLOPS."""

import re

import torch

# Words of the name that torch gives a GPU -> bfloat16, TF32 and plain fp32. The first row of which a name has all
# words counts.
_PEAKS: dict[tuple[str, ...], tuple[float, float, float]] = {
    ("A100",): (312.0, 156.0, 19.5),
    ("A800",): (312.0, 156.0, 19.5),
    ("H100", "PCIe"): (756.0, 378.0, 51.2),
    ("H100", "NVL"): (835.0, 417.5, 60.0),
    ("H100",): (989.4, 494.7, 66.9),
    ("H800", "PCIe"): (756.0, 378.0, 51.2),
    ("H800",): (989.4, 494.7, 66.9),
    ("H200", "NVL"): (835.0, 417.5, 60.0),
    ("H200",): (989.4, 494.7, 66.9),
    ("GH200",): (989.4, 494.7, 66.9),
    ("H20",): (148.0, 74.0, 44.0),
    ("B200",): (2250.0, 1100.0, 75.0),
    ("GB200",): (2500.0, 1250.0, 80.0),
    ("A10",): (125.0, 62.5, 31.2),
    ("A40",): (149.7, 74.8, 37.4),
    ("L4",): (121.0, 60.0, 30.3),
    ("L40",): (181.0, 90.5, 90.5),
    ("L40S",): (362.0, 183.0, 91.6),
}


def peak_tflops(gpu: str, dtype: torch.dtype, tf32: bool) -> float | None:
    """Of one GPU; None where it is not known.

    Args:
        gpu: the name that torch gives it. A slice of one (MIG) is not known.
        dtype: of the factors.
        tf32: products of fp32 factors are taken in TF32.
    """
    words = set(re.split(r"[^A-Za-z0-9]+", gpu))
    row = None if "MIG" in words else next((row for names, row in _PEAKS.items() if words.issuperset(names)), None)
    column = {torch.bfloat16: 0, torch.float32: 1 if tf32 else 2}.get(dtype)
    return None if row is None or column is None else row[column]
