"""Keys and values of sequences that are decoded together, so that a token goes forward once it is known, and once only.

A prompt that several sequences share is stored and computed once, as far as sharing is exact (`layout.packing.draws`):
the rest of it belongs to each sequence, with its response. In the slots of the cache they lie as

    own tokens of sequence 1 | … of sequence N | shared prompt a | shared prompt b | … | fillers

Sequences are equally spaced, so attention of one new token of each over its own past is one batched kernel call; a
shared prompt meets the new tokens of all its sequences in another.

Plain integers but for the row that goes forward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamem.layout.layout import FULL, Layout, Relation, Segment
from megamem.layout.packing import DrawRules
from megamem.models.row import CacheAccess, KeyValueStore, RowParams
from megamem.ops.attention_plan import LooseEdge, plan_edges
from megamem.rollout.rollout import Request
from megamem.rollout.sampler import Canvas


@dataclass(eq=False)
class CachedSequence:
    """A sequence and where its keys and values lie.

    Attributes:
        canvas: its tokens; `ids` on the CPU.
        prefix: the prompt tokens it shares; `start` is a slot. None: it shares none.
        own: the others, from position `own.position` on.
        done: leading tokens whose keys and values are stored for good; those of later ones are written again.
    """

    canvas: Canvas
    prefix: Segment | None
    own: Segment
    done: int


@dataclass(frozen=True, eq=False)
class NewTokens:
    """A row to run: token ids `[S]`, how they attend, and of every sequence in it the row index minus the position."""

    ids_S: Tensor
    params: RowParams
    offsets: list[int]


def batches(requests: Sequence[Request], how: DrawRules, gen_length: int, slots: int) -> Iterator[list[Request]]:
    """Successive requests that fit into so many slots (at least one)."""
    batch: list[Request] = []
    prompts: set[tuple[int, ...]] = set()
    width = shared = 0
    for request in requests:
        prefix = request.prompt[: how.prefix(len(request.prompt))]
        wider = max(width, len(request.prompt) - len(prefix) + gen_length)
        more = shared if prefix in prompts else shared + len(prefix)
        if batch and (len(batch) + 1) * wider + more > slots:
            yield batch
            batch, prompts = [], set()
            wider, more = len(request.prompt) - len(prefix) + gen_length, len(prefix)
        batch.append(request)
        prompts.add(prefix)
        width, shared = wider, more
    if batch:
        yield batch


class Cache:
    """Some sequences with the store of their keys and values.

    Attributes:
        sequences: one for each canvas. The caller says by their `done` what need not be computed again.
    """

    def __init__(self, canvases: Sequence[Canvas], how: DrawRules, multiple: int):
        """Args:
        canvases: with `ids` on the CPU, as long as they will ever be.
        how: what is shared, and who sees whom.
        multiple: the number of new tokens of a row must be a multiple of this.
        """
        self._how, self._multiple = how, multiple
        shared = [how.prefix(canvas.prompt_length) for canvas in canvases]
        width = max(len(canvas.ids) - n for canvas, n in zip(canvases, shared, strict=True))
        end = len(canvases) * width
        prefixes: dict[tuple[int, ...], Segment] = {}
        self.sequences: list[CachedSequence] = []
        for i, (canvas, n) in enumerate(zip(canvases, shared, strict=True)):
            ids = canvas.request.prompt[:n]
            if n and ids not in prefixes:
                prefixes[ids] = Segment(end, n)
                end += n
            own = Segment(i * width, len(canvas.ids) - n, n)
            self.sequences.append(CachedSequence(canvas, prefixes.get(ids), own, n))
        self._unwritten = [(torch.tensor(ids), prefix) for ids, prefix in prefixes.items()]
        self._fillers = end
        self._store = KeyValueStore(end + multiple - 1)

    def row(self, sequences: Sequence[CachedSequence], stops: Sequence[int], device: torch.device) -> NewTokens:
        """The tokens of each sequence from `done` to its stop, which lie behind each other in the row.

        The first row also holds the shared prompts, before all others; so it must hold all sequences.
        """
        row = _Row(self._multiple)
        for ids, prefix in self._unwritten:
            row.add(ids, prefix, None, 0, self._how.relation)
        self._unwritten = []
        offsets = []
        for sequence, stop in zip(sequences, stops, strict=True):
            ids = sequence.canvas.ids[sequence.done : stop]
            offsets.append(row.length - sequence.done)
            row.add(ids, sequence.own, sequence.prefix, sequence.done, self._how.relation)
        row.fill(self._fillers)
        plan = plan_edges(row.edges, row.length, self._store.slots)
        access = CacheAccess(self._store, torch.tensor(row.slots, device=device), plan)
        params = RowParams(layout=Layout(tuple(row.queries), ()), cache=access)
        return NewTokens(torch.cat(row.ids).to(device), params, offsets)


class _Row:
    """A row of new tokens as it grows."""

    def __init__(self, multiple: int):
        self._multiple = multiple
        self.length = 0
        self.ids: list[Tensor] = []
        self.queries: list[Segment] = []
        self.slots: list[int] = []
        self.edges: list[LooseEdge] = []

    def add(self, ids: Tensor, own: Segment, prefix: Segment | None, first: int, relation: Relation) -> None:
        """New tokens at positions from `first` on. They see the prefix and, of `own`, what is there including them."""
        query = Segment(self.length, len(ids), first)
        slot = own.start + first - own.position
        written = Segment(own.start, first + len(ids) - own.position, own.position)
        self.ids.append(ids)
        self.queries.append(query)
        self.slots += range(slot, slot + len(ids))
        self.edges.append((query, written, relation))
        if prefix is not None:
            self.edges.append((query, prefix, relation))
        self.length += len(ids)

    def fill(self, slot: int) -> None:
        """Make up the required multiple by tokens that see themselves."""
        count = -self.length % self._multiple
        if count:
            self.add(torch.zeros(count, dtype=torch.int64), Segment(slot, count), None, 0, FULL)
