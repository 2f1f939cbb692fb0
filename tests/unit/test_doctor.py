"""`megamem doctor`: every check on pretended facts, what is gathered from the machine, and the command itself."""

import json
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megamem.cli.doctor import diagnose, report
from megamem.cli.main import app, train
from megamem.errors import RankError, UserError
from megamem.platform import machine as machine_module
from megamem.platform.launch import Ranks
from megamem.platform.machine import QUEUES, Machine, listen_problem, this_machine
from megamem.train import doctor
from megamem.train.doctor import CHECKS, Facts, Finding, checkpoint_bytes, examine, gather, remove_canary
from megamem.train.prepare import open_model, prepare
from tests.dist.harness import tiny_config, tiny_model, tiny_settings
from tests.helpers import refused

CPU = Machine("node0")
HOPPER = Machine("node0", 8, "H800", (9, 0), True, {"Transformer Engine": "", "apex": None})
BLACKWELL = replace(HOPPER, gpu="B200", capability=(10, 0))
VERSIONS = {
    "torch": ("2.13.0+cpu", ">=3.10"),
    "megatron-core": ("0.16.1", ">=3.10"),
    "wandb": ("0.20.0", ">=3.8"),
}
REQUIREMENTS = ("torch>=2.6", "megatron-core<0.20,>=0.16", 'pytest>=8; extra == "test"')
ALONE = Ranks(0, 1, 0, None, "single process", "local", 1, 1)
SLURM = Ranks(0, 16, 0, "tcp://node0:15001", "Slurm", "slurm-1-0-0", 8, 2)
SECOND_NODE = replace(SLURM, rank=8)
HALF = ("model.dtype=bfloat16",)
SPLIT = (*HALF, "parallel.tensor=2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def pretend(folder: Path, *overrides: str, **changes) -> Facts:
    """A healthy single process on a CPU, but for `changes`."""
    facts = Facts(
        config=tiny_config(folder, Path("run"), *overrides),
        model=open_model(folder),
        ranks=ALONE,
        environ={},
        machine=CPU,
        python="3.11.7",
        requirements=REQUIREMENTS,
        installed=VERSIONS,
        port=None,
        port_problem="",
        free=10**12,
        checkpoints=0,
        canary=None,
    )
    return replace(facts, **changes)


def without(*names: str) -> dict[str, tuple[str, str]]:
    return {name: value for name, value in VERSIONS.items() if name not in names}


def versions_with(**changes: tuple[str, str]) -> dict[str, tuple[str, str]]:
    return VERSIONS | {name.replace("_", "-"): value for name, value in changes.items()}


# A checkpoint of the tiny model: 337 kB. Name of the check, overrides, changes, level, what the one finding must say.
TABLE = [
    ("divisibility", (), {}, "ok", ["rules"]),
    ("processes", (), {}, "ok", ["1 in all (single process)", "node0 shows no GPU"]),
    ("processes", (), {"ranks": SLURM, "machine": HOPPER}, "ok", ["16 in all (Slurm), 8 on a node", "8 GPUs"]),
    (
        "processes", (), {"ranks": replace(SLURM, local_world=16), "machine": HOPPER}, "error",
        ["16 on a node", "node0 shows 8 GPUs", "at most one process per GPU"],
    ),
    ("processes", (), {"ranks": replace(SLURM, local_world=3), "machine": HOPPER}, "warning", ["5 of which stay idle"]),
    ("processes", (), {"ranks": replace(SLURM, local_world=None), "machine": HOPPER}, "ok", ["unknown how many"]),
    ("versions", (), {}, "ok", ["Python 3.11.7, torch 2.13.0+cpu, megatron-core 0.16.1"]),
    ("versions", (), {"requirements": ()}, "warning", ["megamem is not installed", "pip install -e ."]),
    ("versions", (), {"installed": without("torch")}, "error", ["torch is not installed", ">=2.6"]),
    (
        "versions", (), {"installed": versions_with(megatron_core=("0.15.2", ">=3.10"))}, "error",
        ["megatron-core = 0.15.2", "<0.20,>=0.16"],
    ),
    ("versions", (), {"installed": versions_with(megatron_core=("0.20.0", ""))}, "warning", ["megatron-core = 0.20.0"]),
    (
        "versions", (), {"installed": versions_with(megatron_core=("0.17.0", ">=3.12"))}, "error",
        ["Python 3.11.7", "megatron-core 0.17.0 needs Python >=3.12"],
    ),
    ("versions", (), {"installed": versions_with(torch=("2.9.0a0+50eac811a6.nv25.09", ">=3.10"))}, "ok", ["2.9.0a0"]),
    ("kernels", (), {}, "ok", ["CPU reference kernels"]),
    ("queues", SPLIT, {"machine": HOPPER, "environ": {QUEUES: "1"}}, "ok", [f"{QUEUES} = 1"]),
    (
        "queues", SPLIT, {"machine": HOPPER}, "warning",
        [f"{QUEUES} = unset", "parallel.tensor = 2", "H800", "set it to 1", "launch/env.sh"],
    ),
    ("queues", SPLIT, {"machine": HOPPER, "environ": {QUEUES: "8"}}, "warning", [f"{QUEUES} = 8"]),
    ("queues", SPLIT, {}, None, []),
    ("queues", HALF, {"machine": HOPPER}, None, []),
    ("queues", SPLIT, {"machine": BLACKWELL}, None, []),
    ("port", (), {}, None, []),
    ("port", (), {"port": 29500}, "ok", ["29500 on node0 is free"]),
    ("port", (), {"port": 29500, "port_problem": "in use"}, "error", ["MASTER_PORT = 29500 on node0: in use", "1024"]),
    ("shared_folder", (), {}, None, []),
    ("shared_folder", (), {"ranks": SECOND_NODE, "canary": True}, "ok", ["out = 'run'", "seen by node0"]),
    (
        "shared_folder", (), {"ranks": SECOND_NODE, "canary": False}, "error",
        ["out = 'run'", "node0 does not see the file .canary-slurm-1-0-0", "file system that all nodes share"],
    ),
    ("disk", (), {}, "ok", ["1 TB free", "takes about 337 kB"]),
    ("disk", (), {"free": 300_000}, "error", ["out = 'run'", "300 kB free", "train.keep = 3", "not one fits"]),
    ("disk", (), {"free": 1_000_000}, "warning", ["4 more", "2 fit"]),
    ("disk", ("train.keep=1", "train.keep_best=2"), {"free": 1_000_000}, "warning", ["train.keep_best = 2", "4 more"]),
    ("disk", (), {"free": 1_000_000, "checkpoints": 2}, "ok", ["2 more"]),
    ("disk", (), {"free": 300_000, "checkpoints": 9}, "error", ["1 more", "not one fits"]),
    ("disk", (), {"free": 0, "model": None}, None, []),
    ("kernels", ("model.kernel=flex",), {}, "error", ["model.kernel = flex", "GPUs only", "partitioned"]),
    ("observing", (), {"installed": without("wandb")}, None, []),
    ("observing", ("observe.wandb=x",), {}, None, []),
    (
        "observing", ("observe.wandb=x",), {"installed": without("wandb")}, "error",
        ["observe.wandb = 'x'", "pip install wandb", "null"],
    ),
]  # fmt: skip
CHECK = {check.__name__: check for check in CHECKS}


@pytest.mark.parametrize(("name", "overrides", "changes", "level", "told"), TABLE)
def test_checks(tiny, name, overrides, changes, level, told):
    found = list(CHECK[name](pretend(tiny, *overrides, **changes)))
    assert [f.level for f in found] == ([level] if level else [])
    assert all(text in found[0].text for text in told), found
    assert all("\n" not in str(f) for f in found)


def test_every_check_is_tested():
    assert set(CHECK) == {row[0] for row in TABLE} | {"grace"}


def test_all_broken_rules_are_told(tiny):
    """`prepare` stops at two."""
    facts = pretend(tiny, "parallel.tensor=3", "optimizer.warmup_steps=9", "rollout.group=1", "noise.estimator=full")
    texts = [f.text for f in doctor.divisibility(facts) if f.level == "error"]
    for word in ("parallel.tensor x parallel.pipeline = 3 x 1", "must divide the model's heads", "rollout.group = 1",
                 "optimizer.warmup_steps = 9", "noise.estimator = full"):  # fmt: skip
        assert any(word in text for text in texts), texts


KERNELS = [
    (HALF, HOPPER, [("ok", "Adam and gradient norm of Transformer Engine"), ("ok", "flash attention on H800")]),
    (
        HALF, replace(HOPPER, kernels={"Transformer Engine": None, "apex": ""}),
        [("ok", "gradient norm of apex"), ("ok", "flash")],
    ),
    (
        HALF, replace(HOPPER, kernels={"Transformer Engine": None, "apex": None}),
        [("warning", "neither Transformer Engine nor apex: torch's AdamW"), ("ok", "flash")],
    ),
    (
        HALF, replace(HOPPER, kernels={"Transformer Engine": "OSError: undefined symbol", "apex": ""}),
        [("warning", "Transformer Engine is installed but cannot be imported (OSError: und"), ("ok", ""), ("ok", "")],
    ),
    ((*HALF, "model.kernel=flex"), HOPPER, [("ok", "Adam"), ("error", "flex: the model's head_dim = 8")]),
    ((), HOPPER, [("ok", "Adam"), ("warning", "model.dtype = float32: attention goes tile by tile")]),
    (HALF, replace(HOPPER, has_flash=False), [("ok", "Adam"), ("error", "torch 2.13.0+cpu; needed")]),
    (HALF, replace(HOPPER, capability=(7, 5)), [("ok", "Adam"), ("error", "compute capability 7.5")]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "machine", "told"), KERNELS)
def test_kernels_of_a_gpu(tiny, overrides, machine, told):
    found = list(doctor.kernels(pretend(tiny, *overrides, machine=machine)))
    assert [f.level for f in found] == [level for level, _ in told], found
    assert all(text in f.text for f, (_, text) in zip(found, told, strict=True)), found


def test_head_dims_without_a_flash_kernel(tiny):
    facts = pretend(tiny, *HALF, machine=HOPPER)
    arch = facts.model.arch.model_copy(update={"head_dim": 20})
    found = list(doctor.kernels(replace(facts, model=replace(facts.model, arch=arch))))
    assert found[-1].level == "warning" and "head_dim = 20" in found[-1].text
    flexible = pretend(tiny, *HALF, "model.kernel=flex", machine=HOPPER)
    found = list(doctor.kernels(replace(flexible, model=replace(facts.model, arch=arch))))
    assert found[-1].level == "ok" and "FlexAttention" in found[-1].text


@pytest.mark.parametrize(
    ("source", "environ", "level", "told"),
    [
        ("torchrun", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"}, "warning", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT = 30 s"),
        ("torchrun", {"PET_SHUTDOWN_TIMEOUT": "30"}, "warning", "kills after PET_SHUTDOWN_TIMEOUT = 30 s"),
        (
            "torchrun", {"PET_SHUTDOWN_TIMEOUT": "90", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"}, "ok",
            "train.grace = 90 s, torchrun kills after PET_SHUTDOWN_TIMEOUT = 90 s",
        ),
        ("torchrun", {}, None, ""),
        ("Slurm", {"PET_SHUTDOWN_TIMEOUT": "30"}, None, ""),
    ],
)  # fmt: skip
def test_grace(tiny, source, environ, level, told):
    facts = pretend(tiny, "train.grace=90", environ=environ, ranks=replace(ALONE, source=source))
    found = list(doctor.grace(facts))
    assert [f.level for f in found] == ([level] if level else [])
    assert not found or ("train.grace = 90 s" in found[0].text and told in found[0].text)


def test_checkpoint_bytes(tmp_path, groups):
    """Against a checkpoint on the disk; the model's vocabulary is padded there, 87 rows to 128."""
    from megamem.train.checkpoint import CheckpointInfo
    from megamem.train.run import build_run
    from megamem.train.save import begin_checkpoint

    folder = tiny_model(tmp_path / "model", d_model=128, mlp_hidden_size=384)
    config = tiny_config(folder, tmp_path / "run")
    run = build_run(prepare(config, 1), groups, training=True)
    run.optimizer.step()  # of no gradient; its moments exist from here on
    target, info = tmp_path / "run" / "checkpoints" / "step_000000", CheckpointInfo("llada", 0, True, "float32")
    begin_checkpoint(target, info, run.model, groups, folder, run.optimizer, config).advance(wait=True)
    real = sum(path.stat().st_size for path in target.rglob("*"))
    told = checkpoint_bytes(open_model(folder), "float32")
    assert 0.9 * real < told < real, (told, real)
    parameters = sum(p.numel() for p in run.model.parameters()) - 2 * (128 - 87) * 128
    assert told == 16 * parameters
    assert checkpoint_bytes(open_model(folder), "bfloat16") == 14 * parameters
    assert len(doctor.list_checkpoints(tmp_path / "run")) == 1


@pytest.fixture
def taken_port():
    """A port of this machine on which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_listen_problem(taken_port):
    with socket.socket() as other:
        other.bind(("", 0))
        free = other.getsockname()[1]
    assert listen_problem(free) == ""
    assert listen_problem(taken_port) == "in use"
    assert listen_problem(70000) == "not a port"


@pytest.mark.parametrize(
    ("ranks", "environ", "port"),
    [
        (SLURM, {"MASTER_PORT": "29500"}, 15001),
        (replace(SLURM, init_method="env://"), {"MASTER_PORT": "29500"}, 29500),
        (replace(SLURM, init_method="env://"), {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}, None),
        (replace(SLURM, init_method=None), {"MASTER_PORT": "29500"}, 29500),
        (replace(SLURM, init_method="file:///x/rendezvous"), {}, None),
        (SECOND_NODE, {}, None),
        (ALONE, {"MASTER_PORT": "29500"}, None),
    ],
)
def test_who_listens(ranks, environ, port):
    assert doctor.listening_port(ranks, environ) == port


def test_packages_that_can_be_imported(monkeypatch):
    monkeypatch.setattr(
        machine_module, "_KERNELS", {"a": "json.decoder", "b": "no_such_package.x", "c": "json.missing"}
    )
    for name, value in {"is_available": True, "device_count": 2}.items():
        monkeypatch.setattr(machine_module.torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(machine_module.torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(machine_module.torch.cuda, "get_device_capability", lambda index: (9, 0))
    found = this_machine(5)  # more processes than GPUs is a finding, not a crash
    assert (found.gpus, found.gpu, found.capability) == (2, "GPU 1", (9, 0))
    assert found.kernels == {"a": "", "b": None, "c": "ModuleNotFoundError: No module named 'json.missing'"}


def test_a_process_without_a_gpu_tells_it_itself(tiny, tmp_path, monkeypatch):
    for name, value in {"is_available": True, "device_count": 2}.items():
        monkeypatch.setattr(machine_module.torch.cuda, name, lambda value=value: value)
    with pytest.raises(RankError, match="local rank 2 has no GPU"):
        diagnose(tiny_config(tiny, tmp_path, "device=auto"), replace(SLURM, rank=2, local_rank=2), {}, None, None)


def test_what_is_gathered_here(tiny, tmp_path):
    facts = gather(tiny_config(tiny, tmp_path / "not" / "there"), None, ALONE, {})
    assert {name: facts.installed[name] for name in ("torch", "megatron-core")} and facts.free > 0
    assert any(text.startswith("megatron-core") for text in facts.requirements)
    assert facts.checkpoints == 0 and facts.port is None and facts.canary is None
    assert not (tmp_path / "not").exists()


class Nodes:
    """Two nodes of eight processes: `share` tells whether they see one run folder."""

    def __init__(self, model: Path, root: Path, share: bool):
        self.runs = [tiny_config(model, root / name, "rollout.prompts=16") for name in ("a", "a" if share else "b")]
        self.prepared = [prepare(run, 16) for run in self.runs]
        self.outs = [Path(run.out) for run in self.runs]

    def gather(self, node: int, wait: float = 0.3) -> Facts:
        return gather(self.runs[node], self.prepared[node].model, (SLURM, SECOND_NODE)[node], {}, wait)


@pytest.fixture
def quiet(monkeypatch):
    """Whether a port of this machine is free is not the question."""
    monkeypatch.setattr(doctor, "listen_problem", lambda port: "")


def test_canary(tiny, tmp_path, quiet):
    nodes = Nodes(tiny, tmp_path, share=True)
    old = nodes.outs[0] / ".canary-slurm-0"
    old.touch()
    assert nodes.gather(0).canary is None
    assert not old.exists() and (nodes.outs[0] / ".canary-slurm-1-0-0").exists()
    assert nodes.gather(1).canary is True
    remove_canary(nodes.outs[0], SECOND_NODE)
    assert nodes.gather(1).canary is True, "only rank 0 removes it"
    remove_canary(nodes.outs[0], SLURM)
    assert nodes.gather(1).canary is False


def test_canary_that_comes_late(tiny, tmp_path, quiet):
    nodes = Nodes(tiny, tmp_path, share=True)
    late = threading.Timer(0.4, nodes.gather, [0])
    late.start()
    assert nodes.gather(1, wait=20.0).canary is True
    late.join()


def test_canary_of_another_folder(tiny, tmp_path, quiet):
    """The second node says so itself; rank 0 cannot know."""
    nodes = Nodes(tiny, tmp_path, share=False)
    assert examine(nodes.prepared[0], SLURM, {}) == []
    with pytest.raises(RankError) as caught:
        examine(nodes.prepared[1], SECOND_NODE, {}, wait=0.3)
    host = socket.gethostname()
    for text in (f"{host}: shared folder", f"out = {str(nodes.outs[1])!r}", "file system that all nodes share"):
        assert text in str(caught.value)


def test_examine(tiny, tmp_path, monkeypatch):
    """An unremarkable run tells nothing, in no time; a warning goes to rank 0; an error ends the run."""
    prepared = prepare(tiny_config(tiny, tmp_path / "run"), 2)
    first = Ranks(0, 2, 0, "env://", "torchrun", "job", 1, 2)
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1"}
    started = time.monotonic()
    assert examine(prepared, first, agents) == []
    assert time.monotonic() - started < 1.0
    assert (tmp_path / "run" / ".canary-job").exists()
    free = {"bytes": 10**6}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, free["bytes"]))
    (warning,) = examine(prepared, first, agents)
    assert warning.level == "warning" and str(warning).startswith("warning: disk: out = ")
    assert examine(prepared, replace(first, rank=1, local_rank=1), agents) == []
    free["bytes"] = 1000
    message = refused(examine, prepared, first, agents)
    assert "disk: out = " in message and "1 kB free" in message and "not one fits" in message
    assert not (tmp_path / "run" / ".canary-job").exists()


def write_settings(model: Path, root: Path) -> str:
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(model, root / "run")), encoding="utf-8")
    return str(path)


def run_doctor(*arguments: str, **environ: str):
    return CliRunner().invoke(app, ["doctor", *arguments], env=environ)


def test_command(tiny, tmp_path):
    done = run_doctor(write_settings(tiny, tmp_path))
    lines = done.stdout.splitlines()
    assert done.exit_code == 0, done.output
    assert {line.split(":")[0] for line in lines} == {
        "ok       configuration", "ok       processes", "ok       versions", "ok       kernels", "ok       disk",
    }  # fmt: skip


def test_command_tells_everything_at_once(tiny, tmp_path, taken_port):
    """Broken rules, a missing package and a taken port of a job that is only meant."""
    config = write_settings(tiny, tmp_path)
    wrong = ["parallel.tensor=3", "optimizer.warmup_steps=9", "rollout.group=1", "observe.wandb=x"]
    done = run_doctor(config, *wrong, "--world", "4", "--nodes", "2", "--json", MASTER_PORT=str(taken_port))
    told = json.loads(done.stdout)
    errors = [f["text"] for f in told["findings"] if f["level"] == "error"]
    assert done.exit_code == 2 and told["errors"] == len(errors) >= 6
    for text in ("does not divide the 4 processes", "heads = 4", "warmup_steps = 9", "rollout.group = 1",
                 f"MASTER_PORT = {taken_port}", "observe.wandb = 'x'"):  # fmt: skip
        assert any(text in error for error in errors), errors
    assert any(f["text"].startswith("4 in all (--world), 2 on a node") for f in told["findings"])


def test_command_without_a_model(tiny, tmp_path):
    """What needs no model is told all the same."""
    done = run_doctor(write_settings(tiny, tmp_path), f"model.path={tmp_path / 'none'}")
    assert done.exit_code == 2
    assert str(tmp_path / "none") in done.stdout and "ok       versions" in done.stdout


def test_command_with_a_broken_task(tiny, tmp_path):
    """`prepare` finds more than rules; rules are not told twice."""
    found = diagnose(tiny_config(tiny, tmp_path / "run", "task=no_such_task", "rollout.group=1"), ALONE, {}, None, None)
    assert [f.text.split()[0].rstrip(":") for f in found if f.level == "error"] == ["task.name", "rollout.group"]


def test_another_node_tells_its_own_errors(tiny, tmp_path):
    config = tiny_config(tiny, tmp_path / "run", "task=no_such_task")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / doctor.canary_name(SECOND_NODE)).touch()
    with pytest.raises(RankError, match="^" + socket.gethostname() + ": error: configuration: task.name"):
        diagnose(config, SECOND_NODE, {}, None, None)
    assert diagnose(config, replace(SECOND_NODE, rank=9, local_rank=1), {}, None, None) == []


def test_another_node_tells_what_a_start_lacks_there(tmp_path, monkeypatch):
    """Its first process does; the others and all of the first node leave it to rank 0 and to that one."""
    settings = tiny_settings(tmp_path / "nothing", tmp_path / "run")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    place = {"MASTER_ADDR": "n0", "MASTER_PORT": "9", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for rank in range(4):
        for name, value in (place | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match="nothing") as caught:
            train(tmp_path / "run.yaml")
        told = isinstance(caught.value, RankError)
        assert told == (rank == 2) and str(caught.value).startswith(socket.gethostname()) == told


@pytest.mark.parametrize(
    ("ranks", "world", "nodes", "told"),
    [
        (SLURM, 8, None, ["Slurm started 16 processes", "leave them out"]),
        (ALONE, 7, 2, ["--nodes = 2", "--world = 7"]),
    ],
)
def test_contradicting_numbers(tiny, tmp_path, ranks, world, nodes, told):
    message = refused(diagnose, tiny_config(tiny, tmp_path / "run"), ranks, {}, world, nodes)
    assert all(text in message for text in told), message


def test_report():
    found = [Finding("ok", "disk", "much"), Finding("error", "port", "in use")]
    assert report(found, as_json=False) == "ok       disk: much\nerror    port: in use"
    assert json.loads(report(found, as_json=True)) == {
        "findings": [
            {"level": "ok", "what": "disk", "text": "much"},
            {"level": "error", "what": "port", "text": "in use"},
        ],
        "errors": 1,
    }
