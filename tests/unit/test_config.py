"""Configuration: what is accepted, and that what is not is told by key, value and what is allowed."""

from pathlib import Path

import pytest

from megamem.config.architecture import Architecture
from megamem.config.load import config_yaml, load_config, parse
from megamem.config.rules import LAYOUT_RULES, RULES, check
from megamem.config.schema import RunConfig
from tests.helpers import refused

ROOT = Path(__file__).resolve().parents[2]
BASE = {"out": "runs/x", "model": {"path": "models/tiny"}, "task": "sudoku4"}
ARCH = Architecture(
    layers=6, hidden=48, ffn=92, heads=12, kv_heads=6, head_dim=4, vocab_rows=97, max_positions=512,
    mask_id=96, eos_id=90, pad_id=90,
)  # fmt: skip


def config(*overrides: str, **settings) -> RunConfig:
    return parse(BASE | settings, overrides, "test.yaml")


def test_defaults():
    c = config()
    assert c.task.name == "sudoku4" and c.task.options == {}
    assert (c.objective.name, c.noise.estimator, c.noise.draws, c.rollout.group) == ("bgpo", "iid_t", 16, 8)
    assert (c.optimizer.lr, c.optimizer.betas, c.parallel.tensor) == (5e-7, (0.9, 0.95), 1)
    check(c, ARCH, world=1)


def test_a_configuration_is_immutable():
    with pytest.raises(ValueError, match="frozen"):
        config().seed = 3


def test_overrides_win_and_merge():
    c = config("parallel.tensor=2", "optimizer.lr=1e-6", "optimizer.betas=[0.8,0.9]", "rollout.max_prompt=null", seed=4)
    assert (c.parallel.tensor, c.optimizer.lr, c.optimizer.betas, c.rollout.max_prompt) == (2, 1e-6, (0.8, 0.9), None)
    assert (c.seed, c.model.path) == (4, "models/tiny")
    assert config("out=elsewhere").out == "elsewhere"


def test_interpolation():
    assert config(out="runs/${task.name}", task={"name": "countdown"}).out == "runs/countdown"


def test_task_by_name():
    """`task: name` is short for a mapping: options can be merged into it, another name starts afresh."""
    assert config("task.options.size=5").task.model_dump() == {"name": "sudoku4", "options": {"size": 5}}
    long = {"name": "sudoku4", "options": {"size": 5, "seed": 1}}
    assert config(task=long).task.model_dump() == long
    assert config("task.options.size=6", task=long).task.options == {"size": 6, "seed": 1}
    assert config("task=countdown", task=long).task.model_dump() == {"name": "countdown", "options": {}}
    for overrides in (["task=countdown", "task.options.x=1"], ["task.options.x=1", "task=countdown"]):
        assert config(*overrides, task=long).task.model_dump() == {"name": "countdown", "options": {"x": 1}}
    assert config("task={name: mine, options: {x: 1}}").task.name == "mine"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.learning_rate=1", ["optimizer.learning_rate = 1: unknown key", "allowed: lr, min_lr"]),
        ("rollout.promts=1", ["rollout.promts = 1: unknown key", "did you mean prompts?", "prompts, group"]),
        ("paralel.tensor=2", ["paralel = {'tensor': 2}: unknown key", "did you mean parallel?"]),
        ("parallel.tensor=two", ["parallel.tensor = 'two'", "valid integer"]),
        ("parallel.tensor=0", ["parallel.tensor = 0", "greater than 0"]),
        ("parallel.tensor=2.5", ["parallel.tensor = 2.5", "integer"]),
        ("optimizer.lr=-1", ["optimizer.lr = -1", "greater than 0"]),
        ("optimizer.lr=inf", ["optimizer.lr = 'inf'", "finite"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas.1", "required"]),
        ("objective.prompt_mask=1.5", ["objective.prompt_mask = 1.5", "less than or equal to 1"]),
        ("model.dtype=float16", ["model.dtype = 'float16'", "'float32', 'bfloat16' or 'float64'"]),
        ("device=gpu", ["device = 'gpu'", "'auto', 'cpu' or 'cuda'"]),
        ("train.resume=maybe", ["train.resume = 'maybe'", "boolean"]),
        ("model=null", ["model = None"]),
        ("model.path=null", ["model.path = None", "string"]),
        ("rollout=3", ["rollout = 3"]),
    ],
)
def test_wrong_keys_and_values(override, told):
    message = refused(config, override)
    assert message.startswith("test.yaml: ") and all(text in message for text in told), message


@pytest.mark.parametrize("key", ["out", "model", "task"])
def test_required_keys(key):
    message = refused(parse, {k: v for k, v in BASE.items() if k != key}, (), "test.yaml")
    assert message == f"test.yaml: {key}: this key is required and has no default"


@pytest.mark.parametrize("override", ["parallel.tensor", "=3", " =3", ""])
def test_malformed_overrides(override):
    message = refused(config, override)
    assert repr(override) in message and "key=value" in message and "parallel.tensor=2" in message


@pytest.mark.parametrize(
    "override", ["seed.x=1", "out=${nowhere}", "out=${", "a..b=1", "model.path=[1", "task=[1]", "model=[1]"]
)
def test_overrides_that_do_not_fit(override):
    assert "test.yaml" in refused(config, override)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "out: this key is required"),
        (b"- a\n- b\n", "must be a mapping of keys, found list"),
        (b"just words\n", "out: this key is required"),
        (b"out: [1\nmodel: }", "cannot be read as YAML"),
        (b"out: a\nout: b\n", "cannot be read as YAML"),
        (b"\xff\xfe\x00\x01\x02", "cannot be read as YAML"),
        (b"out: ${nowhere}\n", "nowhere"),
        (b"out: a\nmodel: {path: b}\ntask: c\n1: 2\n", "keys should be strings"),
    ],
    ids=["empty", "list", "scalar", "broken", "twice", "binary", "interpolation", "number_key"],
)
def test_wrong_files(tmp_path, content, told):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    message = refused(load_config, path)
    assert str(path) in message and told in message, message


def test_no_file(tmp_path):
    path = tmp_path / "none.yaml"
    assert refused(load_config, path) == f"{path}: no such configuration file"
    assert "cannot be read as YAML" in refused(load_config, tmp_path)


def test_dump_and_load(tmp_path):
    """Every kind of value, small floats and null among them, comes back equal."""
    c = config(
        "optimizer.lr=1e-6", "optimizer.eps=1e-12", "optimizer.betas=[0.1,0.2]", "objective.clip_low=0.2", "seed=7",
        "task.options={a: [1, 2.5, null], b: {c: 'yes'}}", "train.resume=false", "model.path='1e3'",
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(config_yaml(c))
    assert load_config(tmp_path / "config.yaml") == c
    assert load_config(tmp_path / "config.yaml", ["seed=8"]) == c.model_copy(update={"seed": 8})


FIRST = "objective.score_eos=first"
GRPO = ["objective.name=grpo", "noise.estimator=full", "noise.draws=1", FIRST]
# One line per message of every rule: (rule, overrides, architecture, processes, what the message names).
BROKEN = [
    ("world_divisible", ["parallel.tensor=2", "parallel.pipeline=3"], {}, 8,
     ["parallel.tensor x parallel.pipeline = 2 x 3", "8 processes", "1, 2, 4, 8"]),
    ("model_divisible", ["parallel.tensor=4"], {"heads": 18}, 4,
     ["parallel.tensor = 4", "heads = 18", "1, 2, 3, 6, 9, 18"]),
    ("model_divisible", ["parallel.tensor=3"], {}, 3, ["parallel.tensor = 3", "ffn = 92", "1, 2, 4, 23, 46, 92"]),
    ("model_divisible", ["parallel.tensor=4"], {}, 4, ["parallel.tensor = 4", "kv_heads = 6"]),
    ("model_divisible", ["parallel.pipeline=4"], {}, 4, ["parallel.pipeline = 4", "layers = 6", "1, 2, 3, 6"]),
    ("decoding_schedule", ["rollout.gen_length=24"], {}, 1,
     ["rollout.block_length = 32", "rollout.gen_length = 24", "1, 2, 3, 4, 6, 8, 12, 24"]),
    ("decoding_schedule", ["rollout.steps=12"], {}, 1, ["rollout.steps = 12", "8 blocks", "gen_length = 256"]),
    ("decoding_schedule", ["rollout.steps=512"], {}, 1, ["rollout.steps = 512", "at most gen_length = 256"]),
    ("decoding_schedule", [], {"max_positions": 256}, 1, ["rollout.gen_length = 256", "256", "below that"]),
    ("decoding_schedule", ["eval.steps=12"], {}, 1, ["eval.steps = 12", "8 blocks"]),
    ("decoding_schedule", ["eval.gen_length=24"], {}, 1, ["eval.block_length = 32", "eval.gen_length = 24"]),
    ("decoding_schedule", [], {"attention": "block", "block_length": 4}, 1,
     ["rollout.block_length = 32", "allowed: 4"]),
    ("decoding_schedule", ["rollout.eos=last", *GRPO], {"attention": "causal"}, 1,
     ["rollout.eos = last", "free, forbidden"]),
    ("prompts_divisible", ["rollout.prompts=10", "train.updates=2"], {}, 2, ["rollout.prompts = 10", "2 x 2", "12"]),
    ("groups_compare", ["rollout.group=1"], {}, 1, ["rollout.group = 1", "2 or more", "objective.name=sft"]),
    ("noise_fits_objective", ["noise.estimator=full"], {}, 1,
     ["noise.estimator = full", "objective.name = bgpo", "iid_t, count, stratified, coupled"]),
    ("noise_fits_objective", ["objective.name=diffu_grpo"], {}, 1,
     ["noise.estimator = iid_t", "objective.name = diffu_grpo", "allowed: full"]),
    ("noise_fits_objective", ["objective.name=grpo", "noise.draws=1"], {}, 1,
     ["noise.estimator = iid_t", "objective.name = grpo", "allowed: full"]),
    ("noise_fits_objective", ["objective.name=grpo", "noise.estimator=full"], {}, 1,
     ["noise.draws = 16", "allowed: 1"]),
    ("noise_fits_objective", ["objective.name=sft", "noise.draws=1", FIRST], {"attention": "causal"}, 1,
     ["noise.estimator = iid_t", "a causal model", "allowed: full"]),
    ("noise_fits_objective", [FIRST], {"attention": "causal"}, 1, ["objective.name = bgpo", "causal", "grpo, sft"]),
    ("noise_fits_objective", ["noise.estimator=coupled", "noise.draws=3"], {}, 1, ["noise.draws = 3", "even"]),
    ("causal_responses_end", [*GRPO, "objective.score_eos=all"], {"attention": "causal"}, 1,
     ["objective.score_eos = all", "causal", "allowed: first"]),
    ("token_ids_known", [], {"mask_id": None}, 1, ["model.path = models/tiny", "no mask_token_id", "config.json"]),
    ("token_ids_known", [], {"eos_id": None}, 1, ["model.path = models/tiny", "no eos_token_id"]),
    ("learning_rate_decays_down", ["optimizer.min_lr=1"], {}, 1,
     ["optimizer.min_lr = 1.0", "optimizer.lr = 5e-07", "0 … lr"]),
    ("learning_rate_decays_down", ["optimizer.warmup_steps=401"], {}, 1,
     ["optimizer.warmup_steps = 401", "train.steps = 400"]),
    ("optimizer_precision", ["model.dtype=float64"], {}, 1, ["model.dtype = float64", "float32, bfloat16"]),
    ("prefix_is_exact", ["prefix.share=true"], {}, 1, ["prefix.share = true", "bidirectional", "prefix_lm"]),
    ("prompt_masks_are_kept", ["objective.name=diffu_grpo", "noise.estimator=full", "noise.draws=1",
     "model.attention=prefix_lm"], {}, 1, ["objective.prompt_mask = 0.15", "prefix_lm", "allowed: 0"]),
    ("chunks_need_partitions", ["model.kernel=flex", "stream.layers=true"], {}, 1,
     ["model.kernel = flex", "stream.layers = true", "partitioned"]),
    ("prefix_handle_streams", ["prefix.form=handle"], {}, 1, ["prefix.form = handle", "streamed", "stage", "row"]),
    ("prefix_handle_streams", ["prefix.form=handle", "stream.layers=true", "pipeline.schedule=streamed",
     "stream.window=layer"], {}, 1, ["prefix.form = handle", "stream.window = stage"]),
    ("streams_fit", ["stream.layers=true", "train.recompute=full"], {}, 1, ["train.recompute = full", "stream.layers"]),
    ("streams_fit", ["stream.layers=true", "parallel.tensor=2", "parallel.sequence=true", "stream.chunk_tokens=33"],
     {}, 2, ["stream.chunk_tokens = 33", "multiples of parallel.tensor = 2"]),
    ("streamed_schedule_streams", ["pipeline.schedule=streamed"], {}, 1,
     ["pipeline.schedule = streamed", "stream.layers = true", "megatron"]),
    ("streamed_schedule_streams", ["pipeline.slack=2"], {}, 1, ["pipeline.slack = 2", "streamed"]),
    ("streamed_schedule_streams", ["pipeline.trace=true"], {}, 1, ["pipeline.trace = true", "streamed"]),
    ("best_is_evaluated", ["train.keep_best=1", "eval.every=0"], {}, 1, ["train.keep_best = 1", "eval.every = 0"]),
    ("best_is_evaluated", ["train.keep_best=2", "train.save_every=50", "eval.every=20"], {}, 1,
     ["train.keep_best = 2", "eval.every = 20", "train.save_every = 50"]),
    ("one_source_of_rollouts", ["rollout.record=a", "rollout.replay=b"], {}, 1, ["rollout.record", "rollout.replay"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "overrides", "arch", "world", "told"), BROKEN, ids=[f"{b[0]}-{' '.join(b[1])}" for b in BROKEN]
)
def test_broken_rule(rule, overrides, arch, world, told):
    named = {r.__name__: r for r in RULES}
    broken, changed = config(*overrides), ARCH.model_copy(update=arch)
    messages = list(named[rule](broken, changed, world))
    assert all(text in messages[0] for text in told), messages
    assert messages[0] in refused(check, broken, changed, world)
    others = [r.__name__ for name, r in named.items() if name != rule and list(r(broken, changed, world))]
    assert others in ([], ["prompts_divisible"]), "one mistake, one message (more processes also want more prompts)"


def test_every_rule_is_broken_above():
    assert {b[0] for b in BROKEN} == {r.__name__ for r in RULES}
    assert set(LAYOUT_RULES) <= set(RULES)


def test_kept_rules():
    """Near misses that are allowed."""
    for overrides, world in [
        (["parallel.tensor=4", "parallel.pipeline=2"], 8),  # kv_heads = 2 below
        (["objective.name=sft", "rollout.group=1"], 1),
        (["objective.name=diffu_grpo", "noise.estimator=full"], 1),
        (["noise.estimator=coupled", "noise.draws=2"], 1),
        (["optimizer.min_lr=5e-7", "optimizer.warmup_steps=400"], 1),
        (["rollout.steps=256", "eval.gen_length=64", "eval.steps=64"], 1),
        (["rollout.prompts=12", "train.updates=3"], 4),
        (["train.keep_best=2", "train.save_every=40", "eval.every=20"], 1),
        (["train.keep_best=2", "train.save_every=10", "eval.every=20"], 1),
    ]:
        check(config(*overrides), ARCH.model_copy(update={"kv_heads": 2, "ffn": 92}), world)
    # Blocks and steps of denoising are not read for a causal model.
    check(config("rollout.gen_length=24", *GRPO), ARCH.model_copy(update={"attention": "causal", "mask_id": None}), 1)


def test_only_two_messages_are_told():
    overrides = ["rollout.group=1", "model.dtype=float64", "optimizer.min_lr=1"]
    assert len(refused(check, config(*overrides), ARCH, 1).splitlines()) == 2


def test_architecture():
    assert [ARCH.padded_vocab(tensor) for tensor in (1, 2, 4, 128)] == [128] * 4
    assert [ARCH.model_copy(update={"vocab_rows": rows}).padded_vocab(1) for rows in (1, 128, 129)] == [128, 128, 256]
    assert ARCH.padded_vocab(3) == 384 and ARCH.padded_vocab(256) == 256
    with pytest.raises(ValueError, match="heads"):
        Architecture(**(ARCH.model_dump() | {"heads": 0}))


def test_every_example_parses():
    """Paths in them need not exist here."""
    for path in sorted([*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("examples/**/*.yml")]):
        load_config(path)
