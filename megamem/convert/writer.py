"""Streamed safetensors writing: headers first, then one tensor at a time; no more than one tensor in memory."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from megamem.convert.source import CODES

TensorInfo = tuple[str, tuple[int, ...], torch.dtype]


def _bytes_of(info: TensorInfo) -> int:
    _, shape, dtype = info
    return torch.Size(shape).numel() * dtype.itemsize


def _into_files(tensors: Sequence[TensorInfo], file_bytes: int) -> list[list[TensorInfo]]:
    files: list[list[TensorInfo]] = [[]]
    filled = 0
    for info in tensors:
        size = _bytes_of(info)
        if files[-1] and filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(info)
        filled += size
    return files


class SafetensorsWriter:
    """Writes tensors in the announced order into one or more files, and the index if there are several.

    Use as a context manager; leaving it without an exception checks that every announced tensor was written.

    Args:
        folder: an existing folder.
        tensors: (name, shape, dtype) of every tensor, in the order in which `write` will be called.
        file_bytes: start a new file where one would grow beyond this.
    """

    def __init__(self, folder: Path, tensors: Sequence[TensorInfo], file_bytes: int = 5 * 10**9):
        self._folder = Path(folder)
        self._files = _into_files(tensors, file_bytes)
        self._queue = [(i, info) for i, file in enumerate(self._files) for info in file]
        self._next = 0
        self._handle: IO[bytes] | None = None
        self._current = -1

    def _name(self, i: int) -> str:
        count = len(self._files)
        return "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"

    def _start(self, i: int) -> None:
        if self._handle:
            self._handle.close()
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for info in self._files[i]:
            name, shape, dtype = info
            end = offset + _bytes_of(info)
            header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # data starts at a multiple of eight
        self._handle = open(self._folder / self._name(i), "wb")
        self._handle.write(struct.pack("<Q", len(text)) + text)
        self._current = i

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next announced tensor; it is cast to the announced dtype."""
        i, (expected, shape, dtype) = self._queue[self._next]
        assert (name, tuple(tensor.shape)) == (expected, shape), (name, tensor.shape, expected, shape)
        if i != self._current:
            self._start(i)
        flat = tensor.detach().to("cpu", dtype).contiguous().flatten()
        self._handle.write(flat.view(torch.uint8).numpy().data)
        self._next += 1

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._handle:
            self._handle.close()
        if kind is not None:
            return
        assert self._next == len(self._queue), f"{len(self._queue) - self._next} announced tensors were not written"
        if len(self._files) > 1:
            weight_map = {info[0]: self._name(i) for i, info in self._queue}
            total = sum(_bytes_of(info) for _, info in self._queue)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
