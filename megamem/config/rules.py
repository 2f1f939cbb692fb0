"""Rules that join several keys, one named function each. Pure; checked before any process group starts.

A rule yields messages; each names the key, its value and what is allowed.
"""

from collections.abc import Callable, Iterator

from megamem.config.architecture import Architecture
from megamem.config.schema import ParallelConfig, RunConfig
from megamem.errors import UserError

Rule = Callable[[RunConfig, Architecture, int], Iterator[str]]


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def world_divisible(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """The process grid fills the world."""
    p = config.parallel
    if world % (p.tensor * p.pipeline):
        yield (
            f"parallel.tensor x parallel.pipeline = {p.tensor} x {p.pipeline} does not divide the {world} processes; "
            f"their product must be one of {_divisors(world)}"
        )


def model_fits_layout(parallel: ParallelConfig, arch: Architecture) -> Iterator[str]:
    """What the model's shapes allow; also checked by the convert commands, which have no RunConfig."""
    tensor, pipeline = parallel.tensor, parallel.pipeline
    for key, value in (("heads", arch.heads), ("ffn", arch.ffn)):
        if value % tensor:
            yield f"parallel.tensor = {tensor} must divide the model's {key} = {value}; allowed: {_divisors(value)}"
    if arch.kv_heads % tensor and tensor % arch.kv_heads:
        yield f"parallel.tensor = {tensor} and the model's kv_heads = {arch.kv_heads}: one must divide the other"
    elif (arch.heads + 2 * arch.kv_heads) * arch.head_dim % tensor:
        yield (
            f"parallel.tensor = {tensor} does not divide the rows of the model's query, key and value projection, "
            f"(heads + 2 kv_heads) x head_dim = {(arch.heads + 2 * arch.kv_heads) * arch.head_dim}"
        )
    if arch.layers % pipeline:
        yield (
            f"parallel.pipeline = {pipeline} must divide the model's layers = {arch.layers}; "
            f"allowed: {_divisors(arch.layers)}"
        )


def model_divisible(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """The model can be split that way."""
    yield from model_fits_layout(config.parallel, arch)


def _decoding(prefix: str, gen_length: int, block_length: int, steps: int, arch: Architecture) -> Iterator[str]:
    if arch.attention != "causal":
        yield from _blocks(prefix, gen_length, block_length, steps, arch.block_length)
    if gen_length >= arch.max_positions:
        yield (
            f"{prefix}.gen_length = {gen_length} leaves no position for a prompt; the model has {arch.max_positions}, "
            f"allowed: below that"
        )


def _blocks(prefix: str, gen_length: int, block_length: int, steps: int, fixed: int | None) -> Iterator[str]:
    if fixed and block_length != fixed:
        yield f"{prefix}.block_length = {block_length}: the model's blocks have {fixed} tokens; allowed: {fixed}"
        return
    if gen_length % block_length:
        yield (
            f"{prefix}.block_length = {block_length} must divide {prefix}.gen_length = {gen_length}; "
            f"allowed: {_divisors(gen_length)}"
        )
        return
    blocks = gen_length // block_length
    if steps % blocks or steps > gen_length:
        yield (
            f"{prefix}.steps = {steps} must be a multiple of the {blocks} blocks (gen_length / block_length) "
            f"and at most gen_length = {gen_length}"
        )


def decoding_schedule(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """Blocks, steps and lengths of decoding fit each other and the model."""
    r, e = config.rollout, config.eval
    yield from _decoding("rollout", r.gen_length, r.block_length, r.steps, arch)
    if e.gen_length or e.block_length or e.steps:
        yield from _decoding(
            "eval", e.gen_length or r.gen_length, e.block_length or r.block_length, e.steps or r.steps, arch
        )
    if arch.attention == "causal" and r.eos == "last":
        yield "rollout.eos = last: a causal model writes in order and cannot put it off; allowed: free, forbidden"


def prompts_divisible(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """Every data-parallel rank has prompts in every optimizer step."""
    replicas = max(1, world // (config.parallel.tensor * config.parallel.pipeline))
    unit = replicas * config.train.updates
    if config.rollout.prompts % unit:
        yield (
            f"rollout.prompts = {config.rollout.prompts} must be a multiple of data-parallel ranks x train.updates = "
            f"{replicas} x {config.train.updates}; next: {-(-config.rollout.prompts // unit) * unit}"
        )


def groups_compare(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """An advantage compares responses."""
    if config.objective.name != "sft" and config.rollout.group < 2:
        yield (
            f"rollout.group = {config.rollout.group}: the advantage compares responses to one prompt; "
            f"allowed: 2 or more (or objective.name=sft)"
        )


def noise_fits_objective(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """The estimator estimates what the objective and the model need."""
    name, causal = config.objective.name, arch.attention == "causal"
    if causal and name not in ("grpo", "sft"):
        yield (
            f"objective.name = {name}: a causal model hides no tokens, so there is no ELBO to estimate; "
            "allowed: grpo, sft"
        )
        return
    full, one_pass = config.noise.estimator == "full", causal or name in ("diffu_grpo", "grpo")
    if full != one_pass:
        allowed = "full" if one_pass else "iid_t, count, stratified, coupled"
        whose = f"objective.name = {name}" if name != "sft" or not causal else "a causal model"
        yield f"noise.estimator = {config.noise.estimator} does not estimate what {whose} needs; allowed: {allowed}"
    if one_pass and name != "diffu_grpo" and config.noise.draws > 1:
        yield f"noise.draws = {config.noise.draws}: draws of noise.estimator = full are all alike; allowed: 1"
    if config.noise.estimator == "coupled" and config.noise.draws % 2:
        yield f"noise.draws = {config.noise.draws}: coupled draws come in pairs; allowed: even numbers"


def causal_responses_end(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """Behind EOS a causal model was not asked; scoring that filling would be neither on-policy nor an answer."""
    filled = config.rollout.stop_at_eos or config.objective.name == "sft"
    if arch.attention == "causal" and filled and config.objective.score_eos == "all":
        yield "objective.score_eos = all: what follows a causal model's first EOS was never sampled; allowed: first"


def token_ids_known(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """Conversion does without them; a run ends responses and, unless the model is causal, hides tokens."""
    needed = [("eos_token_id", arch.eos_id), ("mask_token_id", arch.mask_id)]
    for key, value in needed[:1] if arch.attention == "causal" else needed:
        if value is None:
            yield (
                f"model.path = {config.model.path}: its config.json, generation_config.json and tokenizer_config.json "
                f"give no {key}; add it to config.json"
            )


def learning_rate_decays_down(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """The learning rate goes up once, then down."""
    o = config.optimizer
    if o.min_lr > o.lr:
        yield f"optimizer.min_lr = {o.min_lr} is above optimizer.lr = {o.lr}; allowed: 0 … lr"
    if o.warmup_steps > config.train.steps:
        yield f"optimizer.warmup_steps = {o.warmup_steps} exceeds train.steps = {config.train.steps}"


def optimizer_precision(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """The optimizer can compute in the model's dtype."""
    if config.model.dtype == "float64":
        yield "model.dtype = float64: megatron-core's optimizer computes in float32; allowed: float32, bfloat16"


def prefix_is_exact(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """A prompt is shared only where that is exact."""
    if config.prefix.share and arch.attention == "full" and config.model.attention == "native":
        yield (
            "prefix.share = true: this model is fully bidirectional, so the prompt's states depend on each response "
            "and sharing them would be inexact; allowed: false (model.attention=prefix_lm is another model)"
        )


def prompt_masks_are_kept(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """A masked prompt is one that each draw computes for itself."""
    seen = arch.attention if config.model.attention == "native" else config.model.attention
    if config.objective.name == "diffu_grpo" and config.objective.prompt_mask and seen != "full":
        yield (
            f"objective.prompt_mask = {config.objective.prompt_mask}: with {seen} attention a prompt is computed "
            "clean, for all its draws; allowed: 0 (or a fully bidirectional model)"
        )


def keeps_keys(config: RunConfig) -> bool:
    """Whether rows keep keys and values of all layers of a stage."""
    return config.pipeline.schedule == "streamed" and config.stream.window == "stage"


def prefix_handle_streams(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """A prefix handle needs rows that keep their keys and values."""
    if config.prefix.form == "handle" and not keeps_keys(config):
        yield (
            "prefix.form = handle needs pipeline.schedule = streamed and stream.window = stage, where rows keep their "
            "keys and values; allowed without: row, auto"
        )


def one_source_of_rollouts(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """Rollouts are recorded or replayed, not both."""
    if config.rollout.record and config.rollout.replay:
        yield "rollout.record and rollout.replay are both set; allowed: one of them"


def streams_fit(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """Chunks can be split over ranks; layers recompute once."""
    s, tensor = config.stream, config.parallel.tensor
    if not s.layers:
        return
    if config.parallel.sequence and s.chunk_tokens % tensor:
        yield (
            f"stream.chunk_tokens = {s.chunk_tokens}: under sequence parallelism every rank owns a part of each chunk; "
            f"allowed: multiples of parallel.tensor = {tensor}"
        )
    if config.train.recompute != "none":
        yield (
            f"train.recompute = {config.train.recompute} and stream.layers = true: streamed layers recompute already; "
            "allowed: one of them"
        )


def chunks_need_partitions(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """A chunk attends in parts that are merged; FlexAttention does a whole row."""
    if config.model.kernel == "flex" and config.stream.layers:
        yield "model.kernel = flex and stream.layers = true: chunks need partial attention; allowed: partitioned"


def streamed_schedule_streams(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """The streamed schedule streams, and its settings belong to it."""
    p = config.pipeline
    if p.schedule == "streamed" and not config.stream.layers:
        yield "pipeline.schedule = streamed needs stream.layers = true; allowed without: megatron"
    if p.schedule == "megatron" and (p.slack is not None or p.trace):
        key, value = ("slack", p.slack) if p.slack is not None else ("trace", "true")
        yield f"pipeline.{key} = {value} belongs to pipeline.schedule = streamed, which is megatron; leave it out"


def best_is_evaluated(config: RunConfig, arch: Architecture, world: int) -> Iterator[str]:
    """The best checkpoints are among those of steps that were evaluated."""
    t, every = config.train, config.eval.every
    if t.keep_best and (not every or (t.save_every % every and every % t.save_every)):
        yield (
            f"train.keep_best = {t.keep_best} ranks checkpoints by an evaluation at the step they are saved after: "
            f"eval.every = {every} must divide train.save_every = {t.save_every} or be a multiple of it"
        )


RULES: tuple[Rule, ...] = (
    world_divisible,
    model_divisible,
    decoding_schedule,
    prompts_divisible,
    groups_compare,
    noise_fits_objective,
    causal_responses_end,
    token_ids_known,
    learning_rate_decays_down,
    optimizer_precision,
    prefix_is_exact,
    prompt_masks_are_kept,
    prefix_handle_streams,
    one_source_of_rollouts,
    streams_fit,
    chunks_need_partitions,
    streamed_schedule_streams,
    best_is_evaluated,
)
# What commands that only run the model need.
LAYOUT_RULES: tuple[Rule, ...] = (
    world_divisible,
    model_divisible,
    decoding_schedule,
    token_ids_known,
    streams_fit,
    streamed_schedule_streams,
)


def check(config: RunConfig, arch: Architecture, world: int, rules: tuple[Rule, ...] = RULES) -> None:
    """Apply rules; the first two broken ones are told.

    Args:
        world: number of processes.

    Raises:
        UserError: a rule is broken.
    """
    broken = [message for rule in rules for message in rule(config, arch, world)]
    if broken:
        raise UserError("\n".join(broken[:2]))
