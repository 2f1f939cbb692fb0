"""`megamem bench bgpo`: memory and time of one update as the number of Monte-Carlo draws grows.

`bgpo` and `vrpo_ol` are the trainer's own update (`train/update.py`): every draw is a micro-batch of its own. The
`retained` variants are the objectives as their formulas read: the graphs of all draws are alive until one backward, as
exp of a mean over draws asks for in VRPO-OL (arXiv 2510.11683 eq. 7). The update is off-policy; the pass that scores
the old policy is not in it.

Peak bytes of a draw grow with its masked tokens, so the first draw of every response masks all: the largest row is the
same for every number of draws. Bytes are live tensor storages above parameters and gradient buffers; seconds are
medians.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megamem.bench.measure import largest_difference
from megamem.config.architecture import Architecture
from megamem.config.schema import ParallelConfig
from megamem.convert.source import RandomSource
from megamem.convert.weights import load_weights, stage_parameters
from megamem.diffusion.noise import draw_noise
from megamem.errors import UserError
from megamem.models.build import build_model
from megamem.models.llada import tensor_maps
from megamem.models.runner import Runner
from megamem.objectives.base import Objective, RatioLimits
from megamem.objectives.reduction import sample_weights
from megamem.objectives.registry import FACTORIES
from megamem.platform.groups import Groups
from megamem.platform.memory import LiveStorages
from megamem.platform.rng import generator
from megamem.train.draws import DrawnModel, DrawRows, Sample
from megamem.train.optim import wrap_for_training
from megamem.train.update import Update, backward, score, unit_values


@dataclass(frozen=True)
class Sizes:
    """The model, and the responses of one update (even ones are better than the mean, odd ones worse)."""

    responses: int = 2
    prompt: int = 32
    response: int = 32
    layers: int = 2
    hidden: int = 64
    ffn: int = 192
    heads: int = 4
    vocab: int = 512


@dataclass(frozen=True)
class Variant:
    """How one variant computes which objective."""

    objective: str
    retained: bool = False


VARIANTS = {
    "vrpo_ol_retained": Variant("vrpo_ol", retained=True),
    "vrpo_ol": Variant("vrpo_ol"),
    "bgpo_retained": Variant("bgpo", retained=True),
    "bgpo": Variant("bgpo"),
}


@dataclass(frozen=True)
class Result:
    """One variant at one number of draws: bytes at most alive, median seconds, largest relative gradient difference
    (Frobenius, over parameters) to the retained variant of its objective."""

    variant: str
    draws: int
    peak_bytes: int
    seconds: float
    max_rel_grad_diff: float


def parse_draws(text: str) -> list[int]:
    """`1,4,16` as numbers.

    Raises:
        UserError: anything but positive numbers.
    """
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--draws = {text!r}; allowed: numbers of at least 1 with commas between, e.g. 1,4,16,64")
    return [int(part) for part in parts]


class _Bench:
    """One model and, for every number of draws, what an update learns from."""

    def __init__(self, sizes: Sizes, draws: Sequence[int], groups: Groups):
        arch = Architecture(
            layers=sizes.layers, hidden=sizes.hidden, ffn=sizes.ffn, heads=sizes.heads, kv_heads=sizes.heads,
            head_dim=sizes.hidden // sizes.heads, vocab_rows=sizes.vocab, max_positions=sizes.prompt + sizes.response,
            mask_id=0, eos_id=1, pad_id=1,
        )  # fmt: skip
        model = build_model(arch, groups, torch.float32)
        maps = tensor_maps(arch)
        load_weights(model, maps, arch, RandomSource(maps, arch, 0), groups)
        self.parameters = stage_parameters(model)
        self.runner = Runner(wrap_for_training(model, ParallelConfig()), groups, "full")
        self._device = groups.device
        samples = {n: [_sample(sizes, n, i) for i in range(sizes.responses)] for n in draws}
        shape, device = self.runner.row_shape(1), groups.device.torch  # one draw a row
        self._samples = samples
        drawn = DrawnModel("full", shifted=False, mask_id=arch.mask_id, share_prefix="none")
        self._rows = {n: DrawRows(samples[n], drawn, shape, device) for n in draws}
        elbo = FACTORIES["bgpo"](RatioLimits())  # of both objectives
        self._old = {n: score(self.runner, self._rows[n], elbo) for n in draws}
        with torch.no_grad():  # off-policy: the model has moved since
            for parameter in self.parameters.values():
                parameter.mul_(1.02)

    def _update(self, objective: Objective, draws: int) -> Update:
        """What the trainer's update reads."""
        samples, device = self._samples[draws], self._device.torch
        tokens_B = torch.tensor([s.scored_tokens for s in samples], device=device)
        group_B = torch.zeros_like(tokens_B)
        weight_B = sample_weights("sequence", tokens_B, group_B, draws, objective.level, lambda x: x)
        return Update(samples, weight_B, self._rows[draws], self._old[draws])

    def run(self, variant: str, draws: int) -> None:
        """One update; its gradient is added to the buffers."""
        chosen = VARIANTS[variant]
        objective = FACTORIES[chosen.objective](RatioLimits())
        update = self._update(objective, draws)
        if chosen.retained:
            self._retained(update, objective, draws)
        else:
            backward(self.runner, update, objective, length_norm=False)

    def _retained(self, update: Update, objective: Objective, draws: int) -> None:
        """The reference: all draws forward, J as written, one backward."""
        news = []
        for row in update.rows:
            logp_T = self.runner.model(row.ids_S[None], row.params, row.position_T, row.head)
            news.append(unit_values(row, logp_T, objective))
        d_BD = (torch.cat(news) - torch.cat(update.old)).double().view(len(update.samples), draws)
        advantage_B = torch.tensor([s.advantage for s in update.samples]).to(d_BD)
        if objective.level == "draw":
            value_B = objective.surrogate(d_BD, advantage_B[:, None].expand_as(d_BD)).sum(1)
        else:
            value_B = objective.surrogate(d_BD, advantage_B)
        (-(update.weight_B * value_B).sum()).backward()
        self.runner.model.finish_grad_sync()

    def measure(self, run: Callable[[], None]) -> tuple[int, dict[str, Tensor]]:
        """Peak bytes, and the gradient."""
        self.runner.model.zero_grad_buffer()
        with LiveStorages() as memory:
            run()
        return memory.peak, {name: p.main_grad.clone() for name, p in self.parameters.items()}

    def time(self, run: Callable[[], None]) -> float:
        """Seconds."""
        self.runner.model.zero_grad_buffer()
        self._device.synchronize()
        started = time.perf_counter()
        run()
        self._device.synchronize()
        return time.perf_counter() - started


def bench_bgpo(
    sizes: Sizes, draws: Sequence[int], groups: Groups, repeats: int, progress: Callable[[str], None]
) -> list[Result]:
    """Measure every variant at every number of draws: memory and gradients first, then `repeats` rounds of times."""
    bench = _Bench(sizes, draws, groups)
    cases = [(variant, n) for n in draws for variant in VARIANTS]
    run = {case: functools.partial(bench.run, *case) for case in cases}
    bench.time(run[cases[0]])  # what a process makes once (random states, caches) is no update's
    peaks, gradients, differences = {}, {}, {}
    for variant, n in cases:  # a reference comes before what is compared with it
        peaks[variant, n], gradients[variant] = bench.measure(run[variant, n])
        reference = gradients[VARIANTS[variant].objective + "_retained"]
        differences[variant, n] = largest_difference(gradients[variant], reference)
        progress(f"memory: {variant} with {n} draws: {peaks[variant, n] / 2**20:.2f} MiB")
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for turn in range(repeats):
        for case in cases:
            seconds[case].append(bench.time(run[case]))
        progress(f"seconds: round {turn + 1} of {repeats}")
    return [
        Result(variant, n, peaks[variant, n], statistics.median(seconds[variant, n]), differences[variant, n])
        for variant, n in cases
    ]


def _sample(sizes: Sizes, draws: int, index: int) -> Sample:
    """A response of random tokens whose first draw masks all of it."""
    key = generator(0, "bench bgpo", index)
    prompt_P, response_L = (torch.randint(2, sizes.vocab, (n,), generator=key) for n in (sizes.prompt, sizes.response))
    plan = draw_noise("stratified", sizes.response, draws, key)
    masked_DL, weight_D = plan.masked_DL.clone(), plan.weight_D.clone()
    masked_DL[0], weight_D[0] = True, 1.0
    plan = dataclasses.replace(plan, masked_DL=masked_DL, weight_D=weight_D)
    return Sample(prompt_P, response_L, plan, advantage=1.0 - 2.0 * (index % 2), group=0)


def table(results: Sequence[Result]) -> str:
    """Results for a person; growth is the peak over that of the variant's first number of draws."""
    first: dict[str, int] = {}
    lines = [f"{'variant':20}{'draws':>6}{'peak MiB':>10}{'growth':>8}{'seconds':>9}{'grad diff':>11}"]
    for r in sorted(results, key=lambda r: list(VARIANTS).index(r.variant)):
        base = first.setdefault(r.variant, r.peak_bytes)
        lines.append(
            f"{r.variant:20}{r.draws:6}{r.peak_bytes / 2**20:10.2f}{r.peak_bytes / base:8.3f}{r.seconds:9.3f}"
            f"{r.max_rel_grad_diff:11.1e}"
        )
    return "\n".join(lines)


def as_json(results: Sequence[Result], sizes: Sizes) -> dict:
    """One object: what was measured, and `rows`."""
    return {"sizes": asdict(sizes), "rows": [asdict(r) for r in results]}
