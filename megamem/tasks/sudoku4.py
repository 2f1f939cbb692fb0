"""4x4 Sudoku: fill the empty cells so that every row, column and 2x2 box holds 1, 2, 3 and 4.

There are only 288 full grids, so a random split of puzzles tests on grids that training has seen (all 500 solutions
of d1's test file occur in the public training file). Here grids are split: 200 for training, of which 30 are kept
for validation, and 88 for testing. Grids that differ by renaming digits or by swapping rows do remain on both sides.

Puzzles are our own because reasoning-gym's `mini_sudoku` picks the grid itself, which rules out a split by grid; its
scorer also marks layout and length down, which the published reward does not. Grids and puzzles are strings
of 16 digits, row by row, 0 for an empty cell. Generated puzzles have exactly one solution.

The reward is that of d1 (arXiv 2504.12216) and BGPO (arXiv 2510.11683): keep the digits of the answer, pad with 0 or
cut to 16, and take the share of the empty cells that are right. Clue cells do not count. Not in the papers: a puzzle
without empty cells earns 1 for being repeated exactly and 0 otherwise.
"""

import csv
import io
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from megamem.errors import UserError
from megamem.platform.rng import derive_seed
from megamem.tasks.base import Problem, Score, Split, Task, TaskOptions, last_answer, read_jsonl, read_text, shown

CELLS = 16
# Sixteen clues less four: no 4x4 puzzle with fewer than four clues has one solution.
MOST_EMPTY = 12
_DEFAULT_TEST_SIZE = 512
_ATTEMPTS = 1000  # per puzzle; a generator that needs more has run out of puzzles

_PROMPT = """\
Solve a 4x4 Sudoku. The puzzle is a string of 16 digits, read row by row from the top left; 0 marks an empty cell. \
Replace every 0 so that each row, each column and each 2x2 box contains 1, 2, 3 and 4 exactly once. Keep the given \
digits where they are.

Respond in the following format:
<reasoning>
your reasoning
</reasoning>
<answer>
the COMPLETE solution, a string of 16 digits without spaces
</answer>

Puzzle: {puzzle}"""

_ANSWER = """\
<reasoning>
Every row, column and 2x2 box must contain 1, 2, 3 and 4 exactly once.
</reasoning>
<answer>
{solution}
</answer>"""


class Sudoku4Options(TaskOptions):
    """Options of `Sudoku4`.

    Attributes:
        style: `d1`, a prompt in words answered in `<answer>` tags. For tiny models, answered by 16 digits between
            spaces and nothing else: `digits`, the 16 digits of the puzzle (learned positions tell the cells apart);
            `cells`, 16 words such as `b3:2`: row b, column 3 holds 2 (for RoPE, which does not).
        train_empty: fewest and most empty cells of a training puzzle; each number is equally likely.
        test_empty: the same for validation and generated test puzzles (validation predicts the test).
        train_size, valid_size: number of puzzles.
        test_size: number of test puzzles; not given: all of `file`, or 512 without a file.
        train_grids, valid_grids: how many of the 288 grids training and validation get; testing gets the rest.
        split_seed: which grids go where.
        seed: which puzzles are made of them.
        file: test puzzles instead of generated ones: a CSV file with the header `Puzzle,Solution` (d1's), or JSONL
            with the keys `puzzle` and `solution`. They may have several solutions and may be on training grids;
            `Sudoku4.report` counts both.
    """

    style: Literal["d1", "cells", "digits"] = "d1"
    train_empty: tuple[int, int] = (8, 10)
    test_empty: tuple[int, int] = (8, 10)
    train_size: int = Field(4096, ge=1)
    valid_size: int = Field(256, ge=0)
    test_size: int | None = Field(None, ge=1)
    train_grids: int = Field(170, ge=1, le=287)
    valid_grids: int = Field(30, ge=0)
    split_seed: int = 0
    seed: int = 0
    file: str | None = None

    @field_validator("train_empty", "test_empty")
    @classmethod
    def _check_range(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= value[0] <= value[1] <= MOST_EMPTY:
            raise ValueError(f"two numbers of empty cells, fewest and most, within 1 and {MOST_EMPTY}")
        return value

    @field_validator("valid_grids")
    @classmethod
    def _check_grids(cls, value: int, info: ValidationInfo) -> int:
        train = info.data.get("train_grids", 1)
        if train + value >= len(all_grids()):
            raise ValueError(
                f"with train_grids {train} at most {len(all_grids()) - train - 1}, so that testing gets some"
            )
        if value == 0 and info.data.get("valid_size"):
            raise ValueError("0 needs valid_size 0")
        return value


@cache
def all_grids() -> tuple[str, ...]:
    """The 288 full grids, sorted."""
    rows = ["".join(row) for row in itertools.permutations("1234")]
    halves = [
        upper + lower
        for upper, lower in itertools.product(rows, repeat=2)
        if len({*upper[:2], *lower[:2]}) == 4 and len({*upper[2:], *lower[2:]}) == 4
    ]
    return tuple(
        top + bottom
        for top, bottom in itertools.product(halves, repeat=2)
        if all(len({*top[column::4], *bottom[column::4]}) == 4 for column in range(4))
    )


@cache
def _grids_by_clue() -> Mapping[tuple[int, str], int]:
    """For each (cell, digit) the set of grids that have it, as an integer with one bit per grid of `all_grids`."""
    sets = dict.fromkeys(itertools.product(range(CELLS), "1234"), 0)
    for index, grid in enumerate(all_grids()):
        for clue in enumerate(grid):
            sets[clue] |= 1 << index
    return sets


def solutions(puzzle: str) -> list[str]:
    """All solutions of a puzzle of 16 characters 0 to 4: the grids that agree with every clue."""
    left = (1 << len(all_grids())) - 1
    for cell, digit in enumerate(puzzle):
        if digit != "0":
            left &= _grids_by_clue()[cell, digit]
    return [grid for index, grid in enumerate(all_grids()) if left >> index & 1]


def dig(grid: str, empty: int, rng: random.Random) -> str | None:
    """A puzzle with `empty` empty cells whose only solution is `grid`, or None where this order of cells fails.

    Cells are visited in random order and emptied wherever the solution stays the only one.
    """
    kept = dict(enumerate(grid))
    for cell in rng.sample(range(CELLS), CELLS):
        if CELLS - len(kept) == empty:
            break
        left = -1
        for clue in kept.items():
            if clue[0] != cell:
                left &= _grids_by_clue()[clue]
        if left & (left - 1) == 0:  # one bit: one solution
            del kept[cell]
    if CELLS - len(kept) < empty:
        return None
    return "".join(kept.get(cell, "0") for cell in range(CELLS))


def split_grids(train: int, valid: int, seed: int) -> dict[Split, tuple[str, ...]]:
    """The 288 grids in three disjoint sets of `train`, `valid` and the remaining number, by a seeded shuffle."""
    grids = list(all_grids())
    random.Random(derive_seed(seed, "sudoku4", "grids")).shuffle(grids)
    return {"train": tuple(grids[:train]), "valid": tuple(grids[train : train + valid]),
            "test": tuple(grids[train + valid :])}  # fmt: skip


def cell_words(puzzle: str) -> str:
    """The 16 words of a puzzle in style `cells`: letter = row, digit = column, after the colon the content."""
    return " ".join(f"{'abcd'[cell // 4]}{cell % 4 + 1}:{digit}" for cell, digit in enumerate(puzzle))


def vocabulary(style: Literal["cells", "digits"]) -> list[str]:
    """All words of a style for tiny models: `0` to `4`; or `a1:0` to `d4:4`, cell by cell, then `1` to `4`."""
    if style == "digits":
        return list("01234")
    cells = itertools.product("abcd", "1234", "01234")
    return [f"{row}{column}:{digit}" for row, column, digit in cells] + list("1234")


# What the user's turn says, by style.
_PROMPTS: dict[str, Callable[[str], str]] = {
    "d1": lambda puzzle: _PROMPT.format(puzzle=puzzle),
    "cells": cell_words,
    "digits": " ".join,
}


class Sudoku4(Task):
    """See the module's text; options: `Sudoku4Options`."""

    Options = Sudoku4Options

    def __init__(self, options: Sudoku4Options) -> None:
        super().__init__(options)
        self._grids = split_grids(options.train_grids, options.valid_grids, options.split_seed)
        pairs = {
            "train": self._generate("train", options.train_size, options.train_empty),
            "valid": self._generate("valid", options.valid_size, options.test_empty),
        }
        if options.file is None:
            pairs["test"] = self._generate("test", options.test_size or _DEFAULT_TEST_SIZE, options.test_empty)
        else:
            pairs["test"] = read_puzzles(options.file, "task.options.file")[: options.test_size]
        self._problems = {split: self._to_problems(split, found) for split, found in pairs.items()}

    def _generate(self, split: Split, size: int, empty: tuple[int, int]) -> list[tuple[str, str]]:
        """`size` different puzzles with their solutions; a longer list begins with the shorter one."""
        pairs: dict[str, str] = {}
        for index in range(size):
            rng = random.Random(derive_seed(self.options.seed, "sudoku4", split, index))
            for _ in range(_ATTEMPTS):
                grid = rng.choice(self._grids[split])
                puzzle = dig(grid, rng.randint(*empty), rng)
                if puzzle is not None and puzzle not in pairs:
                    pairs[puzzle] = grid
                    break
            else:
                raise UserError(
                    f"task.options.{split}_size: {size} is not allowed: after {index} puzzles with {empty[0]} to "
                    f"{empty[1]} empty cells on {len(self._grids[split])} grids no new one was found"
                )
        return list(pairs.items())

    def _to_problems(self, split: Split, pairs: Sequence[tuple[str, str]]) -> list[Problem]:
        return [
            Problem(
                key=f"{split}/{index}",
                prompt=_PROMPTS[self.options.style](puzzle),
                data={"puzzle": puzzle, "solution": solution},
            )
            for index, (puzzle, solution) in enumerate(pairs)
        ]

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._problems[split]

    def score(self, problem: Problem, response: str) -> Score:
        """The share of empty cells that are right.

        `exact` compares all 16 cells, clues too, with the given solution. The part `valid` is 1 where the cells form
        any grid that keeps the clues: the two differ only for a file's puzzles that have several solutions.
        """
        text = last_answer(response) if self.options.style == "d1" else response
        if text is None:
            return Score(0.0, False, {"valid": 0.0})
        puzzle, solution = problem.data["puzzle"], problem.data["solution"]
        # ASCII digits only: str.isdigit() is also true of superscripts and of other scripts' digits.
        digits = itertools.islice((character for character in text if character in "0123456789"), CELLS)
        cells = "".join(digits).ljust(CELLS, "0")
        empty = [cell for cell in range(CELLS) if puzzle[cell] == "0"]
        exact = cells == solution
        right = sum(cells[cell] == solution[cell] for cell in empty)
        reward = right / len(empty) if empty else float(exact)
        return Score(reward, exact, {"valid": float(cells in _grid_set() and _agrees(cells, puzzle))})

    def answer(self, problem: Problem) -> str:
        solution = problem.data["solution"]
        return _ANSWER.format(solution=solution) if self.options.style == "d1" else " ".join(solution)

    def report(self) -> Mapping[str, Any]:
        """Sizes of the splits; with a file also how much of it training could have seen.

        With `file`: how many of its puzzles have their solution among the training, validation and held-out grids,
        how many have one solution only, and how many are training puzzles themselves.
        """
        facts: dict[str, Any] = {f"{split}_puzzles": len(found) for split, found in self._problems.items()}
        facts |= {f"{split}_grids": len(grids) for split, grids in self._grids.items()}
        if self.options.file is not None:
            test = [problem.data for problem in self._problems["test"]]
            names = {"train": "file_on_train_grids", "valid": "file_on_valid_grids", "test": "file_on_held_out_grids"}
            for split, name in names.items():
                facts[name] = sum(data["solution"] in self._grids[split] for data in test)
            held_out = set(self._grids["test"])
            unique = [data for data in test if len(solutions(data["puzzle"])) == 1]
            facts["file_with_one_solution"] = len(unique)
            facts["file_with_one_solution_on_held_out_grids"] = sum(data["solution"] in held_out for data in unique)
            train = {problem.data["puzzle"] for problem in self._problems["train"]}
            facts["file_puzzles_in_train"] = sum(data["puzzle"] in train for data in test)
        return facts


@cache
def _grid_set() -> frozenset[str]:
    return frozenset(all_grids())


def _agrees(grid: str, puzzle: str) -> bool:
    return all(clue in ("0", digit) for clue, digit in zip(puzzle, grid, strict=True))


def read_puzzles(path: str, option: str) -> list[tuple[str, str]]:
    """(puzzle, solution) pairs of a `.csv` or `.jsonl` file, checked: digits, a full grid, clues kept.

    Raises:
        UserError: naming `option`, the file and the line.
    """
    if path.endswith(".csv"):
        rows = _read_csv(path, option)
    elif path.endswith(".jsonl"):
        records = read_jsonl(path, option, {"puzzle": str, "solution": str})
        rows = [(place, record["puzzle"], record["solution"]) for place, record in records]
    else:
        raise UserError(f"{option}: {path!r} must be a .csv or a .jsonl file")
    for place, puzzle, solution in rows:
        if len(puzzle) != CELLS or not set(puzzle) <= set("01234"):
            raise UserError(f"{place}: the puzzle must be 16 digits 0 to 4, got {shown(puzzle)}")
        if solution not in _grid_set():
            raise UserError(f"{place}: the solution must be a full 4x4 Sudoku of 16 digits, got {shown(solution)}")
        if not _agrees(solution, puzzle):
            raise UserError(f"{place}: the solution {solution} changes clues of the puzzle {puzzle}")
    return [(puzzle, solution) for _, puzzle, solution in rows]


def _read_csv(path: str, option: str) -> list[tuple[str, str, str]]:
    reader = csv.reader(io.StringIO(read_text(path, option), newline=""))
    try:
        header = [name.strip().lower() for name in next(reader)]
        if header != ["puzzle", "solution"]:
            raise UserError(f"{option}: {path!r} line 1 must be the header Puzzle,Solution, got {shown(header)}")
        rows = []
        for row in reader:
            place = f"{option}: {path!r} line {reader.line_num}"
            if len(row) == 2:
                rows.append((place, row[0].strip(), row[1].strip()))
            elif row:
                raise UserError(f"{place} must have two columns, Puzzle,Solution, got {len(row)}")
    except csv.Error as error:
        raise UserError(f"{option}: {path!r} line {reader.line_num} is not CSV: {error}") from error
    if not rows:
        raise UserError(f"{option}: {path!r} has a header but no puzzles")
    return rows
