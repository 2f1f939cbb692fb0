"""`megamem COMMAND …`: parses, checks, starts process groups, runs.

A `UserError` is printed without a traceback, once per job (by `train`, before its groups form, once per node), and ends
with status 2.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megamem import __version__
from megamem.config.load import load_config, parse
from megamem.config.schema import RunConfig
from megamem.errors import RUN_AGAIN, RankError, UserError
from megamem.platform.launch import Ranks, discover_ranks, hush_dependencies, tells_mistakes

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
convert_app = typer.Typer(no_args_is_help=True, help="Hugging Face folders in and out.")
app.add_typer(convert_app, name="convert")
bench_app = typer.Typer(no_args_is_help=True, help="Measurements against the plain path, in one process.")
app.add_typer(bench_app, name="bench")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. parallel.tensor=2")]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration")]
ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="checkpoint, run folder or Hugging Face folder")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML; default: the checkpoint's own")]


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train. Start it under a launcher (launch/) for more than one process; resumes by default.

    Status 0: finished; 75: asked to stop by SIGTERM or SIGUSR1, saved, to be started again; 2: a mistake, told.
    """
    from megamem.cli.planned import planning
    from megamem.platform.signals import stop_signals
    from megamem.platform.watch import Watch
    from megamem.train.doctor import examine, remove_canary
    from megamem.train.prepare import prepare

    ranks = discover_ranks(os.environ)
    with _told_by_every_node(ranks):
        prepared = prepare(load_config(config, overrides or ()), ranks.world)
    settings, console = prepared.config, _console()
    for warning in examine(prepared, ranks, os.environ):
        console.print(str(warning), markup=False)
    with (
        stop_signals() as request,
        planning(settings, ranks, os.environ) as planned,
        _groups(ranks, settings) as groups,
        Watch(groups, request, settings.train.timeout) as watch,
    ):
        from megamem.train.loop import train as run_training
        from megamem.train.memory import memory_watched
        from megamem.train.phases import Phases

        remove_canary(Path(settings.out), ranks)
        phases = Phases(groups.device, watch.pulse)
        with memory_watched(settings, groups, phases):
            finished = run_training(prepared, groups, console, request.asked, phases, planned)
    if not finished:
        raise typer.Exit(RUN_AGAIN)


@app.command("eval")
def evaluate(
    model: ModelPath,
    overrides: Overrides = None,
    config: ConfigOption = None,
    out: Annotated[Path | None, typer.Option(help="write every problem, response and score here (JSONL)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Reward and exact rate of a model on eval.split, decoded as `eval` in the configuration says."""
    from megamem.cli.inference import evaluate_model

    ranks = discover_ranks(os.environ)
    settings = _settings(model, config, overrides or ())
    metrics = evaluate_model(settings, ranks, _groups, out)
    if ranks.rank == 0:
        print(json.dumps(metrics) if as_json else "  ".join(f"{k} {v:.4g}" for k, v in metrics.items()))


@app.command()
def sample(
    model: ModelPath,
    overrides: Overrides = None,
    prompt: Annotated[list[str] | None, typer.Option(help="text of the user's turn; may be given again")] = None,
    config: ConfigOption = None,
    count: Annotated[int, typer.Option(min=1, help="responses per prompt")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON lines")] = False,
) -> None:
    """Responses to your prompts, or to the first problems of eval.split, decoded as `rollout` says."""
    from megamem.cli.inference import sample_model

    ranks = discover_ranks(os.environ)
    answers = sample_model(_settings(model, config, overrides or ()), ranks, _groups, prompt or [], count)
    if ranks.rank == 0:
        for answer in answers:
            print(json.dumps(answer) if as_json else f"> {answer['prompt']}\n{answer['response']}\n")


@convert_app.command("import")
def convert_import(
    hf_dir: Annotated[Path, typer.Argument()], out: Annotated[Path, typer.Argument()], overrides: Overrides = None
) -> None:
    """Hugging Face folder -> checkpoint, e.g. with parallel.tensor=2 to spread the work."""
    from megamem.cli.convert import import_checkpoint

    import_checkpoint(hf_dir, out, overrides or ())
    print(f"wrote {out}")


@convert_app.command("export")
def convert_export(
    checkpoint: Annotated[Path, typer.Argument()],
    hf_dir: Annotated[Path, typer.Argument()],
    overrides: Overrides = None,
    dtype: Annotated[str | None, typer.Option(help="F32, BF16, F16 or F64; default: as imported")] = None,
) -> None:
    """Checkpoint (or run folder: its newest) -> Hugging Face folder."""
    from megamem.cli.convert import export_checkpoint

    export_checkpoint(_newest(checkpoint), hf_dir, overrides or (), dtype)
    print(f"wrote {hf_dir}")


@convert_app.command("verify")
def convert_verify(
    hf_dir: Annotated[Path, typer.Argument()],
    overrides: Overrides = None,
    reference: Annotated[Path | None, typer.Option(help="safetensors with input_ids and logits")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Import, compare logits with a reference, export, compare weights; status 1 if anything differs."""
    from megamem.cli.convert import verdict_text, verify

    verdict = verify(hf_dir, reference, overrides or ())
    print(verdict_text(verdict, as_json))
    if not verdict.passed:
        raise typer.Exit(1)


@bench_app.command("stream")
def bench_stream(
    tokens: Annotated[int, typer.Option(min=1)] = 4096,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    hidden: Annotated[int, typer.Option(min=1)] = 512,
    ffn: Annotated[int, typer.Option(min=1)] = 1536,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    vocab: Annotated[int, typer.Option(min=1)] = 32000,
    attention: Annotated[str, typer.Option(help="full, causal or block:N")] = "full",
    chunk_tokens: Annotated[int, typer.Option(min=1)] = 256,
    head_tokens: Annotated[int, typer.Option(min=1)] = 256,
    variants: Annotated[str, typer.Option(help="a comma-separated list; default: all")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="timed rounds; the median is told")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Peak memory, seconds and gradients: plain, full recompute and streamed layers, in one process."""
    from megamem.bench import stream
    from megamem.bench.measure import chosen_variants

    _check_heads(hidden, heads)
    if vocab % 128:  # the stock head gives the padding of the last rows a probability, ours does not
        raise UserError(f"--vocab = {vocab} must be a multiple of 128")
    stream.relation(attention)
    names = chosen_variants(variants, list(stream.variants(stream.Sizes())))
    sizes = stream.Sizes(tokens, layers, hidden, ffn, heads, vocab, chunk_tokens, head_tokens)
    with _alone() as groups:
        results = stream.bench_stream(sizes, attention, groups, repeats, _tell, names)
    print(json.dumps(stream.as_json(results, sizes, attention)) if as_json else stream.table(results))


@bench_app.command("bgpo")
def bench_bgpo(
    draws: Annotated[str, typer.Option(help="numbers of Monte-Carlo draws")] = "1,4,16,64",
    responses: Annotated[int, typer.Option(min=1, help="responses of an update")] = 2,
    prompt: Annotated[int, typer.Option(min=1)] = 32,
    response: Annotated[int, typer.Option(min=1)] = 32,
    layers: Annotated[int, typer.Option(min=1)] = 2,
    hidden: Annotated[int, typer.Option(min=1)] = 64,
    ffn: Annotated[int, typer.Option(min=1)] = 192,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    vocab: Annotated[int, typer.Option(min=3)] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="timed rounds; the median is told")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Peak memory and seconds of an update against the number of draws: BGPO, VRPO-OL replayed and with its graphs."""
    from megamem.bench import bgpo

    _check_heads(hidden, heads)
    numbers = bgpo.parse_draws(draws)
    sizes = bgpo.Sizes(responses, prompt, response, layers, hidden, ffn, heads, vocab)
    with _alone() as groups:
        results = bgpo.bench_bgpo(sizes, numbers, groups, repeats, _tell)
    print(json.dumps(bgpo.as_json(results, sizes)) if as_json else bgpo.table(results))


@bench_app.command("prefix")
def bench_prefix(
    prefix: Annotated[int, typer.Option(min=1, help="tokens of the prompt")] = 2048,
    suffix: Annotated[int, typer.Option(min=1, help="tokens of a response")] = 64,
    group: Annotated[int, typer.Option(min=1, help="responses")] = 8,
    draws: Annotated[int, typer.Option(min=1, help="noisy copies of a response (block-causal models)")] = 1,
    block: Annotated[
        int | None, typer.Option(min=0, help="tokens of a block; 0: causal; default: 0 for one draw, 32 for more")
    ] = None,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=1)] = 512,
    ffn: Annotated[int, typer.Option(min=1)] = 1536,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="default: heads")] = None,
    vocab: Annotated[int, typer.Option(min=3)] = 2048,
    row_tokens: Annotated[int, typer.Option(min=1, help="of a row, at most")] = 32768,
    chunk_tokens: Annotated[int, typer.Option(min=1)] = 512,
    head_tokens: Annotated[int, typer.Option(min=1)] = 256,
    variants: Annotated[str, typer.Option(help="a comma-separated list; default: all")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="timed rounds; the median is told")] = 3,
    count_only: Annotated[bool, typer.Option("--count-only", help="operations from the layouts; runs nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """A step on one prompt and its responses: repeated, Prefix Grouper's package (if installed), shared."""
    from megamem.bench import prefix as bench

    _check_heads(hidden, heads)
    names = bench.parse_variants(variants)
    block = (32 if draws > 1 else 0) if block is None else block
    sizes = bench.Sizes(
        prefix, suffix, group, draws, block, layers, hidden, ffn, heads, kv_heads or heads, vocab,
        row_tokens, chunk_tokens, head_tokens,
    )  # fmt: skip
    if count_only:
        flops = bench.count(sizes)
        print(json.dumps(bench.count_as_json(flops, sizes)) if as_json else bench.count_table(flops))
        return
    with _alone() as groups:
        results = bench.bench_prefix(sizes, groups, repeats, _tell, names)
    print(json.dumps(bench.as_json(results, sizes)) if as_json else bench.table(results))


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="of the job; also suggests a layout for them (takes minutes)")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    gpu_memory: Annotated[str, typer.Option(help="of one GPU, e.g. 80GB or 79GiB")] = "80GB",
    reserve: Annotated[str, typer.Option(help="of it for context, communication and fragmentation")] = "4GB",
    host_memory: Annotated[str, typer.Option(help="of one node, for offloaded layer inputs")] = "1TB",
    tokens: Annotated[int | None, typer.Option(min=1, help="of a row; default: train.row_tokens")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="micro-batches of a step; default: pipeline stages")] = None,
    stage: Annotated[int | None, typer.Option(help="pipeline stage; default: the one that needs most")] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="tokens of a prompt that its draws share: row or handle")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Memory of a training step, part by part, and the longest row that fits; needs no weights and no GPU.

    Rows run under megatron-core's pipeline schedule, whatever pipeline.schedule says.
    """
    settings = load_config(config, overrides or ())
    from megamem.cli.plan import plan_run
    from megamem.plan.planner import table

    told = lambda text: sys.stderr.write(f"{text}\n")  # noqa: E731
    found = plan_run(settings, gpus, gpus_per_node, gpu_memory, host_memory, reserve, tokens, rows, stage, prompt, told)
    print(json.dumps(found) if as_json else table(found))


@app.command()
def doctor(
    config: ConfigPath,
    overrides: Overrides = None,
    world: Annotated[int | None, typer.Option(min=1, help="processes of the job; default: those started")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes of the job, with --world")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """What would stop a run or slow it down, one line per finding; status 2 if one is an error.

    Under a launcher it looks at every node.
    """
    from megamem.cli.doctor import diagnose, report

    ranks = discover_ranks(os.environ)
    found = diagnose(load_config(config, overrides or ()), ranks, os.environ, world, nodes)
    if ranks.rank == 0:
        print(report(found, as_json))
    if any(finding.level == "error" for finding in found):
        raise typer.Exit(2)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@contextmanager
def _told_by_every_node(ranks: Ranks) -> Iterator[None]:
    """A mistake may lie on one node alone, as a file that only it lacks: its first process tells it, too."""
    try:
        yield
    except RankError:
        raise
    except UserError as error:
        if ranks.rank == 0 or ranks.local_rank != 0:
            raise
        raise RankError(f"{socket.gethostname()}: {error}") from None


def _groups(ranks: Ranks, config: RunConfig):
    """The process grid of a configuration, as a context manager."""
    from megamem.platform.device import resolve_device
    from megamem.platform.groups import process_groups

    device = resolve_device(config.device, ranks.local_rank)
    return process_groups(ranks, device, config.parallel.tensor, config.parallel.pipeline, config.train.timeout + 60)


def _alone():
    """The process groups of one process, as a context manager."""
    from megamem.platform.device import resolve_device
    from megamem.platform.groups import process_groups

    return process_groups(Ranks(0, 1, 0, None, "single process"), resolve_device("auto", 0), 1, 1)


def _check_heads(hidden: int, heads: int) -> None:
    if hidden % heads or hidden // heads % 2:
        raise UserError(f"--hidden = {hidden} over --heads = {heads} must give an even head dimension")


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _newest(path: Path) -> Path:
    """A run folder's newest whole checkpoint; anything else is returned as it is."""
    from megamem.train.checkpoint import choose_checkpoint

    found, notes = choose_checkpoint(path) if (path / "checkpoints").is_dir() else (None, ())
    for note in notes:
        _tell(note)
    return found or path


def _settings(model: Path, config: Path | None, overrides: list[str]) -> RunConfig:
    """The configuration for running a model: `--config`, or the one beside the checkpoint, with the model's path."""
    model = _newest(model)
    if not model.is_dir():
        raise UserError(f"{model}: no such folder; give a checkpoint, a run folder or a Hugging Face folder")
    beside = model / "config.yaml"
    source = config or (beside if beside.is_file() else None)
    chosen = ["model.init=checkpoint", "rollout.replay=null", "rollout.record=null"]
    if source is None:
        bare = {"out": str(model), "model": {"path": str(model)}, "task": "countdown"}
        return parse(bare, [*chosen, *overrides], str(model))
    return load_config(source, [f"model.path={model}", "tokenizer.path=null", *chosen, *overrides])


def run() -> None:
    """Entry point of the `megamem` script."""
    hush_dependencies()
    try:
        app()
    except UserError as error:
        if tells_mistakes(os.environ) or isinstance(error, RankError):
            sys.stderr.write(f"megamem: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    run()
