"""Streamed layers and head against the plain model: outputs, every parameter's gradient, dX, hooks, memory.

Shapes: S packed tokens, H hidden, T scored tokens.
"""

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from megamem.config.architecture import Architecture
from megamem.config.schema import ParallelConfig
from megamem.convert.weights import stage_parameters
from megamem.layout.grid import ChunkGrid
from megamem.layout.layout import CAUSAL, Layout, block, prefix_lm, rows
from megamem.layout.trees import Branch, Tree, tree_layout
from megamem.models.build import build_model
from megamem.models.gpt import LogitsHead, LogProbHead
from megamem.models.row import Row, RowParams
from megamem.models.runner import Runner
from megamem.platform.memory import LiveStorages
from megamem.stream.layer import StreamOptions, query_blocks
from megamem.train.optim import wrap_for_training
from tests.helpers import fill_by_name
from tests.tol import assert_algebra, assert_exact, assert_floor, assert_floor_together
from tests.unit.test_attention import block_diffusion

torch.set_num_threads(1)

BIG = 1000


def architecture(**changes) -> Architecture:
    """Odd sizes: ffn 23, 61 vocabulary rows, two query heads per key/value head."""
    sizes = dict(layers=3, hidden=24, ffn=23, heads=4, kv_heads=2, head_dim=6, vocab_rows=61, max_positions=64)
    return Architecture(**(sizes | dict(mask_id=60, eos_id=1, pad_id=1) | changes))


ARCHITECTURES = {
    "gqa": architecture(),
    "mha": architecture(kv_heads=4),
    "mqa": architecture(kv_heads=1),
    "qk_norm": architecture(qk_norm=True),
    "qkv_bias": architecture(qkv_bias=True),
    "learned_positions": architecture(positions="learned"),
    "tied_head": architecture(tied_head=True),
    "everything": architecture(kv_heads=1, qk_norm=True, qkv_bias=True, tied_head=True, head_dim=10),
}
LAYOUTS = {
    "full": rows([29]),
    "packed": rows([7, 1, 13, 2]),
    "causal": rows([17, 1, 9], CAUSAL),
    "block": rows([19, 7], block(4)),
    "prefix_full": prefix_lm([(3, 8), (1, 1), (9, 5)]),
    "prefix_causal": prefix_lm([(3, 8), (1, 1), (9, 5)], CAUSAL),
    "block_diffusion": block_diffusion(5, 6, 4, 2),
    "tree": tree_layout([Tree(4, (Branch(6, 2), Branch(3, 1))), Tree(0, (Branch(2, 2),))], block(4)),
    "fillers": rows([11, 9], CAUSAL).filled(25),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_architecture = pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
OPTIONS = [
    StreamOptions(8, 3),
    StreamOptions(5, 1, "input+attention"),
    StreamOptions(7, BIG, "input", "cpu"),
    StreamOptions(8, 4, "input+attention", "cpu"),
]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=str)
# A chunk attends alone, two or more together, all chunks of a unit together.
each_queries = pytest.mark.parametrize("queries", [1, 9, BIG])


def build(groups, arch, stream=None, dtype=torch.float64):
    """Weights depend on names only; those of bf16 are the rounded ones of fp64."""
    model = build_model(arch, groups, dtype, stream=stream)
    fill_by_name(stage_parameters(model))
    return model


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- one layer


def layer_results(layer, layout: Layout, chunk: int | None, x_SBH: Tensor) -> dict[str, Tensor]:
    """y, dx and every parameter's gradient for a random cotangent; `chunk` None is megatron-core's own path."""
    row = RowParams(layout=layout, grid=None if chunk is None else ChunkGrid(layout.length, chunk))
    x_SBH = x_SBH.detach().requires_grad_()
    y_SBH = layer(x_SBH, attention_mask=None, packed_seq_params=row)[0]
    names, parameters = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(y_SBH, (x_SBH, *parameters), noise(*y_SBH.shape, seed=1).to(y_SBH))
    return {"y": y_SBH.detach(), **dict(zip(("dx", *names), grads, strict=True))}


def assert_layers_equal(layer, layout: Layout, chunks: list[int]) -> None:
    x_SBH = noise(layout.length, 1, layer.config.hidden_size).to(next(layer.parameters()))
    expected = layer_results(layer, layout, None, x_SBH)
    for chunk in chunks:
        found = layer_results(layer, layout, chunk, x_SBH)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value.abs().max() > 0, name
            assert_algebra(found[name], value, f"chunk {chunk}, {name}")


@each_layout
@each_queries
def test_layer_at_any_chunk_size(groups, layout, queries, monkeypatch):
    monkeypatch.setattr("megamem.stream.layer.QUERIES_AT_ONCE", queries)
    layer = build(groups, ARCHITECTURES["gqa"], OPTIONS[0]).decoder.layers[0]
    assert_layers_equal(layer, layout, [1, 3, 8, layout.length - 1, layout.length, layout.length + 5])


@each_layout
@each_option
@each_queries
def test_layer_with_every_option(groups, layout, options, queries, monkeypatch):
    monkeypatch.setattr("megamem.stream.layer.QUERIES_AT_ONCE", queries)
    layer = build(groups, ARCHITECTURES["everything"], options).decoder.layers[0]
    assert_layers_equal(layer, layout, [4])


@each_architecture
def test_layer_of_every_architecture(groups, arch):
    layer = build(groups, arch, OPTIONS[0]).decoder.layers[0]
    for layout in LAYOUTS.values():
        assert_layers_equal(layer, layout, [6])


@pytest.mark.parametrize(
    ("idle", "most", "blocks"),
    [
        ((), 1, [(2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]),
        ((), 2, [(2, 4), (4, 6), (6, 7)]),
        ((), 9, [(2, 7)]),
        ((4,), 9, [(2, 4), (5, 7)]),
        ((2, 3, 6), 2, [(4, 6)]),
        ((2, 3, 4, 5, 6), 2, []),
    ],
)
def test_blocks_of_chunks_that_attend_together(idle, most, blocks):
    assert query_blocks(range(2, 7), frozenset(idle), most) == [range(*block) for block in blocks]


def test_layer_input_needs_no_gradient(groups):
    """A first layer on frozen embeddings; frozen parameters inside it."""
    layer = build(groups, ARCHITECTURES["gqa"], OPTIONS[0]).decoder.layers[0]
    frozen = [layer.input_layernorm.weight, layer.mlp.linear_fc2.weight]
    for parameter in frozen:
        parameter.requires_grad_(False)
    left = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    x_SBH = noise(29, 1, 24).to(next(layer.parameters()))
    found = []
    for grid in (None, ChunkGrid(29, 8)):
        y_SBH = layer(x_SBH, attention_mask=None, packed_seq_params=RowParams(layout=LAYOUTS["full"], grid=grid))[0]
        found.append(torch.autograd.grad(y_SBH, tuple(left.values()), noise(29, 1, 24, seed=1).to(y_SBH)))
    for name, a, b in zip(left, *reversed(found), strict=True):
        assert_algebra(a, b, name)


# --- the whole model


SCORED = ("none", "one", "some", "all")


def scored(layout: Layout, how: str) -> Tensor:
    every = torch.arange(layout.length)
    return {"none": every[:0], "one": every[5:6], "some": every[1 : layout.length - 4 : 3], "all": every}[how]


def make_row(groups, layout: Layout, how: str = "some", seed: int = 0) -> Row:
    key, position_T = torch.Generator().manual_seed(seed), scored(layout, how)
    ids_S = torch.randint(0, 61, (layout.length,), generator=key)
    target_T = torch.randint(0, 61, (len(position_T),), generator=key)
    to = groups.device.torch
    return Row(ids_S.to(to), RowParams(layout=layout), position_T.to(to), LogProbHead(target_T.to(to)))


def cotangent(logp_T: Tensor) -> Tensor:
    return noise(len(logp_T), seed=2).to(logp_T)


def call(model, row: Row) -> Tensor:
    return model(row.ids_S[None], row.params, row.position_T, row.head)


def plain_gradients(model, several: list[Row]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs of every row and the gradients in `.grad`, by torch's autograd alone."""
    found = []
    for row in several:
        logp_T = call(model, row)
        (logp_T * cotangent(logp_T)).sum().backward()
        found.append(logp_T.detach())
    return found, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in stage_parameters(model).items()}


def buffer_gradients(model, groups, several: list[Row]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same with megatron-core's DistributedDataParallel and its `main_grad`."""
    runner = Runner(wrap_for_training(model, ParallelConfig()), groups, "full")
    runner.model.zero_grad_buffer()
    reports = runner.forward_backward(
        several, lambda row, logp_T: ((logp_T * cotangent(logp_T)).sum(), {"logp": logp_T.detach()})
    )
    return [r["logp"] for r in reports], {n: p.main_grad.clone() for n, p in stage_parameters(model).items()}


def assert_models_equal(groups, arch: Architecture, several: list[Row], buffers: bool, *options: StreamOptions) -> None:
    def run(stream):
        model = build(groups, arch, stream)
        return buffer_gradients(model, groups, several) if buffers else plain_gradients(model, several)

    expected_logps, expected = run(None)
    for stream in options:
        logps, grads = run(stream)
        assert grads.keys() == expected.keys()
        for i, (found, logp_T) in enumerate(zip(logps, expected_logps, strict=True)):
            if len(logp_T):
                assert_algebra(found, logp_T, f"{stream}: log-probs of row {i}")
        for name, value in expected.items():
            assert_algebra(grads[name], value, f"{stream}: {name}")


@each_layout
@pytest.mark.parametrize("buffers", [False, True], ids=["grad", "main_grad"])
def test_model_of_every_layout(groups, layout, buffers):
    assert_models_equal(groups, ARCHITECTURES["gqa"], [make_row(groups, layout)], buffers, OPTIONS[0])


@each_architecture
@pytest.mark.parametrize("buffers", [False, True], ids=["grad", "main_grad"])
def test_model_of_every_architecture(groups, arch, buffers):
    several = [make_row(groups, LAYOUTS[name], seed=i) for i, name in enumerate(["packed", "prefix_causal"])]
    assert_models_equal(groups, arch, several, buffers, OPTIONS[1])


@pytest.mark.parametrize("how", SCORED)
@pytest.mark.parametrize("name", ["gqa", "tied_head"])
@pytest.mark.parametrize("buffers", [False, True], ids=["grad", "main_grad"])
def test_head_tokens(groups, name, how, buffers):
    """With nothing scored the gradient is zero, not absent and not garbage."""
    several = [make_row(groups, LAYOUTS["prefix_causal"], how)]
    options = [StreamOptions(6, head_tokens) for head_tokens in (1, 3, BIG)]
    assert_models_equal(groups, ARCHITECTURES[name], several, buffers, *options)


@pytest.mark.parametrize("places", [[3, 1, 2], [1, 2, 2, 5]], ids=["unsorted", "twice"])
def test_scored_positions_must_ascend(groups, places):
    """The streamed head goes through the row once."""
    model, row = build(groups, ARCHITECTURES["gqa"], OPTIONS[0]), make_row(groups, LAYOUTS["full"])
    position_T = torch.tensor(places, device=row.ids_S.device)
    with pytest.raises(AssertionError):
        model(row.ids_S[None], row.params, position_T, LogProbHead(position_T))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("name", ["gqa", "tied_head"])
@pytest.mark.parametrize("buffers", [False, True], ids=["grad", "main_grad"])
def test_micro_batches_add_up(groups, name, order, buffers):
    """Rows of three lengths, one of them so short that it takes the plain path, in any order."""
    layouts = [rows([1, 1]), LAYOUTS["causal"], LAYOUTS["block"]]
    several = [make_row(groups, layouts[i], ("all", "some", "one")[i], seed=i) for i in order]
    assert_models_equal(groups, ARCHITECTURES[name], several, buffers, StreamOptions(8, 3))
    assert [row.params.grid is None for row in several] == [i == 0 for i in order]  # the streamed model ran last


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("name", ["gqa", "tied_head", "everything"])
@pytest.mark.parametrize("stream", [None, StreamOptions(8, 3)], ids=["plain", "streamed"])
def test_linear_layers_add_to_the_buffers_themselves(groups, name, order, stream, monkeypatch):
    """In fp32 megatron-core's linear layers do, and say so by a mark on the weight. Rows that stream and one that does
    not, in any order: no further from fp64 than gradients that arrive as tensors."""
    layouts = [rows([1, 1]), LAYOUTS["causal"], LAYOUTS["block"]]

    def run(dtype, stream, fused=False):
        monkeypatch.setattr("megamem.train.optim.adds_weight_gradients", lambda: fused)
        model = build(groups, ARCHITECTURES[name], stream, torch.float32).to(dtype)  # one rounding of the weights
        model.config.params_dtype = dtype
        several = [make_row(groups, layouts[i], ("all", "some", "one")[i], seed=i) for i in order]
        gradients = buffer_gradients(model, groups, several)[1]
        linears = [m for m in model.modules() if hasattr(m, "gradient_accumulation_fusion")]
        assert linears and all(m.gradient_accumulation_fusion == fused for m in linears)
        return gradients

    truth, trusted, found = run(torch.float64, None), run(torch.float32, None), run(torch.float32, stream, fused=True)
    assert_floor_together(found, trusted, truth)


@pytest.mark.parametrize("layers", [1, 3])
def test_short_rows_take_the_plain_path(groups, layers, monkeypatch):
    """Tokens x layers of a stage within one chunk: all layers' activations are no more than a chunk's of one."""
    model = build(groups, architecture(layers=layers), StreamOptions(24, 3))
    seen = []
    monkeypatch.setattr("megamem.stream.layer.LayerSteps.__init__", lambda *_: seen.append(1))
    for length in range(1, 24 // layers + 1):
        row = make_row(groups, rows([length]), "all")
        call(model, row)
        assert row.params.grid is None
    assert not seen
    monkeypatch.undo()
    row = make_row(groups, rows([24 // layers + 1]), "all")
    call(model, row)
    assert row.params.grid == ChunkGrid(24 // layers + 1, 24, 1)


def test_with_overlap_short_rows_stream_too(groups):
    """Streamed and plain layers hand out gradients in different orders, and buckets leave in that order."""
    model, row = build(groups, ARCHITECTURES["gqa"], StreamOptions(24, 3)), make_row(groups, rows([2]), "all")
    for overlap in (True, False):
        call(wrap_for_training(model, ParallelConfig(overlap_grad_reduce=overlap)), row)
        assert (row.params.grid is not None) == overlap


@each_layout
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=str)
def test_forward_without_gradient(groups, layout, options):
    """Log-probs are those of the forward with gradient, bit by bit; logits those of the plain model."""
    streamed, plain = (build(groups, ARCHITECTURES["everything"], stream) for stream in (options, None))
    row = make_row(groups, layout, "all")
    with_gradient = call(streamed, row).detach()
    with torch.no_grad():
        assert_exact(call(streamed, row), with_gradient)
        assert_algebra(call(streamed, row), call(plain, row), "log-probs")
        ids_BS = row.ids_S[None]
        logits = [m(ids_BS, row.params, row.position_T.flip(0), LogitsHead()) for m in (streamed, plain)]
        assert_algebra(*logits, "logits")


# --- hooks


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1]], ids=str)
@pytest.mark.parametrize("name", ["gqa", "tied_head", "everything"])
@pytest.mark.parametrize(
    ("buffers", "dtype"), [(False, torch.float64), (True, torch.float64), (True, torch.float32)],
    ids=["grad", "main_grad", "added"],
)  # fmt: skip
def test_every_parameter_fires_once(groups, name, options, buffers, dtype):
    """Once per micro-batch, and not before its sum is complete: what data parallelism sends off then is final."""
    model = build(groups, ARCHITECTURES[name], options, dtype)
    parameters = stage_parameters(model)
    runner = Runner(wrap_for_training(model, ParallelConfig()), groups, "full") if buffers else None
    fired, last, kept = Counter(), {}, []

    def watch(name, parameter):
        def hook(*_):
            fired[name] += 1
            last[name] = (parameter.main_grad if buffers else parameter.grad).clone()

        if buffers:  # behind megatron-core's own hook on the same node
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(hook)
            kept.append(node)
        else:
            parameter.register_post_accumulate_grad_hook(hook)

    for item in parameters.items():
        watch(*item)
    several = [make_row(groups, layout, seed=i) for i, layout in enumerate([LAYOUTS["causal"], rows([12, 9])])]
    if buffers:
        runner.forward_backward(several, lambda row, logp_T: ((logp_T * cotangent(logp_T)).sum(), {}))
    else:
        plain_gradients(model, several)
    assert fired == dict.fromkeys(parameters, len(several))
    for name, parameter in parameters.items():
        assert_exact(last[name], parameter.main_grad if buffers else parameter.grad, name)


# --- low precision


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1]], ids=str)
@pytest.mark.parametrize("name", ["full", "prefix_causal", "block_diffusion"])
@pytest.mark.parametrize("buffers", [False, True], ids=["grad", "main_grad"])
def test_bf16_model(groups, name, options, buffers):
    """No further from fp64 (on the same rounded weights) than the plain model in bf16."""
    arch, several = ARCHITECTURES["qkv_bias"], [make_row(groups, LAYOUTS[name], "all", seed=i) for i in range(2)]

    def run(stream, dtype):
        model = build(groups, arch, stream, torch.bfloat16)
        if dtype == torch.float64:
            rounded, model = model, build(groups, arch, stream)
            for parameter, low in zip(model.parameters(), rounded.parameters(), strict=True):
                parameter.data.copy_(low)
        logps, grads = buffer_gradients(model, groups, several) if buffers else plain_gradients(model, several)
        return {"log-probs": torch.cat(logps), **grads}

    ours, trusted = run(options, torch.bfloat16), run(None, torch.bfloat16)
    truth = run(None, torch.float64)
    for what, value in truth.items():
        assert_floor(ours[what], trusted[what], value, what)


@pytest.mark.parametrize("buffers", [False, True], ids=["grad", "main_grad"])
def test_many_chunks_lose_nothing(groups, buffers):
    """256 chunks in bf16 against one: sums over chunks are kept in fp32, so the error does not grow with their number.

    One direction dominates dy and x, so that every chunk's part of a weight gradient is of one sign: the case in which
    a bf16 sum stalls.
    """
    arch = architecture(layers=1)
    layout = rows([512], CAUSAL)
    x_SBH = (0.3 * noise(512, 1, 24) + noise(24, seed=3)).to(groups.device.torch)
    dy_SBH = (0.3 * noise(512, 1, 24, seed=4) + noise(24, seed=5)).to(groups.device.torch)

    def run(chunk, dtype):
        rounded = build(groups, arch, OPTIONS[0], torch.bfloat16)
        model = build(groups, arch, OPTIONS[0], dtype)
        for parameter, low in zip(model.parameters(), rounded.parameters(), strict=True):
            parameter.data.copy_(low)
        if buffers:
            wrap_for_training(model, ParallelConfig()).zero_grad_buffer()
        layer = model.decoder.layers[0]
        x = x_SBH.to(torch.bfloat16).to(dtype).requires_grad_()
        y = layer(x, attention_mask=None, packed_seq_params=RowParams(layout=layout, grid=ChunkGrid(512, chunk)))[0]
        y.backward(dy_SBH.to(torch.bfloat16).to(dtype))
        return {"dx": x.grad} | {n: p.main_grad if buffers else p.grad for n, p in layer.named_parameters()}

    many, one, truth = run(2, torch.bfloat16), run(512, torch.bfloat16), run(512, torch.float64)
    for name, value in truth.items():
        assert_floor(many[name], one[name], value, name)


# --- memory


LONG = 96  # a row of the longest chunk count here is four times that
WIDE = dict(layers=2, ffn=1200, vocab_rows=3000, max_positions=4 * LONG)
# Entries a token may cost: 10 H (measured: 7.5 H) for two layers' inputs and one layer's dx, dy, q, k, v, dk, dv.
# A buffer of tokens x ffn alone would cost 1200.
PER_TOKEN = 240


def allocated(groups, stream, length: int, training: bool, how: str, dtype=torch.float64, **sizes: int) -> LiveStorages:
    model = build(groups, architecture(**WIDE | sizes), stream, dtype)
    runner = Runner(wrap_for_training(model, ParallelConfig()), groups, "full")
    runner.model.zero_grad_buffer()
    several = [make_row(groups, rows([length // 2, length // 2], CAUSAL), how)]
    with LiveStorages() as storages:
        if training:
            runner.forward_backward(several, lambda row, logp_T: (logp_T.sum(), {}))
        else:
            runner.forward(several)
    return storages


def test_linear_layers_that_add_to_the_buffers_need_no_room(groups):
    """In fp32 there is neither a weight's gradient nor a dummy of its size."""
    if not groups.device.is_cpu:
        pytest.skip("the meter does not see operations that autograd runs on a GPU's thread")
    weight = 2 * WIDE["ffn"] * architecture().hidden
    for dtype, room in ((torch.float64, False), (torch.float32, True)):
        found = allocated(groups, StreamOptions(20, 8), LONG, True, "all", dtype, vocab_rows=61)
        assert (found.largest < weight * dtype.itemsize) == room, dtype


@pytest.mark.parametrize("training", [True, False], ids=["step", "no_grad"])
@pytest.mark.parametrize("how", ["some", "all"])
def test_no_buffer_of_tokens_times_ffn_or_vocabulary(groups, how, training):
    """The largest allocation stays below `tokens x ffn` (it is a weight's gradient), and little grows with the row."""
    if not groups.device.is_cpu:
        pytest.skip("the meter does not see operations that autograd runs on a GPU's thread")
    arch, stream = architecture(**WIDE), StreamOptions(40, 8)
    short, long = (allocated(groups, stream, length, training, how) for length in (LONG, 4 * LONG))
    rows_of_ffn, rows_of_vocabulary = (LONG * width * 8 for width in (arch.ffn, arch.vocab_rows))
    assert short.largest == long.largest < rows_of_ffn
    grown = (long.peak - short.peak) / (3 * LONG) / 8
    assert grown < PER_TOKEN, f"{grown:.0f} entries a token"
    plain = allocated(groups, None, LONG, training, how)
    assert plain.largest > (rows_of_vocabulary if how == "all" else rows_of_ffn), "the meter sees what streams avoid"
