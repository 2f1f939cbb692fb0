"""Tasks: rewards case by case, splits, generated problems, files that users bring, tasks of their own."""

import itertools
import json
import random
import re
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from megamem.errors import UserError
from megamem.tasks import sudoku4
from megamem.tasks.base import Problem, Score, Task, last_answer, read_jsonl
from megamem.tasks.countdown import ExpressionError, evaluate, find_solution
from megamem.tasks.registry import load_task

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
D1_SUDOKU = SHARED / "data" / "tasks" / "4x4_test_sudoku.csv"
D1_COUNTDOWN = SHARED / "data" / "tasks" / "countdown_cd3_test.jsonl"
SMALL = {"train_size": 40, "valid_size": 10, "test_size": 20}

PUZZLE, SOLUTION = "3102200002100320", "3142243142131324"  # cells 2, 5, 6, 7, 8, 11, 12 and 15 are empty


def needs(path: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not path.exists(), reason=f"no {path.name} beside the repository")


@pytest.fixture(scope="module")
def sudoku() -> Task:
    return load_task("sudoku4", SMALL)


@pytest.fixture(scope="module")
def countdown() -> Task:
    return load_task("countdown", SMALL)


def tagged(text: str) -> str:
    return f"<reasoning>\nbecause\n</reasoning>\n<answer>\n{text}\n</answer>"


# The answer in a response


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("", None),
        ("no tags", None),
        ("<answer>open", None),
        ("close</answer>", None),
        ("</answer>1<answer>", None),
        ("<answer></answer>", ""),
        ("<answer> 1 </answer>", "1"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1</answer> and <answer>2", "1"),
        ("<answer>1</answer> stray </answer>", "1"),
        ("<answer>1\n2\n</answer>", "1\n2"),
        ("<answer>1<answer>2</answer>", "1<answer>2"),
        ("<ANSWER>1</ANSWER>", None),
        ("<answer>\x00</answer>", "\x00"),
    ],
)
def test_last_answer(response: str, expected: str | None) -> None:
    assert last_answer(response) == expected


# Sudoku


def score_sudoku(response: str, style: str = "d1", puzzle: str = PUZZLE, solution: str = SOLUTION) -> tuple:
    task = load_task("sudoku4", {**SMALL, "style": style, "train_size": 1, "valid_size": 0, "test_size": 1})
    problem = Problem("x", "", {"puzzle": puzzle, "solution": solution})
    score = task.score(problem, response)
    return score.reward, score.exact, score.parts["valid"]


EMPTY = [cell for cell, digit in enumerate(PUZZLE) if digit == "0"]
ONE_WRONG = SOLUTION[:15] + "1"
CLUE_WRONG = "1" + SOLUTION[1:]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (tagged(SOLUTION), (1.0, True, 1.0)),
        (tagged(" ".join(SOLUTION)), (1.0, True, 1.0)),
        (tagged("\n".join([SOLUTION[:4], SOLUTION[4:8], SOLUTION[8:12], SOLUTION[12:]])), (1.0, True, 1.0)),
        (tagged(SOLUTION) + tagged(PUZZLE), (0.0, False, 0.0)),
        (tagged(ONE_WRONG), (7 / 8, False, 0.0)),
        (tagged(CLUE_WRONG), (1.0, False, 0.0)),
        (tagged(SOLUTION[:8]), (4 / 8, False, 0.0)),
        (tagged(SOLUTION + "4444"), (1.0, True, 1.0)),
        (tagged("9" + SOLUTION), (sum(("9" + SOLUTION)[c] == SOLUTION[c] for c in EMPTY) / 8, False, 0.0)),
        (tagged(""), (0.0, False, 0.0)),
        (SOLUTION, (0.0, False, 0.0)),
        (f"<answer>{SOLUTION}", (0.0, False, 0.0)),
        (tagged("\u0663\u00b2" + SOLUTION), (1.0, True, 1.0)),  # digits of other scripts are no digits
        (tagged("\x00" + SOLUTION + "\ud800"), (1.0, True, 1.0)),
    ],
)
def test_sudoku_reward(text: str, expected: tuple) -> None:
    assert score_sudoku(text) == expected


def test_sudoku_reward_of_cells() -> None:
    assert score_sudoku(" ".join(SOLUTION), "cells") == (1.0, True, 1.0)
    assert score_sudoku("", "cells") == (0.0, False, 0.0)
    assert score_sudoku(" ".join(SOLUTION[:8]), "cells")[0] == 0.5


def test_sudoku_several_solutions() -> None:
    """The shaped reward and `exact` follow the given solution; `valid` any solution."""
    puzzle = "0000" * 4
    given, other = sudoku4.all_grids()[0], sudoku4.all_grids()[100]
    reward, exact, valid = score_sudoku(tagged(other), puzzle=puzzle, solution=given)
    assert (exact, valid) == (False, 1.0) and 0 < reward < 1


def test_sudoku_without_empty_cells() -> None:
    assert score_sudoku(tagged(SOLUTION), puzzle=SOLUTION) == (1.0, True, 1.0)
    assert score_sudoku(tagged(ONE_WRONG), puzzle=SOLUTION) == (0.0, False, 0.0)


def test_sudoku_grids() -> None:
    grids = sudoku4.all_grids()
    assert len(set(grids)) == 288
    units = [[4 * i + j for j in range(4)] for i in range(4)] + [[4 * j + i for j in range(4)] for i in range(4)]
    units += [[8 * i + 2 * j + k for k in (0, 1, 4, 5)] for i in range(2) for j in range(2)]
    assert all({grid[cell] for cell in unit} == set("1234") for grid in grids for unit in units)


@pytest.mark.parametrize("puzzle", [PUZZLE, "0" * 16, "11" + "0" * 14, SOLUTION, "1234" + "0" * 12])
def test_sudoku_solutions_match_plain_filter(puzzle: str) -> None:
    plain = [g for g in sudoku4.all_grids() if all(c in ("0", d) for c, d in zip(puzzle, g, strict=True))]
    assert sudoku4.solutions(puzzle) == plain


def test_sudoku_splits(sudoku: Task) -> None:
    grids = sudoku4.split_grids(170, 30, seed=0)
    assert [len(grids[split]) for split in ("train", "valid", "test")] == [170, 30, 88]
    assert len(set(itertools.chain(*grids.values()))) == 288
    assert sudoku4.split_grids(170, 30, seed=0) == grids != sudoku4.split_grids(170, 30, seed=1)
    keys = []
    for split, size in (("train", 40), ("valid", 10), ("test", 20)):
        problems = sudoku.problems(split)
        assert len({problem.data["puzzle"] for problem in problems}) == size
        assert {problem.data["solution"] for problem in problems} <= set(grids[split])
        keys += [problem.key for problem in problems]
    assert len(set(keys)) == 70


@pytest.mark.parametrize("empty", [(1, 1), (4, 6), (8, 10), (12, 12)])
def test_sudoku_generated_puzzles(empty: tuple[int, int]) -> None:
    task = load_task("sudoku4", {**SMALL, "train_empty": list(empty), "test_empty": list(empty)})
    for split in ("train", "valid", "test"):
        for problem in task.problems(split):
            puzzle, solution = problem.data["puzzle"], problem.data["solution"]
            assert sudoku4.solutions(puzzle) == [solution]
            assert empty[0] <= puzzle.count("0") <= empty[1]
            assert puzzle in problem.prompt
            assert task.score(problem, task.answer(problem)) == Score(1.0, True, {"valid": 1.0})


def test_sudoku_cells_style() -> None:
    task = load_task("sudoku4", {**SMALL, "style": "cells"})
    words = sudoku4.vocabulary("cells")
    assert len(set(words)) == 84
    for problem in task.problems("test"):
        prompt = problem.prompt.split(" ")
        assert "".join(word[-1] for word in prompt) == problem.data["puzzle"]
        assert [word[:2] for word in prompt] == [row + column for row in "abcd" for column in "1234"]
        assert {*prompt, *task.answer(problem).split(" ")} <= set(words)
        assert task.score(problem, task.answer(problem)).exact
    assert sudoku4.cell_words("0" * 6 + "2" + "0" * 9).split()[6] == "b3:2"


@needs(D1_SUDOKU)
def test_sudoku_d1_file() -> None:
    """Counts as measured; 376 puzzles with one solution agree with the demo's independent count."""
    task = load_task("sudoku4", {"file": str(D1_SUDOKU)})
    assert task.report() == {
        "train_puzzles": 4096,
        "valid_puzzles": 256,
        "test_puzzles": 500,
        "train_grids": 170,
        "valid_grids": 30,
        "test_grids": 88,
        "file_on_train_grids": 295,
        "file_on_valid_grids": 62,
        "file_on_held_out_grids": 143,
        "file_with_one_solution": 376,
        "file_with_one_solution_on_held_out_grids": 106,
        "file_puzzles_in_train": 0,
    }
    problems = task.problems("test")
    assert problems[0].data == {"puzzle": PUZZLE, "solution": SOLUTION}
    assert all(task.score(problem, task.answer(problem)).exact for problem in problems)
    assert len(load_task("sudoku4", {"file": str(D1_SUDOKU), "test_size": 7}).problems("test")) == 7


def test_sudoku_jsonl_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        "\ufeff" + json.dumps({"puzzle": PUZZLE, "solution": SOLUTION, "more": 1}) + "\n\n", encoding="utf-8"
    )
    task = load_task("sudoku4", {**SMALL, "test_size": None, "file": str(file)})
    assert [dict(problem.data) for problem in task.problems("test")] == [{"puzzle": PUZZLE, "solution": SOLUTION}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "Puzzle,Answer\n", "line 1 must be the header Puzzle,Solution"),
        ("a.csv", "Puzzle,Solution\n", "has a header but no puzzles"),
        ("a.csv", f"Puzzle,Solution\n{PUZZLE}\n", "line 2 must have two columns"),
        ("a.csv", f"Puzzle,Solution\n{PUZZLE},{SOLUTION}\n{PUZZLE[1:]},{SOLUTION}\n", "line 3: the puzzle must be 16"),
        ("a.csv", f"Puzzle,Solution\n{PUZZLE},{ONE_WRONG}\n", "line 2: the solution must be a full 4x4 Sudoku"),
        ("a.csv", f"Puzzle,Solution\n1{PUZZLE[1:]},{SOLUTION}\n", "changes clues"),
        ("a.csv", 'Puzzle,Solution\n"' + "1" * 200_000 + '",2\n', "is not CSV"),
        ("a.csv", "", "is empty"),
        ("a.txt", "x", "must be a .csv or a .jsonl file"),
        ("a.jsonl", '{"puzzle": 3102200002100320, "solution": ""}', "line 1: 'puzzle' must be str, got 3102"),
    ],
)
def test_sudoku_bad_file(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="task.options.file: ") as caught:
        load_task("sudoku4", {**SMALL, "file": str(tmp_path / name)})
    assert expected in str(caught.value) and name in str(caught.value)


# Countdown


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("1", 1, [1]),
        (" 1 + 2*3 ", 7, [1, 2, 3]),
        ("(1+2)*3", 9, [1, 2, 3]),
        ("1-2-3", -4, [1, 2, 3]),
        ("12/4/3", 1, [12, 4, 3]),
        ("1/3", Fraction(1, 3), [1, 3]),
        ("-(2-5)*+2", 6, [2, 5, 2]),
        ("2--3", 5, [2, 3]),
        ("1+\n2", 3, [1, 2]),
        ("((((1))))", 1, [1]),
        ("-" * 900 + "1", 1, [1]),
        ("0", 0, [0]),
    ],
)
def test_expression(text: str, value: Fraction, numbers: list[int]) -> None:
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    ["", " ", "2**3", "7//2", "1 2", "(1", "1)", "()", "1+", "*1", "3(4)", "1.5", "1e3", "01", "a", "1=1", "1,2",
     "\x00", "\u0661", "\u00b2", "1/0", "1/(2-2)", "9" * 13, "9" * 900, "(" * 400 + "1" + ")" * 400, "-" * 2000 + "1",
     "999999999999*" * 60 + "1",
     "__import__('os')", "1 if 1 else 2", "(1).__class__", "0x10", "1_0"],
)  # fmt: skip
def test_not_an_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


def random_expression(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(["", "-", "+", " "]) + str(rng.randint(0, 99))
    operator = rng.choice([" + ", "-", "*", "/"])
    text = random_expression(rng, depth - 1) + operator + random_expression(rng, depth - 1)
    return rng.choice([text, f"({text})", f"-({text})"])


def test_expression_agrees_with_python() -> None:
    """Python's own parser on the same text, with exact fractions for numbers."""
    rng = random.Random(0)
    for _ in range(2000):
        text = random_expression(rng, 3)
        exact = re.sub("[0-9]+", lambda match: f"Fraction({match[0]})", text)
        try:
            expected = eval(exact.strip(), {"Fraction": Fraction})
        except ZeroDivisionError:
            with pytest.raises(ExpressionError, match="division by zero"):
                evaluate(text)
            continue
        assert evaluate(text) == (expected, [int(number) for number in re.findall("[0-9]+", text)])


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("30+93-100", 0.0),
        ("<answer>30+93-100", 0.0),
        (tagged("30+93-100"), 1.0),
        (tagged("93-(100-30)"), 1.0),
        (tagged("93 -\n(100 - 30)"), 1.0),
        (tagged("-100+93+30"), 1.0),
        (tagged("1") + tagged("30+93-100"), 1.0),
        (tagged("30+93-100") + tagged("1"), 0.1),
        (tagged(""), 0.1),
        (tagged("23"), 0.1),
        (tagged("30+93-100=23"), 0.1),
        (tagged("30+93-100+30-30"), 0.1),
        (tagged("30+93"), 0.1),
        (tagged("30+100+93"), 0.1),
        (tagged("30**93**100"), 0.1),
        (tagged("30//93+100"), 0.1),
        (tagged("30/(93-100)"), 0.1),
        (tagged("30+93-100."), 0.1),
        (tagged("\u0663\u0660+93-100"), 0.1),
        (tagged("\\boxed{30+93-100}"), 0.1),
        (tagged("the answer is 30+93-100"), 0.1),
    ],
)
def test_countdown_reward(countdown: Task, response: str, reward: float) -> None:
    problem = Problem("x", "", {"numbers": (30, 100, 93), "target": 23, "solution": None})
    score = countdown.score(problem, response)
    assert (score.reward, score.exact) == (reward, reward == 1.0)
    assert countdown.score(problem, countdown.answer(problem)).exact


def test_countdown_exact_fractions(countdown: Task) -> None:
    """8/(3-8/3) = 24 is exact here; a value off by less than 1e-5 is not."""
    problem = Problem("x", "", {"numbers": (8, 3, 8, 3), "target": 24, "solution": None})
    assert countdown.score(problem, tagged("8/(3-8/3)")).exact
    near = Problem("x", "", {"numbers": (24, 1, 999999), "target": 24, "solution": None})
    assert countdown.score(near, tagged("24+1/999999")).reward == 0.1


def identities(task: Task, split: str) -> set:
    return {(tuple(sorted(p.data["numbers"])), p.data["target"]) for p in task.problems(split)}


@pytest.mark.parametrize("numbers", [(2, 2), (3, 3), (3, 4), (5, 5)])
def test_countdown_generated(numbers: tuple[int, int]) -> None:
    task = load_task("countdown", {**SMALL, "numbers": list(numbers)})
    found = [identities(task, split) for split in ("train", "valid", "test")]
    assert [len(problems) for problems in found] == [40, 10, 20]
    assert len(set.union(*found)) == 70
    for problem in task.problems("train"):
        assert numbers[0] <= len(problem.data["numbers"]) <= numbers[1]
        assert 1 <= problem.data["target"] <= 100 and all(1 <= number <= 100 for number in problem.data["numbers"])
        assert str(problem.data["target"]) in problem.prompt
        assert task.score(problem, task.answer(problem)).exact


def test_countdown_splits_share_nothing_where_problems_are_few() -> None:
    options = {
        "numbers": (2, 2),
        "value": (1, 6),
        "target": (1, 12),
        "train_size": 30,
        "valid_size": 10,
        "test_size": 10,
    }
    task = load_task("countdown", options)
    assert len(set.union(*(identities(task, split) for split in ("train", "valid", "test")))) == 50
    with pytest.raises(UserError, match="task.options.train_size: 1000 is not allowed: after .* no new one"):
        load_task("countdown", {**options, "train_size": 1000})


@needs(D1_COUNTDOWN)
def test_countdown_d1_file(tmp_path: Path) -> None:
    task = load_task("countdown", {"file": str(D1_COUNTDOWN), "train_file": str(D1_COUNTDOWN), **SMALL})
    assert task.report() == {"train_problems": 40, "valid_problems": 10, "test_problems": 20, "train_file_left_out": 20}
    assert task.problems("test")[0].data["numbers"] == (30, 100, 93)
    assert not identities(task, "train") & identities(task, "test")
    task = load_task("countdown", {"file": str(D1_COUNTDOWN), "train_size": 100})
    problems = task.problems("test")
    assert len(problems) == 256
    assert all(task.score(problem, task.answer(problem)).exact for problem in problems)
    with pytest.raises(UserError, match="task.options.train_file: .* has 0 problems"):
        load_task("countdown", {"file": str(D1_COUNTDOWN), "train_file": str(D1_COUNTDOWN)})


def test_countdown_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"numbers": [2, 3], "target": 6}\n{"numbers": [2, 2], "target": 99}\n')
    task = load_task("countdown", {**SMALL, "file": str(file)})
    first, second = task.problems("test")
    assert task.score(first, task.answer(first)).exact
    assert task.answer(second) is None
    assert find_solution([97, 89, 83, 79], 10**8 + 7) is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ('{"numbers": [1, 2], "target": 3}\n{"numbers": [1, 2]', "line 2 is not valid JSON"),
        ("[" * 100_000, "line 1 is not valid JSON"),
        ('{"numbers": [1, 2], "target": 1' + "0" * 5000 + "}", "line 1 is not valid JSON"),
        ("[1, 2]", "line 1 must be a JSON object"),
        ("NaN", "line 1 must be a JSON object"),
        ('{"numbers": [1, 2]}', "line 1 lacks the key 'target'"),
        ('{"input": "1,2"}', "line 1 lacks the key 'output'"),
        ('{"numbers": "1,2", "target": 3}', "'numbers' must be list[int], got '1,2'"),
        ('{"numbers": [1, 2.0], "target": 3}', "'numbers' must be list[int]"),
        ('{"numbers": [1, true], "target": 3}', "'numbers' must be list[int]"),
        ('{"numbers": [1, 2], "target": null}', "'target' must be int, got None"),
        ('{"numbers": [], "target": 3}', "there must be 1 to 8 numbers, got 0"),
        ('{"numbers": [1, -2], "target": 3}', "-2 is not allowed"),
        ('{"numbers": [1, 2], "target": 1000000000}', "1000000000 is not allowed"),
        ('{"input": "1,x", "output": "2"}', "'x' is not a whole number"),
        ('{"input": "1,\u0662", "output": "2"}', "is not a whole number"),
    ],
)
@pytest.mark.parametrize("option", ["file", "train_file"])
def test_countdown_bad_file(tmp_path: Path, option: str, content: str, expected: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_task("countdown", {**SMALL, option: str(file)})
    message = str(caught.value)
    assert message.startswith(f"task.options.{option}: ") and expected in message and "bad.jsonl" in message
    assert len(message) < 400 and "\n" not in message


def test_countdown_agrees_with_reasoning_gym(countdown: Task) -> None:
    """An independent generator's expressions earn the full reward."""
    games = pytest.importorskip("reasoning_gym.games.countdown")
    config = games.CountdownConfig(min_numbers=3, max_numbers=5, min_target=1, max_target=500, seed=3, size=25)
    for entry in games.CountdownDataset(config):
        problem = Problem("x", "", entry["metadata"])
        assert countdown.score(problem, tagged(entry["answer"])).exact


# Files


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="o: '.*none.jsonl' does not exist"):
        read_jsonl(tmp_path / "none.jsonl", "o", {})
    with pytest.raises(UserError, match="is not a file"):
        read_jsonl(tmp_path, "o", {})
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(UserError, match=r"is not UTF-8 text \(byte 7\)"):
        read_jsonl(tmp_path / "latin.jsonl", "o", {})


def test_read_jsonl_counts_lines_as_editors_do(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes('{"a": "x\u2028y"}\r\n\r\n{"a": "z"}'.encode())
    places, records = zip(*read_jsonl(file, "o", {"a": str}), strict=True)
    assert [record["a"] for record in records] == ["x\u2028y", "z"]
    assert [place.split()[-1] for place in places] == ["1", "3"]


# Both tasks


@pytest.mark.parametrize("name", ["sudoku4", "countdown"])
def test_determinism(name: str) -> None:
    one, two = load_task(name, SMALL), load_task(name, SMALL)
    longer, other = load_task(name, {**SMALL, "train_size": 60}), load_task(name, {**SMALL, "seed": 1})
    for split in ("train", "valid", "test"):
        assert one.problems(split) == two.problems(split) != other.problems(split)
    assert longer.problems("train")[:40] == one.problems("train")


def test_first_problems_stay_the_same() -> None:
    """The splits are part of every published number: a change here changes them all."""
    assert load_task("sudoku4", SMALL).problems("test")[0].data["puzzle"] == "0401010000021030"
    first = load_task("countdown", SMALL).problems("test")[0].data
    assert (first["numbers"], first["target"]) == ((77, 61, 99), 39)


HOSTILE = ["<answer>", "</answer>", "<", "(", ")", "-", "+", "*", "**", "/", "//", "0", "9", "42", ".", ",", "=", " ",
           "\n", "\x00", "\u0665", "\u00b2", "\ud800", "\U0001f600", "\u202e", "import os", "a1:0", "{}", "%s", "\\",
           "'", '"']  # fmt: skip


@pytest.mark.parametrize("name", ["sudoku4", "countdown"])
def test_hostile_text(name: str) -> None:
    """Random pieces never raise, and earn a reward from 0 to 1."""
    task = load_task(name, SMALL)
    rng = random.Random(0)
    for number in range(4000):
        text = "".join(rng.choices(HOSTILE, k=rng.randint(0, 40)))
        problem = rng.choice(task.problems("test"))
        score = task.score(problem, f"<answer>{text}</answer>" if number % 2 else text)
        assert 0.0 <= score.reward <= 1.0
        assert score.exact <= (score.reward == 1.0)


@pytest.mark.parametrize(
    "text",
    ["<answer>" * 125_000, "<answer></answer>" * 60_000, "</answer>" * 110_000,
     *(f"<answer>{piece * (10**6 // len(piece))}</answer>" for piece in ("9", "(", "-", "1+", "((1)", " ", "\n", "x",
     "\u0661", "1*", "</answer", "2**"))],
    ids=lambda text: text[:20],
)  # fmt: skip
@pytest.mark.parametrize("name", ["sudoku4", "countdown"])
def test_megabyte_within_a_second(request: pytest.FixtureRequest, name: str, text: str) -> None:
    task = request.getfixturevalue("sudoku" if name == "sudoku4" else "countdown")
    start = time.perf_counter()
    task.score(task.problems("test")[0], text)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sudoku4", {"sytle": "d1"}, "task.options.sytle: no such option; allowed: style, train_empty"),
        ("sudoku4", {"style": "d2"}, "task.options.style: 'd2' is not allowed: Input should be 'd1', 'cells' or 'dig"),
        ("sudoku4", {"train_empty": [8, 13]}, "task.options.train_empty: [8, 13] is not allowed: two numbers"),
        ("sudoku4", {"train_empty": [8, 7]}, "task.options.train_empty"),
        ("sudoku4", {"train_empty": 8}, "task.options.train_empty: 8 is not allowed"),
        ("sudoku4", {"train_empty": ["a", 7]}, "task.options.train_empty.0: 'a' is not allowed"),
        ("sudoku4", {"train_size": 0}, "task.options.train_size: 0 is not allowed"),
        (
            "sudoku4",
            {"train_grids": 280},
            "task.options.valid_grids: 30 is not allowed: with train_grids 280 at most 7",
        ),
        ("sudoku4", {"valid_grids": 0}, "task.options.valid_grids: 0 is not allowed: 0 needs valid_size 0"),
        (
            "sudoku4",
            {"train_grids": 1, "train_empty": [1, 1]},
            "task.options.train_size: 4096 is not allowed: after 16",
        ),
        ("countdown", {"numbers": [1, 3]}, "task.options.numbers: [1, 3] is not allowed"),
        ("countdown", {"target": [5, 1]}, "task.options.target: [5, 1] is not allowed"),
        ("countdown", {1: 2}, "task.options"),
        ("countdown", ["x"], "task.options: must be keys and values, got ['x']"),
        ("countdwon", {}, "'countdwon' is not a task; allowed: sudoku4, countdown, or package.module:Class"),
        (None, {}, "None is not a task"),
        ("no.such.module:X", {}, "there is no module 'no'"),
        ("json:X", {}, "module 'json' has no class 'X'"),
        ("json:JSONDecoder", {}, "is not a subclass of megamem.tasks.base.Task"),
        ("megamem.tasks.base:Task", {}, "does not define problems, score"),
        (":X", {}, "task.name"),
        ("json:", {}, "task.name"),
        ("..x:Y", {}, "task.name"),
    ],
)
def test_mistakes_of_users(name: str, options: object, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_task(name, options)
    assert expected in str(caught.value) and str(caught.value).count("\n") <= 1


USER_TASK = """
from megamem.tasks.base import Problem, Score, Task, TaskOptions

class Echo(Task):
    class Options(TaskOptions):
        words: list[str]

    def problems(self, split):
        return [Problem(f"{split}/{i}", word, {}) for i, word in enumerate(self.options.words)]

    def score(self, problem, response):
        return Score(float(response == problem.prompt), response == problem.prompt)
"""


def test_users_task_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_task.py").write_text(USER_TASK)
    (tmp_path / "broken_task.py").write_text("import no_such_thing\n")
    (tmp_path / "worse_task.py").write_text("def (\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = load_task("echo_task:Echo", {"words": ["a", "b"]})
    problem = task.problems("train")[1]
    assert task.score(problem, "b").exact and task.answer(problem) is None and task.report() == {}
    with pytest.raises(UserError, match="task.options.words: is required"):
        load_task("echo_task:Echo")
    with pytest.raises(UserError, match="importing 'broken_task' failed: ModuleNotFoundError: .*no_such_thing"):
        load_task("broken_task:X")
    with pytest.raises(UserError, match="importing 'worse_task' failed: SyntaxError"):
        load_task("worse_task:X")
