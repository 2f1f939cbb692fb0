"""What a run tells of itself: operations and their peak, profiles, the end of memory, the planner beside it, wandb."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from megamem.bench import prefix
from megamem.cli.planned import planning
from megamem.config.load import config_yaml, load_config
from megamem.config.schema import PlannedConfig
from megamem.errors import RankError
from megamem.layout.packing import RowShape
from megamem.ops.attention import naive_attend
from megamem.platform.child import environment_alone
from megamem.platform.launch import Ranks
from megamem.platform.machine import Machine
from megamem.platform.peaks import peak_tflops
from megamem.train.doctor import observing
from megamem.train.draws import DrawnModel, DrawRows
from megamem.train.interrupt import Interrupts
from megamem.train.journal import Journal
from megamem.train.memory import memory_watched
from megamem.train.phases import Phases
from megamem.train.profile import StepProfile
from megamem.train.step import learn_from_rollouts, make_updates
from megamem.train.wandb_log import WandbLog
from tests.dist.harness import build, tiny_config, tiny_model
from tests.helpers import file_size, refused

torch.set_num_threads(1)
ALONE = Ranks(0, 1, 0, None, "single process")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


# --- operations ------------------------------------------------------------------------------------------------------


def test_operations_are_those_that_torch_counts(model, tmp_path, groups):
    """A plain model with the reference's attention, one sequence in a row: all pairs of it see each other. The backward
    is twice the forward by definition."""
    run = build(tiny_config(model, tmp_path, "train.row_tokens=1"), groups)
    (update,) = make_updates(run, learn_from_rollouts(run, 0), 0)
    for layer in run.model.decoder.layers:
        layer.self_attention.core_attention.attend = naive_attend
    with FlopCounterMode(display=False) as counter:
        run.sampler.forward(update.rows)
    assert len(update.rows) > 4
    assert 3 * counter.get_total_flops() == update.rows.model_flops(run.prepared.model.arch)


@pytest.mark.parametrize("sizes", [prefix.Sizes(prefix=48, suffix=6, group=4), prefix.Sizes(50, 8, 3, 3, block=4)])
def test_a_shared_prompt_counts_once_and_fillers_do_not(sizes):
    arch, samples = sizes.architecture(), prefix._Group(sizes)._samples

    def count(share, multiple=1):
        drawn = DrawnModel(arch.sequence_attention, arch.shifted_logits, arch.mask_id, share)
        rows = DrawRows(samples, drawn, RowShape(1000, multiple), torch.device("cpu"))
        return rows.model_flops(arch)

    assert count("handle") == count("row") < count("none")
    assert all(count(share, multiple=64) == count(share) for share in ("none", "row", "handle"))


@pytest.mark.parametrize(
    ("gpu", "dtype", "tf32", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, False, 756.0),
        ("NVIDIA H200", torch.bfloat16, True, 989.4),
        ("NVIDIA L40S", torch.bfloat16, False, 362.0),
        ("NVIDIA L4", torch.bfloat16, False, 121.0),
        ("NVIDIA B200", torch.bfloat16, False, 2250.0),
        ("NVIDIA H200", torch.float64, False, None),
        ("NVIDIA H200 MIG 1g.18gb", torch.bfloat16, False, None),
        ("Something else", torch.bfloat16, False, None),
    ],
)
def test_known_peaks(gpu, dtype, tf32, expected):
    assert peak_tflops(gpu, dtype, tf32) == expected


def test_a_cpu_has_no_known_peak(groups):
    if groups.device.is_cpu:
        assert groups.device.peak_tflops(torch.float32) is None


# --- profiles --------------------------------------------------------------------------------------------------------


def observed(config, groups):
    """As much of a run as a profile needs."""
    return SimpleNamespace(prepared=SimpleNamespace(config=config), groups=groups, interrupts=Interrupts(groups))


def test_a_profile_has_its_steps_and_their_phases(model, tmp_path, groups):
    run = observed(tiny_config(model, tmp_path, "observe.profile_from=2", "observe.profile_steps=2"), groups)
    told, phases = [], Phases(groups.device)
    with StepProfile(run, told.append) as profile:
        for step in range(1, 6):
            profile.before(step)
            assert (tmp_path / "profile" / "rank_0.json").exists() == (step > 3)
            with phases("update"):
                torch.ones(2) + step
    names = [e["name"] for e in json.loads((tmp_path / "profile/rank_0.json").read_text())["traceEvents"]]
    assert names.count("megamem/update") == 2 and "aten::add" in names
    assert len(told) == 1 and os.listdir(tmp_path / "profile") == ["rank_0.json"]


def test_a_stop_inside_leaves_no_profile_and_it_goes_on_when_resumed(model, tmp_path, groups):
    run = observed(tiny_config(model, tmp_path, "observe.profile_from=2", "observe.profile_steps=2"), groups)
    with pytest.raises(KeyError), StepProfile(run, print) as profile:
        profile.before(2)
        raise KeyError
    assert not (tmp_path / "profile").exists()
    with StepProfile(run, print) as profile:  # also: the first one has ended, or torch would refuse
        profile.before(3)
    assert (tmp_path / "profile" / "rank_0.json").exists()


def test_a_profile_that_cannot_be_written_is_told(model, tmp_path, groups):
    told = []
    (tmp_path / "profile").touch()
    with StepProfile(observed(tiny_config(model, tmp_path, "observe.profile_from=1"), groups), told.append) as profile:
        profile.before(1)
    assert len(told) == 1 and "cannot be written" in told[0]


# --- the end of memory -----------------------------------------------------------------------------------------------


def exhaust_host():
    torch.empty(1 << 60, dtype=torch.int8)


def exhaust_device():
    """A stub: no GPU is filled here."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore of it")


def ended(config, groups, phase, action):
    phases = Phases(groups.device)
    with pytest.raises(RankError) as caught, memory_watched(config, groups, phases):
        if phase is None:
            action()
        with phases(phase):
            action()
    return str(caught.value)


@pytest.mark.parametrize("action", [exhaust_host, exhaust_device])
def test_the_end_of_memory_is_told_in_two_lines(model, tmp_path, groups, action):
    message = ended(tiny_config(model, tmp_path), groups, "update", action)
    assert len(message.splitlines()) == 2 and "rank 0" in message and "out of memory in update" in message
    assert "GiB so far" in message and "planned" not in message
    assert ("Tried to allocate 20.00 GiB." in message) if action is exhaust_device else ("can't allocate" in message)
    for setting in ("stream.layers=true", "train.row_tokens (160)", "parallel.tensor (1)"):
        assert setting in message
    assert "rollout.row_tokens" not in message


@pytest.mark.parametrize(
    ("phase", "named"),
    [("rollout", "rollout.row_tokens (256)"), ("old_logprobs", "stream.chunk_tokens (1024)"), (None, "pipeline (1)")],
)
def test_settings_are_those_of_the_phase(model, tmp_path, groups, phase, named):
    config = tiny_config(model, tmp_path, "stream.layers=true", "observe.memory_snapshot=true")
    planned = config.model_copy(update={"planned": PlannedConfig(peak_gib=12.5)})
    (tmp_path / "config.yaml").write_text(config_yaml(planned))
    message = ended(config, groups, phase, exhaust_device)
    assert named in message and f"out of memory in {phase or 'start'}" in message and "12.50 GiB planned" in message
    if groups.device.is_cpu:
        assert "history" not in message and not list(tmp_path.glob("memory_*"))


def test_other_errors_stay_what_they_are(model, tmp_path, groups):
    with (
        pytest.raises(RuntimeError, match="shapes"),
        memory_watched(tiny_config(model, tmp_path), groups, Phases(groups.device)),
    ):
        raise RuntimeError("shapes differ")


def test_the_doctor_says_where_there_is_no_history(model, tmp_path):
    config = tiny_config(model, tmp_path, "observe.memory_snapshot=true")
    (found,) = observing(SimpleNamespace(config=config, installed={}, machine=Machine("here")))
    assert found.level == "warning" and "observe.memory_snapshot" in found.text
    assert not list(observing(SimpleNamespace(config=config, installed={}, machine=Machine("here", gpus=1))))


# --- the planner beside a run ----------------------------------------------------------------------------------------


def test_a_child_knows_no_launcher():
    ranks = {name: "1" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "SLURM_PROCID", "PMI_RANK")}
    ranks |= {"OMPI_COMM_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "CUDA_VISIBLE_DEVICES": "0,1"}
    found = environment_alone(ranks | {"PATH": "/bin", "HOME": "/root"})
    assert found == {"PATH": "/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_a_child_ends_with_its_parent(tmp_path):
    (tmp_path / "kid.py").write_text(
        "import time\nfrom megamem.platform.child import answer_parent\nanswer_parent(lambda _: time.sleep(600) or '')"
    )
    code = "import os, time\nfrom megamem.platform.child import Child\nchild = Child('kid', 'x', os.environ)\n"
    code += "print(child._process.pid, flush=True)\ntime.sleep(600)"
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), str(tmp_path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(1.0)
    assert child.is_running()
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    child.wait(timeout=60)


def answer(config, ranks):
    """What the planner says, waited for."""
    with planning(config, ranks, os.environ) as planned:
        deadline = time.monotonic() + 300
        while (found := planned()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
    return found


def test_what_is_planned_is_the_run_s_own(model, tmp_path):
    """Parts that have a formula: one copy of the parameters, of the gradients, and two moments over two replicas."""
    config = tiny_config(model, tmp_path, "observe.plan=true", "objective.kl=0.1", "objective.name=grpo")
    one, two = answer(config, ALONE), answer(config, Ranks(0, 2, 0, None, "test"))
    parts = one.parts_gib
    assert parts["reference"] == parts["parameters"] == parts["gradients"] > 0
    assert two.parts_gib["optimizer"] == pytest.approx(parts["optimizer"] / 2, abs=1e-4)
    assert one.peak_gib > parts["parameters"] + parts["reference"] + parts["gradients"] + parts["optimizer"]


def test_no_planner_unless_it_is_wanted(model, tmp_path):
    before = psutil.Process().children()  # of multiprocessing, where other tests ran in this process
    for asked, ranks in (("false", ALONE), ("true", Ranks(1, 2, 1, None, "test"))):
        with planning(tiny_config(model, tmp_path, f"observe.plan={asked}"), ranks, os.environ) as planned:
            assert planned() is None and psutil.Process().children() == before


def test_a_planner_that_fails_says_so(model, tmp_path):
    config = tiny_config(model, tmp_path, "observe.plan=true", "model.path=/nowhere")
    found = answer(config, ALONE)
    assert isinstance(found, str) and "/nowhere" in found


def test_a_configuration_keeps_what_was_planned(model, tmp_path):
    planned = PlannedConfig(peak_gib=1.5, stage=1, parts_gib={"parameters": 0.5})
    config = tiny_config(model, tmp_path).model_copy(update={"planned": planned})
    (tmp_path / "config.yaml").write_text(config_yaml(config))
    assert load_config(tmp_path / "config.yaml", ["train.steps=7"]).planned == planned


# --- files of the run folder -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["stop", "continue"])
@pytest.mark.parametrize("name", ["config.yaml", "status.json"])
def test_a_run_folder_without_room(model, tmp_path, groups, name, choice):
    """It ends the run or is told, as train.on_save_error says, and the old file stays."""
    config = tiny_config(model, tmp_path, f"train.on_save_error={choice}", "tensorboard=false")
    run = SimpleNamespace(prepared=SimpleNamespace(config=config), groups=groups, finished=3)
    told = io.StringIO()
    start = partial(Journal, run, Console(file=told, width=400), 0)
    write = start if name == "config.yaml" else partial(start().state, "running")
    (tmp_path / name).write_text("old")
    with file_size(5):
        message = refused(write) if choice == "stop" else (write(), told.getvalue())[1]
    assert f"{tmp_path / name}: cannot be written (File too large)" in message
    assert (tmp_path / name).read_text() == "old"


# --- wandb -----------------------------------------------------------------------------------------------------------


def test_wandb_keeps_one_run_per_folder(model, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    names = []
    for step in (1, 2):
        log = WandbLog(tiny_config(model, tmp_path, "observe.wandb=a_project"))
        log.write(step, {"reward": 0.5 * step})
        names.append(log._run.id)
        assert wandb.run.project == "a_project" and wandb.run.config["seed"] == 0
        log.close(0)
        time.sleep(1.1)  # its folders are named by the second
    assert names[0] == names[1] == (tmp_path / "wandb_id").read_text().strip()
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{names[0]}/*.wandb"))
    assert files and all(b"reward" in file.read_bytes() for file in files)
