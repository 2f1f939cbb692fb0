"""The published StreamBP package (PyPI `streambp` 1.0) on the sizes of `megamem bench stream`, causal, side by side.

It needs transformers 4.51.3, so it has an environment of its own; of megamem only the meter of live storages is used:

    python -m venv peers && peers/bin/pip install torch==2.13.0 transformers==4.51.3
    peers/bin/pip install --no-deps streambp==1.0
    megamem bench stream --attention causal --tokens 8192 --json > ours.json
    PYTHONPATH=. peers/bin/python tools/bench_peers.py --ours ours.json > peers.json

The model is a Llama of the same hidden, ffn, layers, heads and vocabulary with random weights; the row is one sequence
without padding, every position scored. Bytes are live storages above parameters and gradients, which exist beforehand
on both sides. The JSON goes to stdout, the table to stderr. How the package is used, so that it looks its best:

* Its model code runs unchanged, loaded from its own file: importing the package would import trl for its trainers.
* It needs an attention mask (KeyError without). Given one, its forward builds a dense tokens x tokens mask in every
  layer. `streambp` is that, the package as published; `streambp_causal` lets a chunk that starts the row, and with it
  the whole forward, take torch's causal flag instead, as its authors' own measurements seem to have done.
* Chunks are tried: --layer-chunks (default 128, 512 and the paper's third of the row) and --logits-chunks (the paper's
  100). The comparison takes the best peak and the best time, be they of different chunks.
* It divides by all labels although the first is never predicted, so its gradients are (T - 1) / T of the true ones.
  Before anything is measured they are compared with plain Hugging Face on a small fp64 model: relative difference as
  it is, and after the best common factor.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from megamem.platform.memory import LiveStorages

VARIANTS = ("streambp", "streambp_causal")
SMALL = dict(tokens=90, layers=2, hidden=32, ffn=48, heads=4, vocab=61)


@dataclass(frozen=True)
class Case:
    """One way to run the package: chunk lengths in tokens."""

    variant: str
    layer_chunk: int
    logits_chunk: int


@dataclass(frozen=True)
class Result:
    """Bytes at most alive, and median seconds of forward and backward."""

    variant: str
    layer_chunk: int
    logits_chunk: int
    peak_bytes: int
    seconds: float


def published_code() -> ModuleType:
    """`streambp/stream_model.py`, without the package around it."""
    folder = importlib.util.find_spec("streambp").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("streambp_stream_model", Path(folder) / "stream_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def llama(sizes: dict[str, int], dtype: torch.dtype) -> LlamaForCausalLM:
    """A model with random weights, the same for the same sizes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        vocab_size=sizes["vocab"],
        max_position_embeddings=sizes["tokens"],
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(dtype).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def random_ids(sizes: dict[str, int]) -> Tensor:
    """One row, `[1, tokens]`."""
    return torch.randint(0, sizes["vocab"], (1, sizes["tokens"]), generator=torch.Generator().manual_seed(0))


@contextmanager
def causal_flag(code: ModuleType) -> Iterator[None]:
    """A chunk that starts the row uses `is_causal` instead of a dense mask; any other keeps its mask."""
    mask_of = code.StreamAttention._generate_causal_mask
    attention = torch.nn.functional.scaled_dot_product_attention
    flag = object()

    def mask(self, start, end, dtype, device):
        return flag if start == 0 else mask_of(self, start, end, dtype, device)

    def attend(q, k, v, attn_mask=None, is_causal=False, **options):
        if attn_mask is flag:
            return attention(q, k, v, is_causal=True, **options)
        return attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)

    patches = (
        mock.patch.object(code.StreamAttention, "_generate_causal_mask", mask),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend),
    )
    with patches[0], patches[1]:
        yield


class Package:
    """One model in the published wrapper."""

    def __init__(self, code: ModuleType, model: LlamaForCausalLM, ids: Tensor):
        self._code, self._model, self._ids = code, model, ids
        self._stream = code.StreamModel(model, gradient_accumulation_steps=1)
        self._stream.gradient_checkpointing_enable()

    def step(self, case: Case) -> None:
        """Forward and backward; gradients start from zero."""
        for parameter in self._model.parameters():
            parameter.grad.zero_()
        self._stream.checkpoint_chunk_size, self._stream.logits_chunk_size = case.layer_chunk, case.logits_chunk
        mask = torch.ones_like(self._ids)
        if case.variant == "streambp_causal":
            with causal_flag(self._code):
                self._stream(input_ids=self._ids, attention_mask=mask, labels=self._ids)
        else:
            self._stream(input_ids=self._ids, attention_mask=mask, labels=self._ids)

    def peak(self, case: Case) -> int:
        """Peak bytes of a step."""
        with LiveStorages() as memory:
            self.step(case)
        return memory.peak

    def seconds(self, case: Case) -> float:
        """Seconds of a step."""
        started = time.perf_counter()
        self.step(case)
        return time.perf_counter() - started


def check_gradients(code: ModuleType) -> dict[str, dict[str, float]]:
    """Largest relative difference (Frobenius, over parameters) to plain Hugging Face on a small fp64 model."""
    ids = random_ids(SMALL)
    plain = llama(SMALL, torch.float64)
    plain(input_ids=ids, labels=ids).loss.backward()
    expected = gradients(plain)
    found = {}
    for variant in VARIANTS:
        model = llama(SMALL, torch.float64)
        Package(code, model, ids).step(Case(variant, 32, 20))
        ours = gradients(model)
        factor = (
            sum((ours[n] * expected[n]).sum() for n in ours) / sum(g.square().sum() for g in expected.values())
        ).item()
        found[variant] = {
            "max_rel_grad_diff": largest_difference(ours, expected, 1.0),
            "common_factor": factor,
            "after_factor": largest_difference(ours, expected, factor),
        }
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the names of the plain model."""
    names = {
        name.replace("base_layer.", "").replace("self_attn.self_attn", "self_attn"): p
        for name, p in model.named_parameters()
    }
    return {name: p.grad.double() for name, p in names.items()}


def largest_difference(ours: dict[str, Tensor], expected: dict[str, Tensor], factor: float) -> float:
    """Relative to `factor * expected`."""
    return max(((ours[n] - factor * g).norm() / (factor * g).norm()).item() for n, g in expected.items())


def measure(package: Package, cases: list[Case], repeats: int) -> list[Result]:
    """Memory of every case, then rounds of times in which cases take turns."""
    package.step(cases[0])  # what a process makes once is no step's
    peaks, seconds = {}, {case: [] for case in cases}
    for case in cases:
        peaks[case] = package.peak(case)
        tell(f"{case}: peak {peaks[case] / 2**20:.1f} MiB")
    for turn in range(repeats):
        for case in cases:
            seconds[case].append(package.seconds(case))
            tell(f"round {turn + 1} of {repeats}: {case}: {seconds[case][-1]:.3f} s")
    return [Result(**asdict(case), peak_bytes=peaks[case], seconds=statistics.median(seconds[case])) for case in cases]


def table(results: list[Result], ours: dict) -> str:
    """Both sides (of ours the device bytes); ratios to the smallest peak and the least time of all published rows."""
    best_bytes, best_seconds = (min(getattr(r, name) for r in results) for name in ("peak_bytes", "seconds"))
    lines = [f"{'':34}{'peak MiB':>10}{'ratio':>8}{'seconds':>9}{'ratio':>8}"]
    rows = [(f"{r.variant} {r.layer_chunk}/{r.logits_chunk}", r.peak_bytes, r.seconds) for r in results]
    rows += [(f"megamem {r['variant']}", r["device_peak_bytes"], r["seconds"]) for r in ours["rows"]]
    lines += [
        f"{name:34}{size / 2**20:10.1f}{size / best_bytes:8.3f}{seconds:9.3f}{seconds / best_seconds:8.3f}"
        for name, size, seconds in rows
    ]
    return "\n".join(lines)


def tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="published StreamBP beside megamem bench stream, causal")
    parser.add_argument("--ours", type=Path, help="JSON of `megamem bench stream --attention causal --json`")
    for name, default in dict(tokens=8192, layers=8, hidden=512, ffn=1536, heads=8, vocab=32000).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default}; --ours brings its own")
    parser.add_argument("--layer-chunks", default="", help="lengths with commas between; default 128,512,TOKENS/3")
    parser.add_argument("--logits-chunks", default="100", help="lengths with commas between; default 100")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Check, measure, print."""
    asked = arguments()
    ours = json.loads(asked.ours.read_text()) if asked.ours else None
    if ours and ours["attention"] != "causal":
        sys.exit(f"--ours {asked.ours}: attention is {ours['attention']}; the package is causal only")
    sizes = {name: ours["sizes"][name] if ours else getattr(asked, name) for name in SMALL}
    code = published_code()
    check = check_gradients(code)
    tell(f"gradients against plain Hugging Face: {json.dumps(check)}")
    layer_chunks = asked.layer_chunks or f"128,512,{-(-sizes['tokens'] // 3)}"
    cases = [
        Case(variant, int(layer_chunk), int(logits_chunk))
        for variant in asked.variants
        for layer_chunk in layer_chunks.split(",")
        for logits_chunk in asked.logits_chunks.split(",")
    ]
    package = Package(code, llama(sizes, torch.float32), random_ids(sizes))
    results = measure(package, cases, asked.repeats)
    about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps({"sizes": sizes, **about, "check": check, "rows": [asdict(r) for r in results]}))
    if ours:
        tell(table(results, ours))


if __name__ == "__main__":
    main()
