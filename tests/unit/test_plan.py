"""The planner against real steps, against larger fake steps, and on LLaDA-8B."""

import json

import pytest
import torch

from megamem.cli.plan import plan_run
from megamem.config.architecture import Architecture
from megamem.config.load import parse
from megamem.config.schema import OptimizerConfig, ParallelConfig
from megamem.models.build import build_model
from megamem.ops import attention
from megamem.plan import estimate as planner_estimate
from megamem.plan import planner
from megamem.plan.estimate import PARTS, Estimate, Static, estimate, optimizer_bytes, stage_static
from megamem.plan.growth import Growth, fit
from megamem.plan.planner import Machines, Need, suggest, table
from megamem.plan.step import Footprint, Job, WatchedStep
from megamem.plan.units import parse_bytes
from megamem.plan.variants import variants
from megamem.platform.device import resolve_device
from megamem.platform.fake import fake_groups, fake_tensors
from megamem.platform.groups import process_groups
from megamem.platform.launch import Ranks
from megamem.platform.memory import LiveStorages
from megamem.stream.layer import StreamOptions
from megamem.train.optim import build_optimizer, wrap_for_training
from tests.helpers import llada_config, qwen_config, refused, shared, write_config

ARCH = Architecture(
    layers=2, hidden=64, ffn=160, heads=4, kv_heads=2, head_dim=16, vocab_rows=500, max_positions=4096,
    mask_id=0, eos_id=1, pad_id=1,
)  # fmt: skip
DEEPER = ARCH.model_copy(update={"layers": 3})
OTHER = ARCH.model_copy(update={"qk_norm": True, "qkv_bias": True, "tied_head": True, "positions": "learned"})
NOTHING = Static(0, 0, 0, 0)

# variant, architecture, dtype, attention, chunk and head tokens, what is saved, row
CASES = [
    ("plain", DEEPER, torch.float32, "full", (64, 64), "input", 320),
    ("recompute", DEEPER, torch.bfloat16, "causal", (64, 64), "input", 320),
    ("recompute_streamed_head", ARCH, torch.float32, "full", (64, 32), "input", 256),
    ("streamed", DEEPER, torch.float32, "full", (64, 32), "input", 320),
    ("streamed", ARCH, torch.bfloat16, "block:48", (64, 48), "input", 260),
    ("streamed", ARCH, torch.float32, "prefix_lm", (64, 64), "input+attention", 256),
    ("streamed", OTHER, torch.float32, "causal", (64, 64), "input", 250),
    ("streamed_offload", ARCH, torch.bfloat16, "full", (64, 64), "input", 256),
]


@pytest.fixture(autouse=True)
def small_blocks_of_keys(monkeypatch):
    """Sizes are small here; so are attention's blocks of keys, or all rows would be shorter than one, and the whole
    rows that are faked."""
    monkeypatch.setattr(attention, "KEYS_AT_ONCE", 64)
    monkeypatch.setattr("megamem.stream.layer.QUERIES_AT_ONCE", 64)
    monkeypatch.setattr(planner_estimate, "_WHOLE_ROWS", (128, 256))


def job_of(arch, dtype, attention, **parallel):
    return Job(arch, dtype, ParallelConfig(**parallel), attention, prompt=48)


def total(footprint):
    return footprint.parameters + footprint.gradients + footprint.peak()


def planned(job, variant, tokens, stage=0, rows=1):
    static = stage_static(job, stage, data=1)
    found = estimate(job, variant, static, stage, rows, tokens)
    return static.parameters + static.gradients + max(found.grown(part, tokens) for part in PARTS), found


def measured(job, variant, tokens):
    """A real step, weights zero."""
    with process_groups(Ranks(0, 1, 0, None, "single process"), resolve_device("auto", 0), 1, 1) as groups:
        step = WatchedStep(job, variant, groups)
        for parameter in step.model.parameters():
            parameter.data.zero_()
        return step.run(tokens)


def faked(job, variant, tokens, stage=0, rows=1):
    with fake_groups(stage, job.parallel.tensor, job.parallel.pipeline) as groups, fake_tensors():
        return WatchedStep(job, variant, groups).run(tokens, rows)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[3]} {c[5]} {c[6]}")
def test_planned_is_measured(case):
    name, arch, dtype, attention, (chunk, head), save, tokens = case
    variant, job = variants(StreamOptions(chunk, head, save))[name], job_of(arch, dtype, attention)
    real, (plan, found) = measured(job, variant, tokens), planned(job, variant, tokens)
    assert plan == pytest.approx(total(real), rel=0.05)
    # Parameters and gradients alone must not make it so.
    assert max(found.grown(p, tokens) for p in PARTS) == pytest.approx(real.peak(), rel=0.05)
    assert found.grown("host", tokens) == pytest.approx(real.host, rel=0.01)


# variant, attention, degrees, layers on the stage, stage, rows, chunks of 64
LARGER = [
    ("plain", "full", dict(tensor=2, sequence=True), 6, 0, 1, 9),
    ("streamed", "causal", dict(tensor=2, sequence=True), 3, 0, 1, 4),
    ("recompute", "full", dict(tensor=2, sequence=True, pipeline=4), 3, 0, 6, 9),
    ("recompute", "full", dict(pipeline=4), 3, 3, 6, 9),
    ("streamed", "full", dict(pipeline=3), 2, 0, 4, 2),
]


@pytest.mark.parametrize("case", LARGER, ids=str)
def test_extrapolated_is_faked_whole(case):
    name, attention, degrees, layers, stage, rows, chunks = case
    job = job_of(ARCH, torch.bfloat16, attention, **degrees).with_layers(layers)
    variant, tokens = variants(StreamOptions(64, 64))[name], 64 * chunks
    found = estimate(job, variant, NOTHING, stage, rows, 64)
    whole = faked(job, variant, tokens, stage, rows)
    assert max(found.grown(p, tokens) for p in PARTS) == pytest.approx(whole.peak(), rel=0.01)
    for name, size in {"saved": whole.saved, "host": whole.host, "backward": whole.peak("backward")}.items():
        assert found.grown(name, tokens) == pytest.approx(size, rel=0.01), name


def test_growth_finds_the_numbers_of_its_formula():
    def law(tokens, layers, rows):
        in_flight, ahead = min(rows, 2), rows > 2
        size = max(900, 3 * tokens + 10) + tokens * (
            7 * (layers - 2) + (5 + 2 * (layers - 2)) * (in_flight - 1) + 4 * ahead
        )
        return Footprint(saved=size)

    found = fit(law, [100, 200, 400, 800], layers=8, in_flight=4, rows=9)["saved"]
    assert (found.layer, found.row, found.row_layer, found.steady) == (7, 5, 2, 4)
    assert found.at(5000, 8, 4, True) == 3 * 5000 + 10 + 5000 * (7 * 6 + (5 + 2 * 6) * 3 + 4)
    assert found.at(50, 2) == found.at(100, 2) == 900  # no shorter than the shortest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distributed", [True, False])
def test_optimizer_bytes_are_those_of_the_real_one(dtype, distributed):
    parallel = ParallelConfig(distributed_optimizer=distributed)
    job = Job(ARCH, dtype, parallel, "full")
    with process_groups(Ranks(0, 1, 0, None, "single process"), resolve_device("auto", 0), 1, 1) as groups:
        model = build_model(ARCH, groups, dtype)
        ddp = wrap_for_training(model, parallel)
        for parameter in model.parameters():
            parameter.data.zero_()
        ddp.zero_grad_buffer()
        with LiveStorages() as meter:
            optimizer = build_optimizer(ddp, OptimizerConfig(), parallel)
            optimizer.step()
            kept = meter.bytes
    found = stage_static(job, 0, data=1)
    assert found.optimizer == pytest.approx(kept, rel=0.01)
    assert optimizer_bytes(1000, dtype, parallel, data=4)[0] == (8 if dtype == torch.float32 else 12) * (
        250 if distributed else 1000
    )


def test_longest_row_fits_and_the_next_does_not():
    growth = {
        "saved": Growth(((64, 6400.0), (128, 12800.0)), 2, layer=50.0),
        "host": Growth(((64, 640.0), (128, 1280.0)), 2, layer=5.0),
        ("backward", "here"): Growth(((64, 9000.0), (128, 15400.0)), 2, layer=50.0),
    }
    found = Estimate(0, Static(1000, 2000, 3000, 500), growth, layers=4, in_flight=1, more_rows=False, unit=2)
    for memory, host in ((10**8, 10**12), (10**12, 10**7)):
        longest = found.longest(memory, host)
        fits = [found.peak(s) <= memory and found.grown("host", s) <= host for s in (longest, longest + 2)]
        assert longest % 2 == 0 and fits == [True, False]
    assert found.longest(10**8, 10**12) == (10**8 - 6000 - 2600) // 200 // 2 * 2
    assert found.longest(found.static.total, 10**12) == 0
    need = Need([found], Machines(1, 10**8, 0, 10**12))
    assert need.longest(64) == 64  # a learned table of positions ends
    assert need.longest(None) == found.longest(10**8, 10**12)


# --- the command ----------------------------------------------------------------------------------------------------


def settings(folder, *overrides):
    base = {"out": str(folder / "out"), "model": {"path": str(folder / "model")}, "task": "countdown"}
    return parse(base, ["stream.chunk_tokens=64", "stream.head_tokens=32", "train.row_tokens=64", *overrides], "test")


def run_plan(config, **changes):
    options = dict(
        gpus=None, gpus_per_node=8, gpu_memory="80GB", host_memory="1TB", reserve="4GB", tokens=None, rows=None,
        stage=None, prompt=None, progress=lambda text: None,
    )  # fmt: skip
    return plan_run(config, **options | changes)


@pytest.fixture
def model(tmp_path):
    write_config(tmp_path / "model", llada_config(mlp_hidden_size=24, n_layers=1))
    return tmp_path


def test_command_reports_every_variant_and_suggests(model):
    found = json.loads(json.dumps(run_plan(settings(model, "parallel.tensor=2"), gpus=4, gpu_memory="5GB")))
    names = ["plain", "recompute", "recompute_streamed_head", "streamed", "streamed_offload"]
    assert list(found["peak_bytes"]) == list(found["longest_tokens"]) == names
    for parts in found["peak_bytes"].values():
        static = parts["parameters"] + parts["gradients"] + parts["optimizer"]
        moving = parts["layer_inputs"] + max(parts[p] for p in ("layer", "head", "embedding"))
        assert parts["total"] == pytest.approx(static + max(moving, parts["optimizer_step"]), abs=8)
    assert found["data"] == 2 and found["reserve_bytes"] == 4 * 10**9
    assert found["suggestion"].items() >= {"tensor": 1, "pipeline": 1, "data": 4, "offload": "none"}.items()
    assert (found["schedule"], found["configured_schedule"]) == ("megatron", "megatron")
    text = table(found)
    assert "pipeline.schedule" not in text
    assert "pipeline.schedule=megatron" in table(found | {"configured_schedule": "streamed"})
    assert all(name in text for name in names) and "parallel.tensor=1" in text


@pytest.fixture
def by_formula(monkeypatch):
    """The planner's search without its fake steps: 1000 bytes a token shared by all ranks, half of it offloadable, and
    one for every token of a chunk; static bytes are 10^6 shared by all ranks. Returns what was estimated."""
    asked = []

    def estimate(job, variant, static, stage, rows, tokens):
        asked.append((job.parallel.tensor, job.parallel.pipeline, rows))
        size = 1000.0 * tokens / (job.parallel.tensor * job.parallel.pipeline)
        moved = size / 2 if variant.stream.offload == "cpu" else 0.0
        sizes = {("backward", "here"): size - moved + variant.stream.chunk_tokens, "host": moved}
        growth = {name: Growth(((0, size),), 2) for name, size in sizes.items()}
        return Estimate(stage, static, growth, 2, 1, False, 1)

    monkeypatch.setattr(planner, "estimate", estimate)
    share = lambda job: 10**6 // (job.parallel.tensor * job.parallel.pipeline)  # noqa: E731
    monkeypatch.setattr(planner, "stage_static", lambda job, stage, data: Static(share(job), 0, 0, 0))
    return asked


@pytest.mark.parametrize(
    ("memory", "host", "expected"),
    [
        (2_001_000, 10**9, dict(tensor=1, pipeline=1, data=4, offload="none", chunk_tokens=256)),
        (2_000_100, 10**9, dict(tensor=1, pipeline=1, data=4, offload="none", chunk_tokens=64)),
        (1_600_000, 10**9, dict(tensor=1, pipeline=1, data=4, offload="cpu", chunk_tokens=256)),
        (1_600_000, 0, dict(tensor=1, pipeline=2, data=2, offload="none", chunk_tokens=256)),
        (501_000, 0, dict(tensor=1, pipeline=4, data=1, offload="none", chunk_tokens=256)),
        (300_000, 0, None),
    ],
)
def test_suggestion_takes_more_parallelism_where_less_does_not_fit(by_formula, memory, host, expected):
    job, machines = job_of(ARCH.model_copy(update={"layers": 4}), torch.float32, "full"), Machines(4, memory, 0, host)
    chosen = suggest(job, StreamOptions(64, 64), machines, 1000, None, lambda text: None)
    if expected is None:
        assert chosen is None
    else:
        assert {key: chosen[key] for key in expected} == expected and chosen["peak_bytes"] <= memory
    assert all(rows == pipeline for _, pipeline, rows in by_formula)  # a pipeline is full


@pytest.mark.parametrize(
    ("overrides", "changes", "named"),
    [
        ((), {"gpu_memory": "80 apples"}, "--gpu-memory"),
        ((), {"gpu_memory": "3GB"}, "--reserve"),
        ((), {"host_memory": "-1"}, "--host-memory"),
        (("model.path=/nowhere",), {}, "/nowhere"),
        (("parallel.tensor=2",), {"gpus": 3}, "does not divide"),
        (("parallel.tensor=3",), {}, "heads"),
        (("parallel.tensor=4", "parallel.sequence=true", "stream.chunk_tokens=6"), {}, "stream.chunk_tokens"),
        (("model.dtype=float64",), {}, "float64"),
        ((), {"stage": 1}, "--stage"),
        ((), {"prompt": 40}, "fully bidirectional"),
    ],
)
def test_what_cannot_be_planned_is_refused(model, overrides, changes, named):
    assert named in refused(run_plan, settings(model, *overrides), **changes)


@pytest.mark.parametrize(
    ("row_tokens", "memory", "form"), [(64, "80GB", "handle"), (4096, "80GB", "row"), (64, "400kB", "row")]
)
def test_a_shared_prompt_takes_the_cheaper_form_that_fits(model, row_tokens, memory, form):
    write_config(model / "model", qwen_config("sdar", intermediate_size=24, num_hidden_layers=1))
    small = ("rollout.group=4", "rollout.gen_length=8", "noise.draws=4")
    found = run_plan(settings(model, *small), prompt=40, gpu_memory=memory, reserve="1kB", tokens=row_tokens)
    told = json.loads(json.dumps(found))["shared_prompt"]
    assert (told["tokens"], told["chosen"], bool(told["needs"])) == (40, form, form == "handle")
    assert f"prefix.form={form}" in table(found).splitlines()[-1] and "a shared prompt of 40" in table(found)


def test_a_learned_table_of_positions_ends(model):
    write_config(model / "model", llada_config(mlp_hidden_size=24, rope=False))
    assert "--tokens = 65" in refused(run_plan, settings(model), tokens=65)


def test_sizes_as_people_write_them():
    assert [parse_bytes(text, "x") for text in ("80GB", "1.5 TiB", "7", "2kb")] == [80 * 10**9, 3 * 2**39, 7, 2000]
    for text in ("", "GB", "1e9", "80 Gb/s", "0GB", "-1GB", "inf"):
        refused(parse_bytes, text, "x")


def test_llada_8b_on_80_gb(monkeypatch):
    """The longest row on eight GPUs with tensor and sequence parallelism, every position scored."""
    monkeypatch.undo()
    path = shared("data", "models", "llada-8b-instruct")
    base = {"out": "unused", "model": {"path": str(path), "dtype": "bfloat16"}, "task": "countdown"}
    config = parse(base, ["parallel.tensor=8", "parallel.sequence=true"], "test")
    found = run_plan(config, tokens=1_000_000)
    longest = found["longest_tokens"]
    assert longest["streamed"] / longest["recompute"] >= 2.8
    assert longest["streamed_offload"] / longest["recompute"] >= 7.5
    assert longest["streamed"] / longest["recompute_streamed_head"] >= 1.8
    assert found["host_bytes_per_node_at_longest"]["streamed_offload"] <= 10**12
