"""Vocabulary-parallel log-probs and sampling against the full vocabulary, and the keyed uniforms behind sampling.

Shards are simulated in one process. Shapes: T and P positions, H hidden, V vocabulary rows of a shard, R shards.
"""

import math
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megamem.ops import vocab
from megamem.ops.vocab import VocabShard, naive_selected_logprob, sample_tokens, selected_logprob
from megamem.platform.rng import derive_seed, generator, uniform_hash
from tests.helpers import ALONE, value_and_gradients
from tests.tol import assert_algebra, assert_exact, assert_floor

torch.set_num_threads(1)

VALID, PADDED, HIDDEN = 131, 256, 5
TARGET_T = torch.tensor([0, VALID - 1, 64, 63, 7, 7, 100])


def head(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states `[T, H]` and output rows with large numbers in the padding."""
    hidden_TH = torch.randn(len(TARGET_T), HIDDEN, generator=generator(0, "h"), dtype=torch.float64)
    weight_VH = torch.randn(PADDED, HIDDEN, generator=generator(0, "w"), dtype=torch.float64)
    weight_VH[VALID:] = 50.0
    return hidden_TH.to(dtype), weight_VH.to(dtype)


def naive(hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    return naive_selected_logprob(F.linear(hidden_TH, weight_VH)[:, :VALID], TARGET_T)


def ours(hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    return selected_logprob(hidden_TH, weight_VH, TARGET_T, VocabShard(0, PADDED, VALID, ALONE))


def test_naive_is_the_definition():
    hidden_TH, weight_VH = head()
    p_TV = F.linear(hidden_TH, weight_VH[:VALID]).exp()
    p_TV /= p_TV.sum(-1, keepdim=True)
    expected = torch.stack([p_TV[t, target].log() for t, target in enumerate(TARGET_T)])
    assert_algebra(naive(hidden_TH, weight_VH), expected)


def test_selected_logprob():
    result, expected = (value_and_gradients(f, *head()) for f in (ours, naive))
    for what, a, b in zip(("logp", "dhidden", "dweight"), result, expected, strict=True):
        assert_algebra(a, b, what)
    assert not result[2][VALID:].any(), "padded rows get no gradient"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_selected_logprob_low_precision(dtype):
    low = head(dtype)
    truth = value_and_gradients(naive, *(x.double() for x in low))
    result, trusted = (value_and_gradients(f, *low) for f in (ours, naive))
    assert result[0].dtype == torch.float32, "log-probs are at least fp32"
    for what, a, b, c in zip(("logp", "dhidden", "dweight"), result, trusted, truth, strict=True):
        assert_floor(a, b, c, what)


def test_huge_logits_stay_finite():
    hidden_TH, weight_VH = head()
    result = value_and_gradients(ours, hidden_TH * 1e4, weight_VH)
    expected = value_and_gradients(naive, hidden_TH * 1e4, weight_VH)
    assert all(torch.isfinite(x).all() for x in result)
    for what, a, b in zip(("logp", "dhidden", "dweight"), result, expected, strict=True):
        assert_algebra(a, b, what)


def test_no_positions():
    hidden_TH, weight_VH = head()
    shard = VocabShard(0, PADDED, VALID, ALONE)
    assert selected_logprob(hidden_TH[:0], weight_VH, TARGET_T[:0], shard).shape == (0,)
    assert sample_tokens(hidden_TH[:0] @ weight_VH.T, TARGET_T[:0], 1.0, shard).token_P.shape == (0,)


class _Meeting:
    """An all-reduce among threads."""

    def __init__(self, ranks: int):
        self.parts: list[torch.Tensor | None] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=30)

    def reduce(self, rank: int, x: torch.Tensor, op: dist.ReduceOp) -> torch.Tensor:
        self.parts[rank] = x
        self.barrier.wait()
        parts = torch.stack(self.parts)
        self.barrier.wait()
        return parts.max(0).values if op == dist.ReduceOp.MAX else parts.sum(0)


@dataclass(frozen=True)
class ThreadShard(VocabShard):
    """A shard whose all-reduce meets the other threads."""

    meeting: _Meeting = None
    rank: int = 0

    def all_reduce(self, x, op=dist.ReduceOp.SUM):
        return self.meeting.reduce(self.rank, x, op)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_logprob(ranks):
    """With 4 shards the last holds padding only. Hidden gradients of the shards add up; weight gradients line up."""
    hidden_TH, weight_VH = head()
    rows, meeting, results = PADDED // ranks, _Meeting(ranks), [None] * ranks

    def run(rank: int) -> None:
        shard = ThreadShard(rank * rows, rows, VALID, ALONE, meeting, rank)
        own_VH = weight_VH[rank * rows : (rank + 1) * rows]
        results[rank] = value_and_gradients(lambda h, w: selected_logprob(h, w, TARGET_T, shard), hidden_TH, own_VH)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logp, dhidden, dweight = zip(*results, strict=True)
    expected = value_and_gradients(naive, hidden_TH, weight_VH)
    for rank in range(ranks):
        assert_exact(logp[rank], logp[0], "equal on every rank")
    assert_algebra(logp[0], expected[0], "logp")
    assert_algebra(sum(dhidden), expected[1], "dhidden")
    assert_algebra(torch.cat(dweight), expected[2], "dweight")


# --- sampling


def logits(positions: int = 9, rows: int = PADDED) -> torch.Tensor:
    return 3 * torch.randn(positions, rows, generator=generator(1, "logits"), dtype=torch.float64)


def keys(positions: int = 9) -> torch.Tensor:
    return torch.arange(positions) + derive_seed(0, "keys")


def assert_clean_statistics(samples: vocab.Samples, logits_PV: torch.Tensor) -> None:
    """Probability, entropy and margin by their formulas on the real vocabulary."""
    p_PV = logits_PV.softmax(-1)
    top_P2 = p_PV.sort(-1, descending=True).values[:, :2]
    assert_algebra(samples.prob_P, p_PV.gather(-1, samples.token_P[:, None])[:, 0], "probability")
    assert_algebra(samples.entropy_P, -(p_PV * p_PV.log()).nan_to_num(0.0).sum(-1), "entropy")
    assert_algebra(samples.margin_P, top_P2[:, 0] - top_P2[:, 1], "margin")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_greedy(dtype):
    logits_PV = logits().to(dtype)
    logits_PV[:, VALID:] = 100.0  # padding must not win
    given = logits_PV.clone()
    samples = sample_tokens(logits_PV, keys(), 0.0, VocabShard(0, PADDED, VALID, ALONE))
    assert_exact(logits_PV, given, "the caller's logits are left alone")
    clean_PV = logits_PV[:, :VALID].double()
    assert torch.equal(samples.token_P, clean_PV.argmax(-1)) and samples.token_P.dtype == torch.int64
    assert_clean_statistics(samples, clean_PV)


def test_statistics_are_of_the_clean_softmax():
    """Neither temperature nor forbidden tokens change them, only which token they are about."""
    logits_PV = logits()
    best = logits_PV[:, :VALID].argmax(-1)
    forbidden = tuple(best[:3].tolist())
    samples = sample_tokens(logits_PV, keys(), 2.0, VocabShard(0, PADDED, VALID, ALONE), forbidden)
    assert not torch.isin(samples.token_P, torch.tensor(forbidden)).any()
    assert_clean_statistics(samples, logits_PV[:, :VALID])


def test_statistics_of_certain_and_of_uniform_logits():
    certain, uniform = torch.zeros(1, 8, dtype=torch.float64), torch.zeros(1, 8, dtype=torch.float64)
    certain[0, 3] = 2000.0
    for logits_PV, entropy, margin in ((certain, 0.0, 1.0), (uniform, math.log(7), 0.0)):
        samples = sample_tokens(logits_PV, keys(1), 0.0, VocabShard(0, 8, 7, ALONE))
        assert samples.entropy_P.item() == pytest.approx(entropy, rel=1e-12, abs=0)
        assert samples.margin_P.item() == pytest.approx(margin, rel=1e-12, abs=0)
    one = sample_tokens(uniform[:, :1], keys(1), 1.0, VocabShard(0, 1, 1, ALONE))
    assert (one.token_P.item(), one.prob_P.item(), one.entropy_P.item(), one.margin_P.item()) == (0, 1.0, 0.0, 1.0)


def test_forbidden_greedy_takes_the_next_best():
    logits_PV = logits()
    order = logits_PV[:, :VALID].argsort(-1, descending=True)
    samples = sample_tokens(logits_PV[:1], keys(1), 0.0, VocabShard(0, PADDED, VALID, ALONE), (int(order[0, 0]),))
    assert samples.token_P.item() == order[0, 1]


def test_ties_go_to_the_lower_id():
    logits_PV = torch.zeros(3, 8, dtype=torch.float64)
    logits_PV[1, [5, 2]] = 1.0
    logits_PV[2, [6, 7]] = 1.0  # 7 is padding
    samples = sample_tokens(logits_PV, keys(3), 0.0, VocabShard(0, 8, 7, ALONE))
    assert samples.token_P.tolist() == [0, 2, 6]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies(temperature):
    """Gumbel-max draws from softmax(logits / temperature): Pearson's statistic with 6 degrees of freedom. The bar is
    its 99.9 % quantile; the key is fixed, so this either holds or does not."""
    logits_V = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.9, -0.4, 0.5, 9.0], dtype=torch.float64)
    count, shard = 20_000, VocabShard(0, 8, 7, ALONE)
    samples = sample_tokens(logits_V.expand(count, -1), keys(count), temperature, shard)
    observed = samples.token_P.bincount(minlength=7).double()
    expected = count * (logits_V[:7] / temperature).softmax(-1)
    assert ((observed - expected).square() / expected).sum() < 22.46


def test_rows_do_not_depend_on_their_batch():
    logits_PV, shard = logits(), VocabShard(0, PADDED, VALID, ALONE)
    together = sample_tokens(logits_PV, keys(), 1.0, shard)
    for p in (0, 4, 8):
        alone = sample_tokens(logits_PV[p : p + 1], keys()[p : p + 1], 1.0, shard)
        assert alone.token_P.item() == together.token_P[p].item()
    assert len(set(sample_tokens(logits_PV[:1].expand(40, -1), keys(40), 2.0, shard).token_P.tolist())) > 5


def sharded_samples(monkeypatch, logits_PV, ranks, *args, **kwargs) -> vocab.Samples:
    """The statistics of every shard, gathered by hand, then combined."""
    rows, stats = logits_PV.size(1) // ranks, []

    def gather(stats_PK, shard):
        stats.append(stats_PK)
        return stats_PK[None]

    with monkeypatch.context() as patch:
        patch.setattr(vocab, "_gather", gather)
        for rank in range(ranks):
            shard = VocabShard(rank * rows, rows, VALID, ALONE)
            sample_tokens(logits_PV[:, rank * rows : (rank + 1) * rows], *args, shard, **kwargs)
    return vocab._combine_shards(torch.stack(stats))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("ranks", [2, 4, 256], ids=["2", "4_last_is_padding", "256_of_one_row"])
def test_shards_draw_what_one_rank_draws(monkeypatch, ranks, temperature):
    logits_PV, forbidden = logits(), (3, 90)
    whole = sample_tokens(logits_PV, keys(), temperature, VocabShard(0, PADDED, VALID, ALONE), forbidden)
    parts = sharded_samples(monkeypatch, logits_PV, ranks, keys(), temperature, forbidden=forbidden)
    assert_exact(parts.token_P, whole.token_P)
    assert_clean_statistics(parts, logits_PV[:, :VALID])


def test_ties_across_shards_go_to_the_lower_id(monkeypatch):
    logits_PV = torch.zeros(2, PADDED, dtype=torch.float64)
    logits_PV[1, [63, 64, 130]] = 1.0
    assert sharded_samples(monkeypatch, logits_PV, 4, keys(2), 0.0).token_P.tolist() == [0, 63]
    assert sharded_samples(monkeypatch, logits_PV, 4, keys(2), 0.0, forbidden=(63,)).token_P.tolist() == [0, 64]


# --- keyed randomness

_WORD = 2**64 - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix(x: int) -> int:
    """The published finaliser on Python integers."""
    x = (x ^ (x >> 30)) * _MIX_1 & _WORD
    x = (x ^ (x >> 27)) * _MIX_2 & _WORD
    return x ^ (x >> 31)


def splitmix_inverse(x: int) -> int:
    def unshift(x: int, bits: int) -> int:
        y = x
        for _ in range(3):
            y = x ^ (y >> bits)
        return y

    x = unshift(x, 31) * pow(_MIX_2, -1, 2**64) & _WORD
    x = unshift(x, 27) * pow(_MIX_1, -1, 2**64) & _WORD
    return unshift(x, 30)


def signed(x: int) -> int:
    return x - 2**64 if x >> 63 else x


def test_uniform_hash_is_splitmix():
    rows = [0, 1, -1, 2**63 - 1, -(2**63), derive_seed(3, "x")]
    columns = [0, 1, 126_463, -2, 2**40]
    got = uniform_hash(torch.tensor(rows), torch.tensor(columns))
    expected = [
        [((splitmix(splitmix(r & _WORD) + (c + 1) * _GOLDEN & _WORD) >> 11) + 0.5) * 2.0**-53 for c in columns]
        for r in rows
    ]
    assert_exact(got, torch.tensor(expected, dtype=torch.float64))


def test_uniform_hash_is_never_0_or_1():
    """Row keys that give the smallest and the largest 53 bits in column 0; their Gumbel noise is finite."""
    assert splitmix_inverse(splitmix(12345)) == 12345
    row = [signed(splitmix_inverse((splitmix_inverse(bits) - _GOLDEN) & _WORD)) for bits in (0, _WORD)]
    u = uniform_hash(torch.tensor(row), torch.zeros(1, dtype=torch.int64))[:, 0]
    assert 0 < u[0] < 1e-15 and 1 - 1e-15 < u[1] < 1
    assert torch.isfinite(torch.log(-torch.log(u))).all()


def test_uniform_hash_looks_uniform():
    """Mean, variance and correlation with the next row and column, each within 5 standard errors."""
    u = uniform_hash(torch.arange(300) + 7, torch.arange(400)) - 0.5
    n = u.numel()
    assert abs(u.mean()) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.square().mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    for neighbour in (u[1:] * u[:-1], u[:, 1:] * u[:, :-1]):
        assert abs(neighbour.mean()) < 5 / 12 / math.sqrt(neighbour.numel())
    assert u.unique().numel() == n


def test_uniform_hash_belongs_to_row_and_column():
    rows, columns = torch.tensor([5, 9, 2]), torch.arange(50)
    whole = uniform_hash(rows, columns)
    assert_exact(uniform_hash(rows.flip(0), columns[20:30]), whole.flip(0)[:, 20:30])


def test_derive_seed():
    # Written down: another value would silently change every run.
    assert derive_seed(0, "noise", 3, "puzzle-1") == 2601402235386007550
    assert derive_seed(0, "a/b") != derive_seed(0, "a", "b")
    assert all(0 <= derive_seed(seed, "x") < 2**63 for seed in range(50))
    parts = [(1, 23), (12, 3), (123,), (1, 2, 3), (1, "a"), ("a", 1), (1, "A")]
    assert len({derive_seed(0, *key) for key in parts} | {derive_seed(1, 1, 23)}) == len(parts) + 1


def test_generators_are_fresh_and_keyed():
    draws = [torch.rand(4, generator=generator(*key)) for key in ((0, "a"), (0, "a"), (0, "b"), (1, "a"))]
    assert_exact(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[3])
