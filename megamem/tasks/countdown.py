"""Countdown: write an arithmetic expression that uses every given number once and equals a target.

The reward is that of d1 (arXiv 2504.12216) and BGPO (arXiv 2510.11683): 0 without an `<answer>`; 1 where the last
answer uses exactly the given numbers and equals the target; 0.1 otherwise. Theirs is computed by Python's `eval`
after a check of the characters, which lets `**` and `//` through, and `9**9**9` hangs. Here a small parser knows
`+ - * /`, parentheses and signs, and computes with exact fractions. What it refuses and `eval` does not (`**`, `//`,
decimals) earns 0.1; an expression broken over several lines is one expression here.

Problems are our own: a random expression of the numbers gives the target, so each has a solution. reasoning-gym's
`countdown` (0.1.25) makes equally sound ones (600 of 600 checked) but takes about 10 ms each, through sympy: 20,000
training problems would take minutes at every start. It serves as an independent check in the tests instead.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, field_validator

from megamem.errors import UserError
from megamem.platform.rng import derive_seed
from megamem.tasks.base import Problem, Score, Split, Task, TaskOptions, last_answer, read_jsonl, shown

FORMAT_REWARD = 0.1

# Bounds of an expression; all far beyond what a problem needs.
_MOST_CHARACTERS = 1000
_MOST_DEPTH = 50  # nested parentheses
_MOST_DIGITS = 12  # of one number
_MOST_VALUE = 10**30  # numerator and denominator of any intermediate value

_MOST_NUMBERS = 8
_MOST_STEPS = 100_000  # of the search for a solution, a second or two
_DEFAULT_TRAIN_SIZE, _DEFAULT_TEST_SIZE = 4096, 256
_ATTEMPTS = 10_000  # per problem; a generator that needs more has run out of problems

_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])", re.ASCII)

_PROMPT = """\
Write an arithmetic expression that equals {target}, using only the numbers {numbers}. Use every number exactly once. \
Allowed are + - * / and parentheses. Do not write an equals sign or the target.

Respond in the following format:
<reasoning>
your reasoning
</reasoning>
<answer>
the expression, for example (7-3)*5
</answer>"""

_ANSWER = """\
<reasoning>
{steps}
</reasoning>
<answer>
{expression}
</answer>"""


class CountdownOptions(TaskOptions):
    """Options of `Countdown`. The defaults are the ranges of d1's test file.

    Attributes:
        style: `d1`, a prompt in words answered in `<answer>` tags; `words`, for tiny models: the prompt is
            `24 = 3 8 1`, the response the expression and nothing else, spaces between all words (see `vocabulary`).
        numbers: fewest and most numbers of a generated problem.
        value: smallest and largest number given.
        target: smallest and largest target.
        train_size: number of training problems; not given: all of `train_file`, or 4096 without one.
        valid_size: number of validation problems; with `train_file` its last ones.
        test_size: number of test problems; not given: all of `file`, or 256 without one.
        seed: which problems are generated.
        file: test problems instead of generated ones, JSONL: d1's form {"input": "30,100,93", "output": "23"} or
            {"numbers": [30, 100, 93], "target": 23}.
        train_file: training and validation problems in the same forms. Repeated problems and those that are also
            test problems are left out; `Countdown.report` counts them.
    """

    style: Literal["d1", "words"] = "d1"
    numbers: tuple[int, int] = (3, 3)
    value: tuple[int, int] = (1, 100)
    target: tuple[int, int] = (1, 100)
    train_size: int | None = Field(None, ge=1)
    valid_size: int = Field(256, ge=0)
    test_size: int | None = Field(None, ge=1)
    seed: int = 0
    file: str | None = None
    train_file: str | None = None

    @field_validator("numbers")
    @classmethod
    def _check_numbers(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 2 <= value[0] <= value[1] <= 5:
            raise ValueError("how many numbers, fewest and most, within 2 and 5")
        return value

    @field_validator("value", "target")
    @classmethod
    def _check_range(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= value[0] <= value[1] <= 10**6:
            raise ValueError("smallest and largest, within 1 and 1000000")
        return value


def vocabulary(largest: int) -> list[str]:
    """All words of style `words`: the sign `=`, what expressions are made of, and the numbers 1 to `largest`."""
    return [*"=+-*/()", *(str(number) for number in range(1, largest + 1))]


def spaced(expression: str) -> str:
    """An expression with one space between its words."""
    return " ".join(_TOKEN.findall(expression))


class ExpressionError(ValueError):
    """Text that is not an expression, or one beyond the bounds, or a division by zero."""


class _Parser:
    """Recursive descent: sum = term (+|- term)*, term = factor (*|/ factor)*, factor = sign* (number | "(" sum ")")."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        self.at = 0
        self.numbers: list[int] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ExpressionError("unexpected character")
            self.tokens.append(match[1])
            position = match.end()

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.term(depth)
        while self.peek() in ("+", "-"):
            value = combine(self.take(), value, self.term(depth))
        return value

    def term(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.peek() in ("*", "/"):
            value = combine(self.take(), value, self.factor(depth))
        return value

    def factor(self, depth: int) -> Fraction:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        token = self.take()
        if token == "(":
            if depth == _MOST_DEPTH:
                raise ExpressionError("parentheses too deep")
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise ExpressionError("parenthesis not closed")
        elif token.isdigit():
            if len(token) > _MOST_DIGITS or (token[0] == "0" and token != "0"):
                raise ExpressionError("number too long or with a leading zero")
            self.numbers.append(int(token))
            value = Fraction(token)
        else:
            raise ExpressionError("number or parenthesis expected")
        return -value if negative else value


def combine(operator: str, left: Fraction, right: Fraction) -> Fraction:
    """`left operator right`, exactly.

    Raises:
        ExpressionError: division by zero, or a numerator or denominator above 10^30.
    """
    if operator == "/":
        if right == 0:
            raise ExpressionError("division by zero")
        value = left / right
    elif operator == "*":
        value = left * right
    else:
        value = left + right if operator == "+" else left - right
    if max(abs(value.numerator), value.denominator) > _MOST_VALUE:
        raise ExpressionError("value too large")
    return value


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression and the numbers in it, from left to right.

    Raises:
        ExpressionError: not an expression of `+ - * /`, parentheses, signs and whole numbers in ASCII; more than 1000
            characters, 50 nested parentheses or 12 digits per number; or as `combine`.
    """
    text = text.strip()
    if len(text) > _MOST_CHARACTERS:
        raise ExpressionError("expression too long")
    parser = _Parser(text)
    value = parser.sum(depth=0)
    if parser.peek():
        raise ExpressionError("operator expected")
    return value, parser.numbers


@dataclass(frozen=True)
class _Node:
    """An expression under construction: its value, its text, how tightly its last operator binds, and how it came."""

    value: Fraction
    text: str
    binding: int  # 1 for + and -, 2 for * and /, 3 for a number
    steps: tuple[str, ...] = ()


def _join(operator: str, left: _Node, right: _Node) -> _Node:
    value = combine(operator, left.value, right.value)
    binding = 1 if operator in "+-" else 2
    first = left.text if left.binding >= binding else f"({left.text})"
    keep = right.binding > binding or (right.binding == binding and operator in "+*")
    second = right.text if keep else f"({right.text})"
    step = f"{_operand(left.value)}{operator}{_operand(right.value)}={value}"
    return _Node(value, f"{first}{operator}{second}", binding, (*left.steps, *right.steps, step))


def _operand(value: Fraction) -> str:
    return str(value) if value >= 0 and value.denominator == 1 else f"({value})"


def _leaves(numbers: Sequence[int]) -> list[_Node]:
    return [_Node(Fraction(number), str(number), 3) for number in numbers]


def find_solution(numbers: Sequence[int], target: int) -> tuple[str, tuple[str, ...]] | None:
    """An expression that uses every number once and equals the target, with its steps ("100-93=7", ...).

    Exhaustive for up to four numbers; beyond that the search gives up, with None, after 100,000 steps.
    """
    if len(numbers) > _MOST_NUMBERS or not numbers:
        return None
    for node in itertools.islice(_combinations(_leaves(numbers)), _MOST_STEPS):
        if node is not None and node.value == target:
            return node.text, node.steps
    return None


def _combinations(nodes: list[_Node]) -> Iterator[_Node | None]:
    """Every way to join all nodes into one; a None for every join on the way, so that a caller can count work."""
    if len(nodes) == 1:
        yield nodes[0]
        return
    for i, j in itertools.combinations(range(len(nodes)), 2):
        rest = [node for k, node in enumerate(nodes) if k not in (i, j)]
        a, b = nodes[i], nodes[j]
        for operator, left, right in (("+", a, b), ("*", a, b), ("-", a, b), ("-", b, a), ("/", a, b), ("/", b, a)):
            yield None
            try:
                joined = _join(operator, left, right)
            except ExpressionError:
                continue
            yield from _combinations([*rest, joined])


def _random_node(options: CountdownOptions, rng: random.Random) -> tuple[list[int], _Node | None]:
    """Random numbers and a random expression of them; None where it has no whole value within the targets."""
    numbers = [rng.randint(*options.value) for _ in range(rng.randint(*options.numbers))]
    nodes = _leaves(numbers)
    while len(nodes) > 1:
        left, right = (nodes.pop(rng.randrange(len(nodes))) for _ in range(2))
        # Only whole intermediate values: a division that leaves a remainder is not taken.
        divides = right.value != 0 and (left.value / right.value).denominator == 1
        nodes.append(_join(rng.choice("+-*/" if divides else "+-*"), left, right))
    value = nodes[0].value
    return numbers, nodes[0] if options.target[0] <= value <= options.target[1] else None


@dataclass(frozen=True)
class _Item:
    numbers: tuple[int, ...]
    target: int
    solution: tuple[str, tuple[str, ...]] | None = None  # known for generated problems

    @cached_property
    def identity(self) -> tuple[tuple[int, ...], int]:
        return tuple(sorted(self.numbers)), self.target


@dataclass(frozen=True)
class _Style:
    """How problems are put and answered.

    Attributes:
        prompt: the text of the user's turn.
        answer: the response that gives an expression and its steps.
        read: the expression that a response gives; None where it gives none.
    """

    prompt: Callable[[_Item], str]
    answer: Callable[[str, Sequence[str]], str]
    read: Callable[[str], str | None]


_STYLES: dict[str, _Style] = {
    "d1": _Style(
        lambda item: _PROMPT.format(target=item.target, numbers=", ".join(map(str, item.numbers))),
        lambda expression, steps: _ANSWER.format(steps="\n".join(steps), expression=expression),
        last_answer,
    ),
    "words": _Style(
        lambda item: " ".join(map(str, (item.target, "=", *item.numbers))),
        lambda expression, steps: spaced(expression),
        lambda response: response.strip() or None,
    ),
}


class Countdown(Task):
    """See the module's text; options: `CountdownOptions`."""

    Options = CountdownOptions

    def __init__(self, options: CountdownOptions) -> None:
        super().__init__(options)
        self._style = _STYLES[options.style]
        self._left_out = 0
        seen: set[tuple[tuple[int, ...], int]] = set()
        if options.file is None:
            test = self._generate("test", options.test_size or _DEFAULT_TEST_SIZE, seen)
        else:
            test = read_problems(options.file, "task.options.file")[: options.test_size]
            seen.update(item.identity for item in test)
        if options.train_file is None:
            valid = self._generate("valid", options.valid_size, seen)
            train = self._generate("train", options.train_size or _DEFAULT_TRAIN_SIZE, seen)
        else:
            train, valid = self._from_train_file(options.train_file, seen)
        items = {"train": train, "valid": valid, "test": test}
        self._problems = {split: self._to_problems(split, found) for split, found in items.items()}

    def _generate(self, split: Split, size: int, seen: set[Any]) -> list[_Item]:
        """`size` problems that are not in `seen`, which they join."""
        items = []
        for index in range(size):
            rng = random.Random(derive_seed(self.options.seed, "countdown", split, index))
            for _ in range(_ATTEMPTS):
                numbers, node = _random_node(self.options, rng)
                if node is None:
                    continue
                item = _Item(tuple(numbers), int(node.value), (node.text, node.steps))
                if item.identity not in seen:
                    break
            else:
                raise UserError(
                    f"task.options.{split}_size: {size} is not allowed: after {index} problems no new one was found "
                    "within task.options.numbers, value and target"
                )
            seen.add(item.identity)
            items.append(item)
        return items

    def _from_train_file(self, path: str, seen: set[Any]) -> tuple[list[_Item], list[_Item]]:
        read = read_problems(path, "task.options.train_file")
        kept = []
        for item in read:
            if item.identity not in seen:
                seen.add(item.identity)
                kept.append(item)
        self._left_out = len(read) - len(kept)
        train_size = len(kept) - self.options.valid_size
        if train_size < 1:
            raise UserError(
                f"task.options.train_file: {path!r} has {len(kept)} problems that are not test problems; "
                f"task.options.valid_size ({self.options.valid_size}) leaves none for training"
            )
        return kept[:train_size][: self.options.train_size], kept[train_size:]

    def _to_problems(self, split: Split, items: Sequence[_Item]) -> list[Problem]:
        return [
            Problem(
                key=f"{split}/{index}",
                prompt=self._style.prompt(item),
                data={"numbers": item.numbers, "target": item.target, "solution": item.solution},
            )
            for index, item in enumerate(items)
        ]

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._problems[split]

    def score(self, problem: Problem, response: str) -> Score:
        """0, 0.1 or 1 as the module says; the part `numbers` is 1 where each number is used exactly once."""
        text = self._style.read(response)
        if text is None:
            return Score(0.0, False, {"answered": 0.0, "numbers": 0.0})
        try:
            value, used = evaluate(text)
        except ExpressionError:
            return Score(FORMAT_REWARD, False, {"answered": 1.0, "numbers": 0.0})
        right_numbers = sorted(used) == sorted(problem.data["numbers"])
        exact = right_numbers and value == problem.data["target"]
        parts = {"answered": 1.0, "numbers": float(right_numbers)}
        return Score(1.0 if exact else FORMAT_REWARD, exact, parts)

    def answer(self, problem: Problem) -> str | None:
        """A solution with its steps: the generator's own, or for a file's problem one found by search."""
        found = problem.data["solution"] or find_solution(problem.data["numbers"], problem.data["target"])
        return None if found is None else self._style.answer(*found)

    def report(self) -> Mapping[str, Any]:
        """Sizes of the splits, and how many problems of `train_file` were repeats or test problems."""
        facts: dict[str, Any] = {f"{split}_problems": len(found) for split, found in self._problems.items()}
        if self.options.train_file is not None:
            facts["train_file_left_out"] = self._left_out
        return facts


def read_problems(path: str, option: str) -> list[_Item]:
    """The problems of a JSONL file, in either form of `CountdownOptions.file`; the first line decides which.

    Raises:
        UserError: naming `option`, the file and the line.
    """
    first = read_jsonl(path, option, {})[0][1]
    if "input" in first or "output" in first:
        records = read_jsonl(path, option, {"input": str, "output": str})
        rows = [(place, record["input"].split(","), record["output"]) for place, record in records]
    else:
        records = read_jsonl(path, option, {"numbers": list[int], "target": int})
        rows = [(place, record["numbers"], record["target"]) for place, record in records]
    return [_item(place, numbers, target) for place, numbers, target in rows]


def _item(place: str, numbers: Sequence[int | str], target: int | str) -> _Item:
    if not 1 <= len(numbers) <= _MOST_NUMBERS:
        raise UserError(f"{place}: there must be 1 to {_MOST_NUMBERS} numbers, got {len(numbers)}")
    return _Item(tuple(_whole(place, number, negative=False) for number in numbers), _whole(place, target))


def _whole(place: str, value: int | str, negative: bool = True) -> int:
    """A whole number below 10^9 in absolute value, from JSON or from text."""
    if isinstance(value, str):
        text = value.strip()
        if not re.fullmatch("-?[0-9]{1,9}", text):
            raise UserError(f"{place}: {shown(value)} is not a whole number of at most 9 digits")
        value = int(text)
    if abs(value) >= 10**9 or (value < 0 and not negative):
        raise UserError(f"{place}: {value} is not allowed: numbers from 0 to 999999999, targets may be negative")
    return value
