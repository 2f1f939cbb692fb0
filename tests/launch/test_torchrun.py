"""launch/torchrun.sh: two nodes, both on this machine; ended by SIGKILL and by SIGTERM."""

import signal

import pytest

from megamem.errors import RUN_AGAIN
from tests.launch.runs import (
    INTERRUPT_AFTER,
    SAVE_EVERY,
    STEPS,
    assert_complete,
    finish,
    interrupt,
    kill,
    start,
    wait_for_step,
    write_config,
)
from tests.run_folder import checkpoints, computed, steps

PORT = 15731  # of nobody, and below those handed out to clients


class Nodes:
    """A run on two nodes of one process each."""

    def __init__(self, folder, name, start_number=0):
        self.config, self.run = write_config(folder, name), folder / name
        self.logs = [folder / f"{name}_{start_number}_node_{node}.log" for node in range(2)]
        common = {"NNODES": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "RUN_ID": f"{name}.{start_number}"}
        self.nodes = [
            start("torchrun.sh", "train", self.config, log=log, NODE_RANK=node, **common)
            for node, log in enumerate(self.logs)
        ]

    def wait_for_step(self, step):
        wait_for_step(self.run, step, self.nodes[0], self.logs[0])

    def finish(self):
        return [finish(node, log) for node, log in zip(self.nodes, self.logs, strict=True)]

    def told(self):
        return "".join(log.read_text() for log in self.logs)


@pytest.fixture(scope="module")
def killed(folder):
    nodes = Nodes(folder, "torchrun_killed")
    nodes.wait_for_step(INTERRUPT_AFTER)
    for node in nodes.nodes:
        kill(node)
    resumed = Nodes(folder, "torchrun_killed", 1)
    assert resumed.finish() == [0, 0], resumed.told()
    return resumed


def test_a_killed_job_resumes_from_its_last_checkpoint(killed):
    assert_complete(killed.run, INTERRUPT_AFTER // SAVE_EVERY * SAVE_EVERY, killed.told())


def test_a_signal_to_one_node_saves_the_job(folder, killed):
    nodes = Nodes(folder, "torchrun_term")
    nodes.wait_for_step(INTERRUPT_AFTER)
    interrupt(nodes.nodes[1], signal.SIGTERM)
    assert nodes.finish() == [RUN_AGAIN, RUN_AGAIN], nodes.told()
    reached = steps(nodes.run)[-1]
    assert INTERRUPT_AFTER <= reached < STEPS and checkpoints(nodes.run)[-1] == reached, nodes.told()
    resumed = Nodes(folder, "torchrun_term", 1)
    assert resumed.finish() == [0, 0], resumed.told()
    assert_complete(resumed.run, reached, resumed.told())
    assert computed(resumed.run) == computed(killed.run)  # bit-equal, whatever happened to either
