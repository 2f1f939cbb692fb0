"""Autoregressive sampling for causal models: one token of every sequence per forward, over a key/value cache.

A response depends on (seed, step, problem, sample) and the weights alone: noise is keyed by these and by position and
vocabulary id.

Shapes: N sequences still running.
"""

from collections.abc import Sequence

import torch

from megamem.layout.packing import DrawRules, draws
from megamem.models.gpt import SampleHead
from megamem.models.row import Row
from megamem.models.runner import Runner
from megamem.rollout.cache import Cache, batches
from megamem.rollout.rollout import Request, Rollout
from megamem.rollout.sampler import Canvas, Decoding, share_samples


def sample(runner: Runner, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
    """One response per request, equal on all ranks of a model replica (a collective call among them).

    Every response has `gen_length` tokens. Where `stop_at_eos` ends one early, the rest is EOS. Sequences are decoded
    together as far as their keys and values fit into `row_tokens` slots. `block_length`, `steps` and `remasking` are
    not read: a causal model has no such choice.
    """
    assert all(r.prompt for r in requests), "the first token is predicted from a prompt's last (Prepared.prompt_ids)"
    how = draws(runner.attention, shifted=True, share="row")
    canvases: list[Canvas] = []
    for batch in batches(requests, how, decoding.gen_length, decoding.row_tokens):
        fill = [decoding.eos_id] * decoding.gen_length
        canvases += [Canvas(r, torch.tensor([*r.prompt, *fill])) for r in batch]
        _decode(canvases[-len(batch) :], how, runner, decoding)
    return [canvas.rollout() for canvas in canvases]


def _decode(canvases: Sequence[Canvas], how: DrawRules, runner: Runner, decoding: Decoding) -> None:
    device = runner.groups.device.torch
    cache = Cache(canvases, how, runner.row_shape(decoding.row_tokens).multiple)
    key_of = {canvas: canvas.key(decoding) for canvas in canvases}
    active = cache.sequences
    for turn in range(decoding.gen_length):
        if not active:
            break
        place_N = torch.tensor([s.canvas.prompt_length + turn for s in active])
        new = cache.row(active, place_N.tolist(), device)
        key_N = place_N + torch.tensor([key_of[s.canvas] for s in active])
        head = SampleHead(key_N.to(device), decoding.temperature, decoding.forbidden)
        last_N = place_N - 1 + torch.tensor(new.offsets)  # the token before predicts
        outputs = runner.forward([Row(new.ids_S, new.params, last_N.to(device), head)])
        token_N = share_samples(outputs, len(active), runner.groups).token_P.tolist()
        for s, place, token in zip(active, place_N.tolist(), token_N, strict=True):
            s.canvas.ids[place] = token
            s.done = place
        if decoding.stop_at_eos:
            active = [s for s, token in zip(active, token_N, strict=True) if token != decoding.eos_id]
