"""What would stop a run or slow it down, found before process groups form.

`gather` looks at the machine, the installed packages and the run folder once; `CHECKS` are pure functions over what it
found. `megamem train` runs them by itself (`examine`) and tells warnings and errors; `megamem doctor` tells everything.
"""

import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megamem.config.rules import RULES
from megamem.config.schema import RunConfig
from megamem.errors import RankError, UserError
from megamem.platform.launch import Ranks
from megamem.platform.machine import QUEUES, Machine, listen_problem, this_machine
from megamem.train.checkpoint import list_checkpoints
from megamem.train.prepare import ModelFolder, Prepared

_CANARY_SECONDS = 60.0  # above the half minute for which a network file system may remember an old folder
_OPTIMIZER_BYTES = 12  # of a parameter: fp32 weight and two moments
_OPTIONAL = ("wandb",)
# Where torchrun looks for its --shutdown-timeout, in its order.
_SHUTDOWN = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


@dataclass(frozen=True)
class Finding:
    """One line. `what` is the check; an error stops the run, a warning does not."""

    level: Literal["ok", "warning", "error"]
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}: {self.text}"


@dataclass(frozen=True)
class Facts:
    """What the checks look at.

    Attributes:
        model: None where it could not be read.
        environ: environment variables.
        python: version of the interpreter.
        requirements: of megamem's own package, in pip's notation; empty if it is not installed.
        installed: installed packages among these and the optional ones -> (version, Python versions it allows).
        port, port_problem: TCP port on which this process will have to listen, and why it cannot ("": it can).
        free: bytes free where the run folder is.
        checkpoints: complete checkpoints in the run folder.
        canary: whether this node sees the file that rank 0 wrote into the run folder; None where nobody looks (on rank
            0's node, or without a run folder, which `prepare` makes or finds fault with).
    """

    config: RunConfig
    model: ModelFolder | None
    ranks: Ranks
    environ: Mapping[str, str]
    machine: Machine
    python: str
    requirements: tuple[str, ...]
    installed: Mapping[str, tuple[str, str]]
    port: int | None
    port_problem: str
    free: int
    checkpoints: int
    canary: bool | None


Check = Callable[[Facts], Iterator[Finding]]


def divisibility(facts: Facts) -> Iterator[Finding]:
    """The rules that join several keys; `prepare` stops at the first two."""
    if facts.model is None:
        return
    broken = [text for rule in RULES for text in rule(facts.config, facts.model.arch, facts.ranks.world)]
    yield from (Finding("error", "configuration", text) for text in broken)
    if not broken:
        yield Finding("ok", "configuration", f"keeps all {len(RULES)} rules")


def processes(facts: Facts) -> Iterator[Finding]:
    """One process per GPU."""
    ranks, own, gpus = facts.ranks, facts.ranks.local_world, facts.machine.gpus
    told = f"{ranks.world} in all ({ranks.source}), {own or 'unknown how many'} on a node; {facts.machine.host} "
    told += f"shows {gpus} GPUs" if gpus else "shows no GPU"
    if gpus and own and own > gpus:
        yield Finding("error", "processes", f"{told}; allowed: at most one process per GPU")
    elif gpus and own and own < gpus:
        yield Finding("warning", "processes", f"{told}, {gpus - own} of which stay idle")
    else:
        yield Finding("ok", "processes", told)


def versions(facts: Facts) -> Iterator[Finding]:
    """Installed packages against the ranges of docs/versions.md, and Python against the packages' own."""
    if not facts.requirements:
        yield Finding("warning", "versions", "megamem is not installed (pip install -e .), so none could be compared")
    unmet = False
    for requirement in map(Requirement, facts.requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        for finding in _version(requirement, facts):
            unmet = True
            yield finding
    if facts.requirements and not unmet:
        main = ", ".join(f"{name} {facts.installed[name][0]}" for name in ("torch", "megatron-core"))
        yield Finding("ok", "versions", f"Python {facts.python}, {main}: in the range that is meant to work")


def _version(requirement: Requirement, facts: Facts) -> Iterator[Finding]:
    name, allowed = requirement.name, requirement.specifier
    if name not in facts.installed:
        yield Finding("error", "versions", f"{name} is not installed; allowed: {allowed}")
        return
    version, pythons = facts.installed[name]
    if not SpecifierSet(pythons).contains(facts.python, prereleases=True):
        yield Finding("error", "versions", f"Python {facts.python}: {name} {version} needs Python {pythons}")
    broken = [s for s in allowed if not s.contains(version, prereleases=True)]
    if broken:
        # Too new may work, too old lacks something that is used.
        level = "warning" if all(s.operator.startswith("<") for s in broken) else "error"
        yield Finding(level, "versions", f"{name} = {version} is outside the range that is meant to work: {allowed}")


def kernels(facts: Facts) -> Iterator[Finding]:
    """Which kernels will be used, and what it costs where the fast ones are missing."""
    machine, found = facts.machine, facts.machine.kernels
    if not machine.gpus:
        if facts.config.model.kernel == "flex":
            told = "model.kernel = flex: torch trains with FlexAttention on GPUs only; allowed here: partitioned"
            yield Finding("error", "kernels", told)
        else:
            yield Finding("ok", "kernels", "CPU reference kernels")
        return
    for package, problem in found.items():
        if problem:
            yield Finding("warning", "kernels", f"{package} is installed but cannot be imported ({problem})")
    usable = next((package for package, problem in found.items() if problem == ""), None)
    if usable:
        yield Finding("ok", "kernels", f"fused Adam and gradient norm of {usable}")
    else:
        yield Finding(
            "warning",
            "kernels",
            f"neither {' nor '.join(found)}: torch's AdamW passes over the optimizer's memory several times a step and "
            "needs 4 bytes more per parameter meanwhile (pip install megamem[gpu]; PyPI's apex is another package)",
        )
    yield from _flash(facts)


def _flash(facts: Facts) -> Iterator[Finding]:
    machine, dtype = facts.machine, facts.config.model.dtype
    head_dim = facts.model.arch.head_dim if facts.model else 0
    slow = "attention goes tile by tile through explicit scores, many times slower"
    if facts.config.model.kernel == "flex" and facts.model and head_dim < 16:
        told = f"model.kernel = flex: the model's head_dim = {head_dim}; allowed: 16 and above, or partitioned"
        yield Finding("error", "kernels", told)
    elif facts.config.model.kernel == "flex":
        yield Finding("ok", "kernels", "torch's FlexAttention, compiled at the first row")
    elif dtype != "bfloat16":
        yield Finding("warning", "kernels", f"model.dtype = {dtype}: {slow}; flash attention serves bfloat16")
    elif head_dim % 8 or head_dim > 256:
        yield Finding("warning", "kernels", f"the model's head_dim = {head_dim}: {slow}; flash: multiples of 8 to 256")
    elif not machine.has_flash or machine.capability < (8, 0):
        major, minor = machine.capability
        yield Finding(
            "error",
            "kernels",
            f"no flash attention on {machine.gpu} (compute capability {major}.{minor}) in torch "
            f"{facts.installed.get('torch', ('?',))[0]}; needed: 8.0 or above and a torch built with it",
        )
    else:
        yield Finding("ok", "kernels", f"torch's flash attention on {machine.gpu}")


def queues(facts: Facts) -> Iterator[Finding]:
    """Up to Hopper, communication starts before the computation that hides it only with one hardware queue."""
    p, value = facts.config.parallel, facts.environ.get(QUEUES)
    if not facts.machine.gpus or p.tensor == 1 or facts.machine.capability >= (10, 0):
        return
    if value == "1":
        yield Finding("ok", "environment", f"{QUEUES} = 1")
        return
    yield Finding(
        "warning",
        "environment",
        f"{QUEUES} = {value or 'unset'} with parallel.tensor = {p.tensor} on {facts.machine.gpu}: communication is not "
        "hidden behind computation; set it to 1 (launch/env.sh does)",
    )


def port(facts: Facts) -> Iterator[Finding]:
    """The rendezvous can be opened."""
    if facts.port is None:
        return
    if facts.port_problem:
        yield Finding(
            "error",
            "port",
            f"MASTER_PORT = {facts.port} on {facts.machine.host}: {facts.port_problem}; choose another (1024 … 65535) "
            "or end what listens there",
        )
    else:
        yield Finding("ok", "port", f"MASTER_PORT = {facts.port} on {facts.machine.host} is free")


def shared_folder(facts: Facts) -> Iterator[Finding]:
    """Every node sees the run folder of rank 0."""
    if facts.canary is False:
        yield Finding(
            "error",
            "shared folder",
            f"out = {facts.config.out!r}: {facts.machine.host} does not see the file {canary_name(facts.ranks)} that "
            f"rank 0 writes there; the run folder must be on a file system that all nodes share",
        )
    elif facts.canary:
        yield Finding("ok", "shared folder", f"out = {facts.config.out!r}: seen by {facts.machine.host}")


def disk(facts: Facts) -> Iterator[Finding]:
    """Free space against what `train.keep` and `train.keep_best` ask for, and one that is being written."""
    if facts.model is None:
        return
    t, size = facts.config.train, checkpoint_bytes(facts.model, facts.config.model.dtype)
    missing = max(1, t.keep + t.keep_best + 1 - facts.checkpoints)
    told = (
        f"out = {facts.config.out!r}: {_size(facts.free)} free; a checkpoint takes about {_size(size)}, and "
        f"train.keep = {t.keep}, train.keep_best = {t.keep_best} and one being written make {missing} more"
    )
    if facts.free < size:
        yield Finding("error", "disk", f"{told}; not one fits")
    elif facts.free < missing * size:
        yield Finding("warning", "disk", f"{told}; {facts.free // size} fit")
    else:
        yield Finding("ok", "disk", told)


def checkpoint_bytes(model: ModelFolder, dtype: str) -> int:
    """About the bytes of a checkpoint: every Hugging Face tensor in the model's dtype and the optimizer's three."""
    maps = model.spec.tensor_maps(model.arch)
    shapes = {name: shape for m in maps for name, shape in zip(m.hf, m.shapes(model.arch), strict=True)}
    return sum(map(math.prod, shapes.values())) * (getattr(torch, dtype).itemsize + _OPTIMIZER_BYTES)


def _size(count: float) -> str:
    """Bytes as a person reads them."""
    units = iter(("B", "kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while count >= 999.5:
        count, unit = count / 1000, next(units)
    return f"{count:.3g} {unit}"


def grace(facts: Facts) -> Iterator[Finding]:
    """The launcher waits as long as the run believes."""
    asked, environ = facts.config.train.grace, facts.environ
    name = next((name for name in _SHUTDOWN if environ.get(name, "").isdecimal()), None)
    if facts.ranks.source != "torchrun" or name is None:
        return
    told = f"train.grace = {asked:g} s, torchrun kills after {name} = {environ[name]} s"
    if asked > int(environ[name]):
        yield Finding("warning", "grace", f"{told}; raise that, or lower train.grace")
    else:
        yield Finding("ok", "grace", told)


def observing(facts: Facts) -> Iterator[Finding]:
    """What the configuration asks for can be had here."""
    if facts.config.observe.wandb and "wandb" not in facts.installed:
        yield Finding(
            "error",
            "packages",
            f"observe.wandb = {facts.config.observe.wandb!r}: wandb is not installed (pip install wandb); allowed "
            "without: null",
        )
    if facts.config.observe.memory_snapshot and not facts.machine.gpus:
        yield Finding("warning", "memory", "observe.memory_snapshot = true: only GPUs' allocators keep a history")


# A check concerns the job (rank 0 tells) or each node (the first process of each; rank 0 tells for its own).
CHECKS: dict[Check, Literal["job", "node"]] = {
    divisibility: "job",
    processes: "node",
    versions: "node",
    kernels: "node",
    queues: "node",
    port: "job",
    shared_folder: "node",
    disk: "job",
    grace: "job",
    observing: "job",
}


def findings(facts: Facts) -> list[Finding]:
    """What the checks that concern this process, the first of its node, say."""
    checks = [check for check, whose in CHECKS.items() if whose == "node" or facts.ranks.rank == 0]
    return [finding for check in checks for finding in check(facts)]


def examine(
    prepared: Prepared, ranks: Ranks, environ: Mapping[str, str], wait: float = _CANARY_SECONDS
) -> list[Finding]:
    """Run the checks before process groups form; call `remove_canary` once they have.

    Args:
        environ: environment variables.
        wait: seconds that another node waits for rank 0's file.

    Returns:
        Warnings to tell, on rank 0; nothing elsewhere.

    Raises:
        UserError: rank 0 found an error; one line each.
        RankError: another node did, and only it knows.
    """
    if ranks.local_rank != 0:
        return []
    facts = gather(prepared.config, prepared.model, ranks, environ, wait)
    found = findings(facts)
    errors = [f"{f.what}: {f.text}" for f in found if f.level == "error"]
    if errors and ranks.rank == 0:
        remove_canary(Path(prepared.config.out), ranks)
        raise UserError("\n".join(errors))
    if errors:
        raise RankError("\n".join(f"{facts.machine.host}: {text}" for text in errors))
    return [f for f in found if f.level == "warning" and ranks.rank == 0]


def gather(
    config: RunConfig,
    model: ModelFolder | None,
    ranks: Ranks,
    environ: Mapping[str, str],
    wait: float = _CANARY_SECONDS,
) -> Facts:
    """Look at everything that the checks of this process need.

    Args:
        wait: seconds that another node waits for rank 0's file.
    """
    out = Path(config.out)
    if ranks.rank == 0:
        _write_canary(out, ranks)  # first: other nodes wait for it
    requirements = tuple(_requirements())
    listen = listening_port(ranks, environ)
    return Facts(
        config=config,
        model=model,
        ranks=ranks,
        environ=environ,
        machine=this_machine(ranks.local_rank),
        python=platform.python_version(),
        requirements=requirements,
        installed=_installed([*(Requirement(r).name for r in requirements), *_OPTIONAL]),
        port=listen,
        port_problem="" if listen is None else listen_problem(listen),
        free=shutil.disk_usage(next(p for p in (out, *out.absolute().parents) if p.exists())).free,
        checkpoints=len(list_checkpoints(out)),
        canary=_sees_canary(out, ranks, wait),
    )


def _requirements() -> list[str]:
    try:
        return metadata.requires("megamem") or []
    except metadata.PackageNotFoundError:
        return []


def _installed(names: list[str]) -> dict[str, tuple[str, str]]:
    found = {}
    for name in names:
        try:
            package = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = (package["Version"], package.get("Requires-Python", ""))
    return found


def listening_port(ranks: Ranks, environ: Mapping[str, str]) -> int | None:
    """The port that this process opens for the others, if it does."""
    by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun listens there already
    if ranks.rank != 0 or ranks.world == 1 or by_agent:
        return None
    _, _, port = (ranks.init_method or "").removeprefix("tcp://").rpartition(":")
    told = port if port.isdecimal() else environ.get("MASTER_PORT", "")
    return int(told) if told.isdecimal() else None


def canary_name(ranks: Ranks) -> str:
    """The file that tells whether nodes share the run folder; of this start only, so that no old one deceives."""
    return f".canary-{ranks.job}"


def _write_canary(out: Path, ranks: Ranks) -> None:
    if ranks.nodes == 1 or not out.is_dir():
        return
    for old in out.glob(".canary-*"):  # of a start that was killed
        old.unlink(missing_ok=True)
    (out / canary_name(ranks)).touch()


def _sees_canary(out: Path, ranks: Ranks, wait: float) -> bool | None:
    if ranks.rank == 0 or not out.is_dir():
        return None
    deadline = time.monotonic() + wait
    # Listing opens the folder, which makes a network file system ask again; looking for one name may not.
    while canary_name(ranks) not in os.listdir(out):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def remove_canary(out: Path, ranks: Ranks) -> None:
    """Rank 0 removes its file from the run folder `out`; by then every node has seen it."""
    if ranks.rank == 0:
        (out / canary_name(ranks)).unlink(missing_ok=True)
