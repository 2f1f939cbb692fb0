"""A run on its devices: model, optimizer and runner of this rank, built from what `prepare` checked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megamem.config.architecture import Architecture
from megamem.config.schema import ModelConfig, RunConfig, StreamConfig
from megamem.convert.weights import load_weights
from megamem.layout.packing import Share
from megamem.models.build import build_model
from megamem.models.gpt import DiffusionGPT
from megamem.models.runner import Runner, StreamedPipeline
from megamem.ops.attention import attend
from megamem.ops.flex import flex_attend
from megamem.platform.groups import Groups, connect_stages
from megamem.platform.host import check_pinned_memory
from megamem.rollout.sampler import Decoding
from megamem.stream.layer import StreamOptions
from megamem.stream.trace import TraceFolder
from megamem.train.checkpoint import load_model, load_training, read_info
from megamem.train.draws import DrawnModel
from megamem.train.interrupt import Interrupts
from megamem.train.optim import build_optimizer, wrap_for_training
from megamem.train.phases import Phases
from megamem.train.prepare import Prepared, Prompt, weight_source
from megamem.train.sharing import choose_share

_PROMPTS_LOOKED_AT = 16  # to choose how prompts are shared
KERNELS = {"partitioned": attend, "flex": flex_attend}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(eq=False)
class Run:
    """What a step works with.

    Attributes:
        prepared: configuration, task, tokenizer, objective.
        groups: the process grid.
        model: this stage, bare; its weights are the ones being trained.
        trainer: runs rows through the stage wrapped for gradients; None for sampling and evaluation only.
        sampler: runs rows through the bare stage.
        phases: what this process is doing.
        interrupts: where it looks whether to stop.
        reference: runs rows through a stage with the initial weights, where the objective has a KL term to them.
        optimizer: megatron-core's; None without a trainer.
        prompts: training prompts.
        share: how draws of one prompt share it.
        finished: training steps done.
        skipped: so many of the last ones, in a row, had a loss or gradient that was not finite.
    """

    prepared: Prepared
    groups: Groups
    model: DiffusionGPT
    sampler: Runner
    phases: Phases
    interrupts: Interrupts
    trainer: Runner | None = None
    reference: Runner | None = None
    optimizer: Any = None
    prompts: Sequence[Prompt] = ()
    share: Share = "none"
    finished: int = 0
    skipped: int = 0

    @property
    def drawn_model(self) -> DrawnModel:
        """What rows of draws depend on in the model."""
        arch = self.prepared.model.arch
        mask_id = None if arch.attention == "causal" else arch.mask_id
        return DrawnModel(attention_name(arch, self.prepared.config.model), arch.shifted_logits, mask_id, self.share)

    def decoding(self, step: int, training: bool) -> Decoding:
        """Decoding settings of a training rollout or of an evaluation."""
        r, e, arch = self.prepared.config.rollout, self.prepared.config.eval, self.prepared.model.arch
        return Decoding(
            gen_length=r.gen_length if training else e.gen_length or r.gen_length,
            block_length=r.block_length if training else e.block_length or r.block_length,
            steps=r.steps if training else e.steps or r.steps,
            temperature=r.temperature if training else e.temperature,
            remasking=r.remasking,
            eos=r.eos,
            stop_at_eos=r.stop_at_eos,
            row_tokens=r.row_tokens,
            eos_id=arch.eos_id,
            mask_id=arch.mask_id,
            seed=self.prepared.config.seed,
            step=step,
        )


def attention_name(arch: Architecture, model: ModelConfig) -> str:
    """How a sequence attends: the model's own way, or the one asked for."""
    return arch.sequence_attention if model.attention == "native" else model.attention


def stream_options(config: StreamConfig) -> StreamOptions | None:
    """How layers stream, or None."""
    if not config.layers:
        return None
    return StreamOptions(config.chunk_tokens, config.head_tokens, config.save, config.offload)


def streamed_pipeline(config: RunConfig, groups: Groups) -> StreamedPipeline | None:
    """The streamed schedule, or None for megatron-core's. A collective call where there is one."""
    if config.pipeline.schedule != "streamed":
        return None
    links = connect_stages(groups)
    record = None
    if config.pipeline.trace and groups.dp.rank == groups.tp.rank == 0:
        record = TraceFolder(Path(config.out) / "trace", groups.pp.rank).write
    return StreamedPipeline(links, config.stream.window, config.pipeline.slack, record)


def build_run(
    prepared: Prepared,
    groups: Groups,
    training: bool,
    phases: Phases | None = None,
    interrupts: Interrupts | None = None,
) -> Run:
    """Build this rank's stage with its weights, and the optimizer if training; resumes where `prepare` said so."""
    config = prepared.config
    phases, interrupts = phases or Phases(groups.device), interrupts or Interrupts(groups)
    if config.stream.layers and config.stream.offload == "cpu":
        check_pinned_memory(groups.device)
    model = _build_stage(prepared, groups)
    if prepared.resume_from is None:
        _load_initial(model, prepared, groups)

    def poll() -> None:
        phases.goes_on()
        interrupts.poll()

    sampler = Runner(
        model, groups, attention_name(prepared.model.arch, config.model), streamed_pipeline(config, groups), poll
    )
    run = Run(prepared, groups, model, sampler, phases, interrupts)
    if training:
        _add_training(run, prepared.resume_from)
        if prepared.objective.penalty is not None:
            initial = _build_stage(prepared, groups)
            _load_initial(initial, prepared, groups)
            run.reference = replace(sampler, model=initial)
    return run


def _build_stage(prepared: Prepared, groups: Groups) -> DiffusionGPT:
    config = prepared.config
    return build_model(
        prepared.model.arch,
        groups,
        DTYPES[config.model.dtype],
        sequence_parallel=config.parallel.sequence,
        recompute=config.train.recompute == "full",
        stream=stream_options(config.stream),
        attend=KERNELS[config.model.kernel],
    )


def _load_initial(model: DiffusionGPT, prepared: Prepared, groups: Groups) -> None:
    """The weights a run starts from (a resumed run's reference policy has them, too)."""
    folder = prepared.model
    weights = prepared.weights or weight_source(folder, prepared.config)
    if weights is None:
        load_model(folder.path, model)
    else:
        load_weights(model, folder.spec.tensor_maps(folder.arch), folder.arch, weights, groups)


def _add_training(run: Run, resume_from: Path | None) -> None:
    config = run.prepared.config
    # Half a schedule or half a reduction cannot be given up: there an update is finished.
    gives_up = run.groups.pp.size == 1 and run.sampler.pipeline is None and not config.parallel.overlap_grad_reduce

    def before_reduction() -> None:
        run.phases.waits()
        if gives_up:
            run.interrupts.agree()

    ddp = wrap_for_training(run.model, config.parallel, before_reduction)
    run.trainer = replace(run.sampler, model=ddp, poll=run.sampler.poll if gives_up else None)
    run.optimizer = build_optimizer(ddp, config.optimizer, config.parallel)
    add_prompts(run)
    if resume_from is not None:
        load_training(resume_from, run.model, run.optimizer)
        run.finished = read_info(resume_from).step


def add_prompts(run: Run) -> None:
    """Training prompts, and how their draws share them."""
    config, arch = run.prepared.config, run.prepared.model.arch
    run.prompts, _ = run.prepared.prompts("train", config.rollout.gen_length)
    lengths = [len(prompt.ids) for prompt in run.prompts[:_PROMPTS_LOOKED_AT]]
    run.share = choose_share(config, arch, attention_name(arch, config.model), lengths)
