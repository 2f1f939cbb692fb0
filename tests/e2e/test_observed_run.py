"""One run that observes all it can, as a user starts it: utilisation, a profile, the planner beside it."""

import json
import signal

import pytest
import yaml

from megamem.config.load import load_config
from megamem.errors import RUN_AGAIN
from tests.dist.harness import tiny_model, tiny_settings
from tests.e2e.jobs import finish, start, wait_for
from tests.run_folder import metrics

PEAK = 0.05  # TFLOPS


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that is stopped once it knows what was planned; what it printed."""
    folder = tmp_path_factory.mktemp("observe")
    settings = tiny_settings(tiny_model(folder / "model"), folder / "run")
    settings["train"] |= {"steps": 100000, "save_every": 100000}
    settings["observe"] = {"plan": True, "profile_from": 2, "profile_steps": 2, "peak_tflops": PEAK}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    process, log = start(["train", folder / "run.yaml"]), folder / "run" / "metrics.jsonl"
    wait_for(process, lambda: log.exists() and "planned_peak_gib" in log.read_text())
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.status == RUN_AGAIN, done.err
    return folder / "run", done


def test_utilisation_is_of_the_update(run):
    for line in metrics(run[0]):
        layers = 2 * (4 * 32 * 32 + 3 * 32 * 48)  # matrices of both layers
        least = 6 * line["tokens"] * layers  # without attention and head
        assert least < line["mfu"] * PEAK * 1e12 * line["seconds_update"] < 3 * least


def test_what_was_planned_is_written_beside_what_is_measured(run):
    folder, done = run
    planned = load_config(folder / "config.yaml").planned
    known = ["planned_peak_gib" in line for line in metrics(folder)]
    assert known == sorted(known) and known[-1]
    assert metrics(folder)[-1]["planned_peak_gib"] == planned.peak_gib > planned.parts_gib["parameters"] > 0
    assert "planned peak of an update" in done.out


def test_the_profile_names_the_phases(run):
    trace = json.loads((run[0] / "profile" / "rank_0.json").read_text(encoding="utf-8"))
    names = [event["name"] for event in trace["traceEvents"]]
    for phase in ("rollout", "reward", "update"):
        assert names.count(f"megamem/{phase}") == 2  # of the CPU, and there is no other device


def test_the_written_configuration_runs(run):
    folder, _ = run
    steps = len(metrics(folder)) + 1
    done = finish(start(["train", folder / "config.yaml", f"train.steps={steps}", "observe.plan=false"]))
    assert done.status == 0, done.err
    assert "planned_peak_gib" not in metrics(folder)[-1] and len(metrics(folder)) == steps
    done = finish(start(["eval", folder, "eval.limit=2", "--json"]))
    assert done.status == 0 and "eval_reward" in json.loads(done.out), done.err
