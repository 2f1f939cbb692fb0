"""Block denoising over a key/value cache, for models whose prompt does not see the response.

Block-causal models, as SDAR decodes: blocks have the model's own length and are aligned to position 0, so the prompt's
last, partial block is denoised together with the first new tokens. The last one ends with the response (SDAR fills it
up with tokens that it then drops). A block's keys and values are final once it is clean: they are written by the first
forward of the block after it, where SDAR spends one more.

Prefix-LM: blocks begin with the response. Its tokens see masked ones behind them, so the whole response goes forward at
every step and only the prompt is cached; `sampler.sample` without a cache gives the same tokens.

Shapes: P candidate positions of a call (masked positions of the current block of all its sequences).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamem.layout.packing import draws
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

    Every response has `gen_length` tokens. `block_length` is the model's, if it has one. A block takes `steps` divided
    by the number of blocks in `gen_length`, or fewer if it is clean sooner. `stop_at_eos` ends a block-causal response
    after the first block that holds EOS (as SDAR does), any other after one that ends in it; the rest is EOS. Sequences
    are decoded together as far as their keys and values fit into `row_tokens` slots.
    """
    name, _, length = runner.attention.partition(":")
    assert not length or int(length) == decoding.block_length, (runner.attention, decoding.block_length)
    how = draws(runner.attention, runner.model.shifted_logits, share="row")
    denoising = _Denoising(runner, decoding, whole_response=name == "prefix_lm")
    canvases: list[Canvas] = []
    for batch in batches(requests, how, decoding.gen_length, decoding.row_tokens):
        masks = [decoding.mask_id] * decoding.gen_length
        canvases += [Canvas(r, torch.tensor([*r.prompt, *masks])) for r in batch]
        multiple = runner.row_shape(decoding.row_tokens).multiple
        denoising.run(Cache(canvases[-len(batch) :], how, multiple))
    return [canvas.rollout() for canvas in canvases]


@dataclass(frozen=True)
class _Denoising:
    """`whole_response`: tokens see those behind their block, so all of the response goes forward at every step."""

    runner: Runner
    decoding: Decoding
    whole_response: bool

    def run(self, cache: Cache) -> None:
        """Fill the canvases of a cache."""
        d = self.decoding
        counts = transfer_counts(d.block_length, d.steps * d.block_length // d.gen_length)
        active, block = cache.sequences, 0
        while active:
            for turn, count in enumerate(counts):
                unfinished = [s for s in active if (s.canvas.ids[slice(*self.span(s, block))] == d.mask_id).any()]
                if unfinished:
                    self.step(unfinished, block, turn, count, cache)
            active = [s for s in active if not self.ended(s, block)]
            block += 1

    def span(self, sequence: CachedSequence, block: int) -> tuple[int, int]:
        """Positions of a block; block 0 is the first that is not all prompt."""
        first = sequence.canvas.prompt_length if self.whole_response else sequence.own.position
        begin = first + block * self.decoding.block_length
        return begin, min(begin + self.decoding.block_length, len(sequence.canvas.ids))

    def ended(self, sequence: CachedSequence, block: int) -> bool:
        """Whether the response is complete with this block, or ends in it; then the rest becomes EOS."""
        canvas, (begin, end) = sequence.canvas, self.span(sequence, block)
        begin = end - 1 if self.whole_response else max(begin, canvas.prompt_length)
        if self.decoding.stop_at_eos and (canvas.ids[begin:end] == self.decoding.eos_id).any():
            canvas.ids[end:] = self.decoding.eos_id
            return True
        return end == len(canvas.ids)

    def step(self, sequences: Sequence[CachedSequence], block: int, turn: int, count: int, cache: Cache) -> None:
        """Propose a token at every masked position of each sequence's block; keep the best `count` of each."""
        d, groups, model = self.decoding, self.runner.groups, self.runner.model
        spans = [self.span(s, block) for s in sequences]
        stops = [
            len(s.canvas.ids) if self.whole_response else end for s, (_, end) in zip(sequences, spans, strict=True)
        ]
        new = cache.row(sequences, stops, groups.device.torch)
        parts = [
            masked_positions(s.canvas, i, span, offset, s.canvas.key(d, block, turn), d.mask_id)
            for i, (s, span, offset) in enumerate(zip(sequences, spans, new.offsets, strict=True))
        ]
        masked = Masked.join(parts)
        hidden_P = masked.position_P - int(model.shifted_logits)
        head = SampleHead(masked.key_P.to(new.ids_S.device), d.temperature, d.forbidden)
        outputs = self.runner.forward([Row(new.ids_S, new.params, hidden_P.to(new.ids_S.device), head)])
        samples = share_samples(outputs, len(masked.key_P), groups)
        on_cpu = Samples(*(getattr(samples, field.name).cpu() for field in dataclasses.fields(Samples)))
        keep_best([s.canvas for s in sequences], masked, on_cpu, count, d)
        if not self.whole_response:
            for s, (begin, _) in zip(sequences, spans, strict=True):
                s.done = begin  # the clean block before this one was in the row
