"""A task whose reward fails or hangs, on one rank at one moment."""

import time
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from pydantic import Field

from megamem.tasks.base import Problem, Score
from megamem.tasks.sudoku4 import Sudoku4Options
from tests.dist.harness import HashSudoku


class FaultyOptions(Sudoku4Options):
    fault: Literal["fail", "hang"]
    mark: str = Field(description="a file to touch when it starts")
    rank: int = 1
    first: int = Field(20, description="reward of that rank, from 0")
    count: int = 10**6


class Faulty(HashSudoku):
    """The fault comes in `count` rewards from the `first` on."""

    Options = FaultyOptions

    def __init__(self, options: FaultyOptions):
        super().__init__(options)
        self._faulty, self._calls = options, 0

    def score(self, problem: Problem, response: str) -> Score:
        score = super().score(problem, response)
        o, call = self._faulty, self._calls
        self._calls += 1
        if not o.first <= call < o.first + o.count or dist.get_rank() != o.rank:
            return score
        Path(o.mark).touch()
        return FAULTS[o.fault](score)


def _fail(score: Score) -> Score:
    raise ArithmeticError("the reward cannot be computed")


def _hang(score: Score) -> Score:
    while True:
        time.sleep(1)


FAULTS = {"fail": _fail, "hang": _hang}
