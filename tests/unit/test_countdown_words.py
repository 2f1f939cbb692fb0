"""Countdown in style `words`: prompts and answers of one word each, for tiny models."""

from pathlib import Path

import pytest

from megamem.errors import UserError
from megamem.tasks.base import Problem, Task
from megamem.tasks.countdown import spaced, vocabulary
from megamem.tasks.registry import load_task
from megamem.tasks.tokenizer import load_tokenizer, train_word_sentencepiece

RANGES = {"numbers": [2, 3], "value": [1, 12], "target": [1, 40]}
SIZES = {"train_size": 60, "valid_size": 10, "test_size": 20}


@pytest.fixture(scope="module")
def words() -> Task:
    return load_task("countdown", {"style": "words", **RANGES, **SIZES})


def test_same_problems_as_in_the_other_style(words: Task) -> None:
    """Only the wording differs."""
    in_tags = load_task("countdown", {**RANGES, **SIZES})
    for split, size in (("train", 60), ("valid", 10), ("test", 20)):
        assert len(words.problems(split)) == size
        for short, long in zip(words.problems(split), in_tags.problems(split), strict=True):
            assert (short.key, short.data) == (long.key, long.data)
            assert short.prompt == f"{short.data['target']} = {' '.join(map(str, short.data['numbers']))}"


def test_answers_are_right_and_made_of_the_vocabulary(words: Task, tmp_path: Path) -> None:
    train_word_sentencepiece(vocabulary(40), tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(tmp_path)
    for problem in words.problems("train"):
        answer = words.answer(problem)
        for text in (problem.prompt, answer):
            ids = tokenizer.encode(text)
            assert len(ids) == len(text.split())
            assert min(ids) >= 3  # none unknown
            assert tokenizer.decode(ids) == text
        assert words.score(problem, answer).exact


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("(7-3)*5", "( 7 - 3 ) * 5"), ("12/-3", "12 / - 3"), ("10", "10"), ("", "")],
)
def test_spaced(expression: str, expected: str) -> None:
    assert spaced(expression) == expected


@pytest.mark.parametrize(
    ("response", "reward", "answered", "numbers"),
    [
        ("3 * 8 / 1", 1.0, 1.0, 1.0),
        ("3*8*1", 1.0, 1.0, 1.0),
        (" ( 8 - 1 ) * 3 ", 0.1, 1.0, 1.0),
        ("3 * 8", 0.1, 1.0, 0.0),
        ("3 * 8 * 1 = 24", 0.1, 1.0, 0.0),
        ("3 8 1", 0.1, 1.0, 0.0),
        ("<answer> 3 * 8 / 1 </answer>", 0.1, 1.0, 0.0),
        ("", 0.0, 0.0, 0.0),
        (" \n", 0.0, 0.0, 0.0),
    ],
)
def test_reward(words: Task, response: str, reward: float, answered: float, numbers: float) -> None:
    """As in the other style, with the whole response in the place of the text between the tags."""
    problem = Problem("x", "24 = 3 8 1", {"numbers": (3, 8, 1), "target": 24, "solution": None})
    score = words.score(problem, response)
    assert (score.reward, score.exact) == (reward, reward == 1.0)
    assert score.parts == {"answered": answered, "numbers": numbers}


def test_unknown_style() -> None:
    with pytest.raises(UserError, match=r"task\.options\.style: 'digits' is not allowed"):
        load_task("countdown", {"style": "digits"})
