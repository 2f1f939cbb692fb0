"""Which process am I, and on which device: a table of environments, and the mistakes."""

import pytest
import torch

from megamem.platform.device import resolve_device
from megamem.platform.launch import Ranks, discover_ranks, run_locally
from tests.helpers import refused


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, Ranks(0, 1, 0, None, "single process")),
        ({"HOME": "/x", "MASTER_ADDR": "host"}, Ranks(0, 1, 0, None, "single process")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Ranks(0, 1, 0, "env://", "torchrun")),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Ranks(5, 8, 1, "env://", "torchrun")),
        ({"RANK": "5", "WORLD_SIZE": "8"}, Ranks(5, 8, 5, "env://", "torchrun")),
    ],
)
def test_ranks(environ, ranks):
    assert discover_ranks(environ) == ranks


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE is not set"]),
        ({"WORLD_SIZE": "2"}, ["RANK is not set"]),
        ({"RANK": "two", "WORLD_SIZE": "4"}, ["RANK = 'two'", "integer"]),
        ({"RANK": "", "WORLD_SIZE": "4"}, ["RANK = ''", "integer"]),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "x"}, ["LOCAL_RANK = 'x'", "integer"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK = 4", "0 … WORLD_SIZE - 1 = 3"]),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, ["RANK = -1", "0 … WORLD_SIZE - 1 = 3"]),
    ],
)
def test_contradictions(environ, told):
    message = refused(discover_ranks, environ)
    assert "environment" in message and all(text in message for text in told), message


def test_run_locally_alone():
    met = []
    run_locally(lambda ranks, *rest: met.append((ranks, rest)), 1, "a", 2)
    assert met == [(Ranks(0, 1, 0, None, "single process"), ("a", 2))]


def machine(monkeypatch, gpus: int) -> list[int]:
    """Pretend a number of GPUs; returns the devices that get chosen."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_without_gpu(monkeypatch, name):
    machine(monkeypatch, 0)
    device = resolve_device(name, 3)
    assert (device.torch, device.backend, device.is_cpu) == (torch.device("cpu"), "gloo", True)
    assert device.peak_bytes() > 2**20
    device.synchronize()


def test_cuda_without_gpu(monkeypatch):
    machine(monkeypatch, 0)
    message = refused(resolve_device, "cuda", 0)
    assert "device = cuda" in message and "allowed here: cpu, auto" in message


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_with_gpus(monkeypatch, name):
    chosen = machine(monkeypatch, 2)
    device = resolve_device(name, 1)
    assert (device.torch, device.backend, device.is_cpu) == (torch.device("cuda", 1), "nccl", False)
    assert chosen == [1]
    message = refused(resolve_device, name, 2)
    assert "local rank 2" in message and "shows 2" in message and "one process per GPU" in message


def test_cpu_beside_a_gpu(monkeypatch):
    """megatron-core's CPU patches must never meet a GPU; the user is told how to hide it."""
    machine(monkeypatch, 1)
    message = refused(resolve_device, "cpu", 0)
    assert "device = cpu" in message and "CUDA_VISIBLE_DEVICES" in message
