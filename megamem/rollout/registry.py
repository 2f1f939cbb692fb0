"""Samplers by how a model attends."""

from collections.abc import Callable, Sequence

from megamem.models.runner import Runner
from megamem.rollout import autoregressive, block, sampler
from megamem.rollout.rollout import Request, Rollout
from megamem.rollout.sampler import Decoding

Sampler = Callable[[Runner, Sequence[Request], Decoding], list[Rollout]]

# By the names of `layout.packing.SEQUENCE_LAYOUTS`.
SAMPLERS: dict[str, Sampler] = {
    "full": sampler.sample,
    "prefix_lm": block.sample,
    "causal": autoregressive.sample,
    "block": block.sample,
}


def sample(runner: Runner, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
    """One response of `gen_length` tokens per request, from the sampler that suits the model; a collective call among
    the ranks of a model replica."""
    return SAMPLERS[runner.attention.partition(":")[0]](runner, requests, decoding)
