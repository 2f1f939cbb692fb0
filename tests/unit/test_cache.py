"""Where cached sequences lie, and what their new tokens attend to."""

import random

import pytest
import torch

from megamem.layout.dense import dense_mask
from megamem.layout.layout import CAUSAL, Segment, block, rows
from megamem.layout.packing import draws
from megamem.models.row import KeyValueStore
from megamem.ops.attention_plan import plan_edges
from megamem.rollout.cache import Cache, batches
from megamem.rollout.rollout import Request
from megamem.rollout.sampler import Canvas

CPU = torch.device("cpu")
WAYS = {"causal": draws("causal", shifted=True, share=True), "block:4": draws("block:4", shifted=False, share=True)}
RELATIONS = {"causal": CAUSAL, "block:4": block(4)}


def requests(*groups):
    """Groups of (prompt, samples)."""
    return [Request(f"{i}", sample, prompt) for i, (prompt, count) in enumerate(groups) for sample in range(count)]


def make_cache(way, groups, gen_length, multiple=1):
    canvases = [Canvas(r, torch.tensor([*r.prompt, *range(100, 100 + gen_length)])) for r in requests(*groups)]
    return Cache(canvases, WAYS[way], multiple)


def seen_slots(plan):
    """How often every query sees every slot."""
    count_QK = torch.zeros(plan.queries, plan.keys, dtype=torch.int64)
    for call in plan.calls:
        for tile in call.tiles():
            ones = torch.ones(tile.q_len, tile.k_len, dtype=torch.int64)
            count_QK[tile.q : tile.q + tile.q_len, tile.k : tile.k + tile.k_len] += ones.tril() if tile.causal else ones
    return count_QK


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_new_tokens_see_what_a_whole_row_shows_them(way, multiple):
    """Random progress of random groups. Slots are read back as (sequence or prompt, position)."""
    for seed in range(30):
        rng = random.Random(seed)
        groups = [(tuple(rng.choices(range(9), k=rng.randint(1, 9))), rng.randint(1, 3)) for _ in range(3)]
        cache = make_cache(way, groups, 10, multiple)
        ids_of_slot, active, step = {}, cache.sequences, 4 if way == "block:4" else rng.randint(1, 3)
        stops = [min(s.own.position + 4, len(s.canvas.ids)) for s in active]
        while active:
            new = cache.row(active, stops, CPU)
            access, positions = new.params.cache, new.params.layout.positions()
            assert len(new.ids_S) == len(positions) == len(access.slot_S) and len(positions) % multiple == 0
            assert access.slot_S.unique().numel() == len(positions) and access.slot_S.max() < access.plan.keys
            ids_of_slot |= dict(
                zip(access.slot_S.tolist(), zip(positions, new.ids_S.tolist(), strict=True), strict=True)
            )
            count_QK = seen_slots(access.plan)
            assert count_QK.max() == 1
            for s, stop, offset in zip(active, stops, new.offsets, strict=True):
                mask_LL = dense_mask(rows([stop], RELATIONS[way]))
                for place in range(s.done, stop):
                    assert positions[offset + place] == place
                    seen = sorted(ids_of_slot[k] for k in count_QK[offset + place].nonzero()[:, 0].tolist())
                    ids = s.canvas.ids.tolist()
                    assert seen == [(i, ids[i]) for i in mask_LL[place].nonzero()[:, 0].tolist()]
                s.done = stop
            active = [s for s in active if s.done < len(s.canvas.ids) and rng.random() < 0.8]
            stops = [min(s.done + step, len(s.canvas.ids)) for s in active]


def test_a_step_of_equal_prompts_is_few_calls():
    """Own pasts of all sequences in one call, prompts of one length in another."""
    groups = [(tuple(range(i, i + 9)), 4) for i in range(3)]
    cache = make_cache("causal", groups, 10)
    for stop in (9, 10, 11):
        plan = cache.row(cache.sequences, [stop] * 12, CPU).params.cache.plan
        for s in cache.sequences:
            s.done = stop
    assert len(plan.calls) == 2 and plan.calls[0].count + plan.calls[1].count == 12 + 3


def test_shared_prompts_go_forward_once():
    cache = make_cache("causal", [((1, 2, 3), 2), ((4,), 2), ((1, 2, 3), 1)], 4)
    first = cache.row(cache.sequences, [3, 3, 1, 1, 3], CPU)
    assert first.ids_S.tolist() == [1, 2, 3, 3, 4, 4, 3]
    assert first.params.layout.positions() == [0, 1, 2, 2, 0, 0, 2]
    for s, stop in zip(cache.sequences, [3, 3, 1, 1, 3], strict=True):
        s.done = stop
    assert cache.row(cache.sequences[1:3], [4, 2], CPU).ids_S.tolist() == [100, 100]


def test_block_causal_prompts_are_shared_up_to_their_last_block():
    cache = make_cache("block:4", [((1, 2, 3, 4, 5), 2), ((6, 7), 1)], 4)
    new = cache.row(cache.sequences, [8, 8, 4], CPU)
    assert new.ids_S.tolist() == [1, 2, 3, 4, 5, 100, 101, 102, 5, 100, 101, 102, 6, 7, 100, 101]
    assert new.offsets == [0, 4, 12]


def test_batches_fill_the_slots():
    """Width of a batch: its longest own part. A prompt counts once."""
    how, wanted = WAYS["causal"], requests(((1,) * 5, 3), ((2,) * 9, 3))
    assert [len(b) for b in batches(wanted, how, 10, 1000)] == [6]
    assert [len(b) for b in batches(wanted, how, 10, 4 + 3 * 11)] == [3, 2, 1]  # 4 + 3 x 11 = 37; 8 + 2 x 11 = 30
    assert [len(b) for b in batches(wanted, how, 10, 1)] == [1] * 6
    assert [r for b in batches(wanted, how, 10, 60) for r in b] == wanted
    assert list(batches([], how, 10, 60)) == []
    for slots in range(20, 120):
        for batch in batches(wanted, how, 10, slots):
            canvases = [Canvas(r, torch.zeros(len(r.prompt) + 10, dtype=torch.int64)) for r in batch]
            used = Cache(canvases, how, 1)._store.slots
            assert used <= slots or len(batch) == 1


def test_store_keeps_what_was_written():
    store = KeyValueStore(6)
    k_SGD, v_SGD = torch.randn(2, 2, 1, 3)
    store.write(1, k_SGD, v_SGD, torch.tensor([4, 0]))
    buffers = store.write(1, v_SGD, k_SGD, torch.tensor([1, 2]))
    assert torch.equal(buffers[0][[4, 0, 1, 2]], torch.cat([k_SGD, v_SGD]))
    assert torch.equal(buffers[1][[4, 0, 1, 2]], torch.cat([v_SGD, k_SGD]))
    assert store.write(2, k_SGD.half(), v_SGD.half(), torch.tensor([0, 1]))[0].dtype == torch.float16


def test_blind_queries_are_refused():
    with pytest.raises(ValueError, match="token 1 of the row sees no token"):
        plan_edges([(Segment(0, 1, 0), Segment(0, 3, 0), CAUSAL)], 2, 3)
