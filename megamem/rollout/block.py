"""Block denoising for block-causal models, as SDAR decodes, with the keys and values of clean blocks cached.

Blocks have the model's own length and are aligned to position 0, so the prompt's last, partial block is denoised
together with the first new tokens. The last one ends with the response (SDAR fills it up with tokens that it then
drops). A block's keys and values are final once it is clean: they are written by the first forward of the block
after it, where SDAR spends one more.

Shapes: P candidate positions of a call (masked positions of the current block of all its sequences).
"""

import dataclasses
from collections.abc import Sequence

import torch

from megamem.layout.packing import Draws, draws
from megamem.models.gpt import SampleHead
from megamem.models.row import Row
from megamem.models.runner import Runner
from megamem.ops.vocab import Samples
from megamem.rollout.cache import Cache, CachedSequence, batches
from megamem.rollout.remask import transfer_counts
from megamem.rollout.rollout import Request, Rollout
from megamem.rollout.sampler import Canvas, Decoding, Masked, keep_best, masked_positions, share_samples


def sample(runner: Runner, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
    """One response per request, equal on all ranks of a model replica (a collective call among them).

    Every response has `gen_length` tokens. `block_length` is the model's. A block takes `steps` divided by the number
    of blocks in `gen_length`, or fewer if it is clean sooner. `stop_at_eos` ends a response after the first block that
    holds EOS (as SDAR does); the rest is EOS. Sequences are decoded together as far as their keys and values fit into
    `row_tokens` slots.
    """
    assert runner.attention == f"block:{decoding.block_length}", (runner.attention, decoding.block_length)
    how = draws(runner.attention, shifted=False, share=True)
    canvases: list[Canvas] = []
    for batch in batches(requests, how, decoding.gen_length, decoding.row_tokens):
        masks = [decoding.mask_id] * decoding.gen_length
        canvases += [Canvas(r, torch.tensor([*r.prompt, *masks])) for r in batch]
        _decode(canvases[-len(batch) :], how, runner, decoding)
    return [canvas.rollout() for canvas in canvases]


def _decode(canvases: Sequence[Canvas], how: Draws, runner: Runner, decoding: Decoding) -> None:
    cache = Cache(canvases, how, runner.row_shape(decoding.row_tokens).multiple)
    steps = decoding.steps * decoding.block_length // decoding.gen_length
    counts = transfer_counts(decoding.block_length, steps)
    active, block = cache.sequences, 0
    while active:
        for turn, count in enumerate(counts):
            unfinished = [
                s for s in active if (s.canvas.ids[slice(*_span(s, block, decoding))] == decoding.mask_id).any()
            ]
            if unfinished:
                _denoise(unfinished, block, turn, count, cache, runner, decoding)
        active = [s for s in active if not _ended(s, block, decoding)]
        block += 1


def _span(sequence: CachedSequence, block: int, decoding: Decoding) -> tuple[int, int]:
    """Positions of a block; block 0 is the first that is not all prompt."""
    begin = sequence.own.position + block * decoding.block_length
    return begin, min(begin + decoding.block_length, len(sequence.canvas.ids))


def _ended(sequence: CachedSequence, block: int, decoding: Decoding) -> bool:
    """Whether the response is complete with this block, or ends in it; then the rest becomes EOS."""
    canvas, (begin, end) = sequence.canvas, _span(sequence, block, decoding)
    if decoding.stop_at_eos and (canvas.ids[max(begin, canvas.prompt_length) : end] == decoding.eos_id).any():
        canvas.ids[end:] = decoding.eos_id
        return True
    return end == len(canvas.ids)


def _denoise(
    sequences: Sequence[CachedSequence],
    block: int,
    turn: int,
    count: int,
    cache: Cache,
    runner: Runner,
    decoding: Decoding,
) -> None:
    """Propose a token at every masked position of each sequence's block; keep the best `count` of each."""
    device = runner.groups.device.torch
    spans = [_span(s, block, decoding) for s in sequences]
    new = cache.row(sequences, [end for _, end in spans], device)
    parts = [
        masked_positions(s.canvas, i, span, offset, s.canvas.key(decoding, block, turn), decoding.mask_id)
        for i, (s, span, offset) in enumerate(zip(sequences, spans, new.offsets, strict=True))
    ]
    masked = Masked.join(parts)
    head = SampleHead(masked.key_P.to(device), decoding.temperature, decoding.forbidden)
    outputs = runner.forward([Row(new.ids_S, new.params, masked.position_P.to(device), head)])
    samples = share_samples(outputs, len(masked.key_P), runner.groups)
    on_cpu = Samples(*(getattr(samples, field.name).cpu() for field in dataclasses.fields(Samples)))
    keep_best([s.canvas for s in sequences], masked, on_cpu, count, decoding)
    for s, (begin, _) in zip(sequences, spans, strict=True):
        s.done = begin  # the clean block before this one was in the row
