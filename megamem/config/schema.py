"""Every setting of a run, typed. Imports no torch; unknown keys and wrong types are refused by pydantic.

Defaults are the papers' values where a paper names one. Rules that join several keys live in `rules.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """A group of keys: immutable, no unknown keys, defaults checked like given values."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


class ModelConfig(Section):
    path: str = Field(description="Hugging Face folder or megamem checkpoint")
    init: Literal["checkpoint", "random"] = Field("checkpoint", description="random reads only config.json")
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    attention: Literal["native", "prefix_lm"] = Field(
        "native", description="prefix_lm: the prompt does not see the response; a different model, stated by hand"
    )
    kernel: Literal["partitioned", "flex"] = Field(
        "partitioned",
        description="of attention in layers that do not stream; flex: torch's FlexAttention, one compiled kernel for "
        "deep or ragged trees (training: GPUs only)",
    )


class TokenizerConfig(Section):
    path: str | None = Field(None, description="folder or sentencepiece file; default: the model's folder")
    chat: bool | None = Field(None, description="apply the chat template; default: where there is one")


class ParallelConfig(Section):
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    sequence: bool = Field(False, description="sequence parallelism inside the tensor-parallel group")
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False


class TaskConfig(Section):
    name: str = Field(description="sudoku4, countdown, or my_module:MyTask")
    options: dict[str, Any] = {}


class PrefixConfig(Section):
    share: bool = Field(False, description="compute a prompt shared by a group once")
    form: Literal["auto", "row", "handle"] = Field(
        "auto",
        description="row: prompt and draws in one row; handle: the prompt once, draws in rows that see it; auto: "
        "handle where the schedule allows it and it saves operations (what fits: megamem plan --prompt)",
    )


class RolloutConfig(Section):
    prompts: PositiveInt = Field(16, description="prompts of a step, over all data-parallel ranks")
    group: PositiveInt = Field(8, description="responses per prompt")
    gen_length: PositiveInt = Field(256, description="response tokens")
    block_length: PositiveInt = Field(
        32, description="tokens denoised together, blocks left to right; a block-causal model's own"
    )
    steps: PositiveInt = Field(128, description="denoising steps of a whole response")
    temperature: NonNegativeFloat = 0.6
    remasking: Literal["low_confidence", "random", "entropy", "margin"] = "low_confidence"
    eos: Literal["free", "last", "forbidden"] = Field(
        "free", description="last: EOS gets confidence 0 and is placed last; forbidden: never chosen"
    )
    stop_at_eos: bool = Field(
        True, description="stop after a block that ends in EOS (block-causal: has one; causal: at it); the rest is EOS"
    )
    max_prompt: PositiveInt | None = Field(None, description="tokens; default: what the model's positions leave")
    overlong: Literal["drop", "truncate", "refuse"] = "drop"
    row_tokens: PositiveInt = Field(
        8192, description="packed tokens of one forward; slots of the key/value cache where there is one"
    )
    record: str | None = Field(None, description="folder to write every step's rollouts to")
    replay: str | None = Field(None, description="folder of recorded rollouts to train on instead of sampling")


class NoiseConfig(Section):
    estimator: Literal["iid_t", "count", "stratified", "coupled", "full"] = "iid_t"
    draws: PositiveInt = Field(16, description="Monte-Carlo draws per response, n_t")


class ObjectiveConfig(Section):
    name: Literal["sft", "bgpo", "vrpo_ol", "diffu_grpo", "grpo"] = "bgpo"
    advantage: Literal["mean_std", "mean", "loo"] = "mean_std"
    reduction: Literal["sequence", "token", "group", "constant"] = Field(
        "sequence",
        description="the loss is the mean over these; constant: as sequence, divided by gen_length (Dr. GRPO)",
    )
    length_norm: bool = Field(False, description="divide the log-ratio by the number of scored tokens")
    score_eos: Literal["all", "first"] = Field("all", description="first: the response ends with its first EOS")
    clip_low: PositiveFloat | None = Field(None, description="PPO clip; the paper's BGPO has none, d1 uses 0.5")
    clip_high: PositiveFloat | None = None
    dual_clip: PositiveFloat | None = None
    kl: NonNegativeFloat = Field(0.0, description="token-level: weight of the KL term to the initial weights")
    exponent_limit: PositiveFloat = Field(20.0, description="largest exponent taken of a log-ratio")
    prompt_mask: Fraction = Field(0.15, description="diffu_grpo: probability of masking a prompt token")


class OptimizerConfig(Section):
    lr: PositiveFloat = 5e-7
    min_lr: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    clip_grad: NonNegativeFloat = Field(1.0, description="largest gradient norm; 0 leaves gradients alone")


class TrainConfig(Section):
    steps: PositiveInt = 400
    updates: PositiveInt = Field(1, description="optimizer steps per batch of rollouts; above 1 is off-policy")
    row_tokens: PositiveInt = Field(8192, description="packed tokens of one micro-batch")
    recompute: Literal["none", "full"] = "none"
    save_every: PositiveInt = 50
    save_async: bool = Field(False, description="go on training while a checkpoint is written")
    on_save_error: Literal["stop", "continue"] = Field(
        "stop", description="continue: train on where a checkpoint cannot be written, and try again at the next one"
    )
    keep: PositiveInt = Field(3, description="newest checkpoints kept")
    keep_best: NonNegativeInt = Field(0, description="checkpoints kept beside these for their `best`")
    best: Literal["eval_reward", "eval_exact"] = "eval_reward"
    resume: bool = True
    checks: bool = Field(True, description="step-boundary checks: parameters in sync, denominators")
    max_skipped: NonNegativeInt = Field(
        10, description="steps in a row that may be skipped for a loss or gradient that is not finite"
    )
    timeout: PositiveFloat = Field(
        1800.0, description="seconds without progress after which the run ends and the rank that hangs is named"
    )
    grace: PositiveFloat = Field(
        120.0,
        description="seconds that the launcher leaves between its signal and the kill; told if saving takes longer",
    )
    straggler_every: NonNegativeInt = Field(0, description="steps between reports of the slowest ranks; 0: none")


class EvalConfig(Section):
    every: NonNegativeInt = Field(20, description="steps between evaluations; 0: never")
    at_start: bool = True
    split: Literal["train", "valid", "test"] = "test"
    limit: PositiveInt | None = Field(None, description="problems; default: all")
    steps: PositiveInt | None = Field(None, description="denoising steps; default: rollout.steps")
    gen_length: PositiveInt | None = None
    block_length: PositiveInt | None = None
    temperature: NonNegativeFloat = 0.0


class StreamConfig(Section):
    layers: bool = Field(False, description="run layers and head forward and backward in chunks of tokens")
    chunk_tokens: PositiveInt = Field(1024, description="tokens of a chunk, over the ranks that share a row")
    head_tokens: PositiveInt = Field(256, description="rows of logits that exist at a time")
    save: Literal["input", "input+attention"] = "input"
    offload: Literal["none", "cpu"] = Field("none", description="cpu: layer inputs wait in pinned host memory")
    window: Literal["layer", "stage"] = Field(
        "stage", description="streamed schedule: send units through the whole stage one by one, or rows layer by layer"
    )


class PipelineConfig(Section):
    schedule: Literal["megatron", "streamed"] = Field(
        "megatron", description="streamed: chunks cross stage boundaries as soon as they are done"
    )
    slack: PositiveInt | None = Field(
        None, description="forwards by which a stage runs ahead of the next; default: from the units' costs"
    )
    trace: bool = Field(False, description="write what every stage did and when to out/trace (tools/trace.py draws it)")


class ObserveConfig(Section):
    profile_from: PositiveInt | None = Field(None, description="first step whose profile goes to out/profile")
    profile_steps: PositiveInt = 1
    memory_snapshot: bool = Field(False, description="keep the allocator's history; written to out/ when memory ends")
    peak_tflops: PositiveFloat | None = Field(
        None, description="of one device in the model's dtype; default: known GPUs"
    )
    plan: bool | None = Field(
        None, description="plan the memory of a step at the start, beside what is measured; default: on GPUs"
    )
    wandb: str | None = Field(None, description="project to log to (pip install wandb)")


class PlannedConfig(Section):
    """What the planner predicts for a full row of `train.row_tokens`, in GiB: written by a run, read by people."""

    peak_gib: NonNegativeFloat
    stage: NonNegativeInt = Field(0, description="pipeline stage that needs most")
    parts_gib: dict[str, NonNegativeFloat] = {}


def _task_from_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class RunConfig(Section):
    """A whole run. `task: name` is short for `task: {name: name}`."""

    out: str = Field(description="run folder: checkpoints, metrics, resolved configuration")
    seed: NonNegativeInt = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensorboard: bool = True
    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    task: Annotated[TaskConfig, BeforeValidator(_task_from_name)]
    prefix: PrefixConfig = PrefixConfig()
    rollout: RolloutConfig = RolloutConfig()
    noise: NoiseConfig = NoiseConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    stream: StreamConfig = StreamConfig()
    pipeline: PipelineConfig = PipelineConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()
    planned: PlannedConfig | None = Field(None, description="written to out/config.yaml by observe.plan; no setting")
