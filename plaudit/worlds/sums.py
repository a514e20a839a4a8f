"""Chains of additions written out step by step: a task in which everything can be checked against the truth.

    prompt    7+8+4=
    response  7+8=15;15+4=19;#19

A step ends at `;`, the answer starts at `#`. Every item is a pure function of (seed, split, index), so data needs no
state and no file. A hash of a problem's text decides whether it is held out: training and held-out sets cannot overlap.

The demonstrator makes two kinds of errors: random slips, and a systematic one: when adding 7 with a carry, it mostly
forgets the carry. A policy that imitates it is wrong on such chains even with greedy decoding, so RL can improve it.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from plaudit.config import SumsTable

Split = Literal["train", "heldout"]

STEP_END, ANSWER = ";", "#"
SYMBOLS = "0123456789+=" + STEP_END + ANSWER
HARD_OPERANDS = (8, 10)
HABIT_DIGIT = 7
HELDOUT_SHARE = 0.1
# Kinds of errors of wrong responses and their frequency, similar to those of policies trained on this task.
FAULTS = {"noise": 3, "slip": 3, "carry": 2, "operand": 1, "skip": 1, "answer": 1, "unfinished": 1}
# The share of near misses whose steps are right but whose answer is wrong.
NEAR_ANSWERS = 0.3

_STEP = re.compile(r"(\d{1,9})\+(\d{1,9})=(\d{1,9});")
_ANSWER = re.compile(r"#(\d{1,9})")
_PROMPT = re.compile(r"\d+(\+\d+)+=")


@dataclass(frozen=True, slots=True)
class Problem:
    operands: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return "+".join(map(str, self.operands)) + "="

    @property
    def answer(self) -> int:
        return sum(self.operands)

    @property
    def solution(self) -> str:
        """The shortest correct response."""
        total, text = self.operands[0], ""
        for operand in self.operands[1:]:
            text += f"{total}+{operand}={total + operand};"
            total += operand
        return f"{text}#{total}"

    def near_miss(self, at: int, by: int) -> str:
        """The solution with the result of its `at`-th addition, counted from 1, wrong by `by`, and the results that
        follow from it; the answer is counted after the last addition."""
        total, text = self.operands[0], ""
        for place, operand in enumerate(self.operands[1:], 1):
            result = total + operand + (by if place == at else 0)
            text += f"{total}+{operand}={result};"
            total = result
        return f"{text}#{total + (by if at == len(self.operands) else 0)}"

    @staticmethod
    def parse(prompt: str) -> Problem:
        if not _PROMPT.fullmatch(prompt):
            raise ValueError(f"{prompt!r} is not a problem of the sums world; expected, for example, '7+8+4='")
        return Problem(tuple(int(part) for part in prompt[:-1].split("+")))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ground truth of a response.

    sound   per step: this step and all before it are right (the answer counts as the last step)
    right   the answer is the sum
    needed  the number of steps of the shortest correct response
    """

    sound: tuple[bool, ...]
    right: bool
    needed: int

    @property
    def first_wrong(self) -> int:
        """Index of the first wrong step; -1 if there is none."""
        return next((i for i, ok in enumerate(self.sound) if not ok), -1)


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: str
    chosen: str
    rejected: str
    margin: float


def split_steps(response: str) -> list[str]:
    """The steps of a response, each with its final `;`; text after the last `;` is a separate step."""
    return [part for part in re.split(r"(?<=;)", response) if part]


def judge(problem: Problem, response: str) -> Verdict:
    """Checks every step and the answer. A step may also be true but unnecessary (`15+0=15;`)."""
    total, following = problem.operands[0], 1
    sound: list[bool] = []
    answer: int | None = None
    for step in split_steps(response):
        ok = not sound or sound[-1]
        if match := _STEP.fullmatch(step):
            left, right, result = map(int, match.groups())
            advances = following < len(problem.operands) and right == problem.operands[following]
            ok = ok and left == total and left + right == result and (advances or right == 0)
            total, following = result, following + advances
        elif match := _ANSWER.fullmatch(step):
            answer = int(match[1])
            ok = ok and answer == total and following == len(problem.operands)
        else:
            ok = False
        sound.append(ok)
    return Verdict(tuple(sound), answer == problem.answer, len(problem.operands))


class Sums:
    def __init__(self, table: SumsTable, seed: int = 1) -> None:
        self.table = table
        self.seed = seed

    def problem(self, split: Split, index: int) -> Problem:
        return self._draw(self._random(split, "problem", index), split)

    def heldout(self, count: int) -> list[Problem]:
        """`count` different held-out problems, or all if there are fewer."""
        problems: dict[Problem, None] = {}
        for index in range(50 * count):
            problems.setdefault(self.problem("heldout", index))
            if len(problems) == count:
                break
        return list(problems)

    def shortest(self, count: int) -> list[Problem]:
        """`count` different problems with the fewest numbers, or all if there are fewer. They are too few for a
        held-out tenth to be useful for evaluation, so training may have seen them."""
        rng = random.Random(f"{self.seed} shortest")
        problems: dict[Problem, None] = {}
        for _ in range(50 * count):
            problems.setdefault(self._numbers(self.table.operands[0], rng))
            if len(problems) == count:
                break
        return list(problems)

    def demonstration(self, split: Split, index: int) -> tuple[Problem, str]:
        rng = self._random(split, "demonstration", index)
        problem = self._draw(rng, split)
        return problem, self._demonstrate(problem, rng, self.table.slip)

    def pair(self, split: Split, index: int) -> Pair:
        """Right over wrong; and, in a quarter of cases, short over rambling. The margin is 1 and 0.5."""
        if miss := self._near(split, "pair", index):
            problem, at, by = miss
            return Pair(problem.prompt, problem.solution, problem.near_miss(at, by), 1.0)
        rng = self._random(split, "pair", index)
        problem = self._draw(rng, split)
        if rng.random() < 0.25:
            return Pair(problem.prompt, problem.solution, self._ramble(problem, rng), 0.5)
        right = problem.solution if rng.random() < 0.8 else self._ramble(problem, rng)
        return Pair(problem.prompt, right, self._wrong(problem, rng), 1.0)

    def judged(self, split: Split, index: int) -> tuple[Problem, str, Verdict]:
        """A solution with the truth of every step; about half are wrong somewhere.

        A near miss comes after its correct twin, and both end with the step in question: the two differ in one digit
        and one label, and no step after the error is labelled wrong for a reason that the model has not seen yet.
        """
        if miss := self._near(split, "judged", index, twins=2):
            problem, at, by = miss
            response = "".join(split_steps(problem.near_miss(at, by if index % 2 else 0))[:at])
            return problem, response, judge(problem, response)
        rng = self._random(split, "judged", index)
        problem = self._draw(rng, split)
        response = self._wrong(problem, rng) if rng.random() < 0.5 else self._demonstrate(problem, rng, 0.0)
        return problem, response, judge(problem, response)

    def _near(self, split: Split, kind: str, index: int, twins: int = 1) -> tuple[Problem, int, int] | None:
        """A problem, the index of the error and its size; None if this item is not a near miss. `twins` consecutive
        items have the same."""
        first = index - index % twins
        if self.table.near == 0 or first < self.table.near_from:
            return None
        rng = self._random(split, f"near {kind}", first)
        if rng.random() >= self.table.near:
            return None
        problem = self._draw(rng, split)
        last = len(problem.operands)
        at = last if rng.random() < NEAR_ANSWERS else rng.randint(1, last - 1)
        return problem, at, rng.choice((-1, 1))

    def _random(self, split: Split, kind: str, index: int) -> random.Random:
        return random.Random(f"{self.seed} {split} {kind} {index}")

    def _draw(self, rng: random.Random, split: Split) -> Problem:
        low, high = HARD_OPERANDS if rng.random() < self.table.hard_share else self.table.operands
        while True:
            problem = self._numbers(rng.randint(low, high), rng)
            if is_heldout(problem) == (split == "heldout"):
                return problem

    def _numbers(self, count: int, rng: random.Random) -> Problem:
        # No 0 among the numbers: so `+0` is always an unnecessary step, and steps are unambiguous.
        return Problem(tuple(rng.randrange(1, 10**self.table.digits) for _ in range(count)))

    def _demonstrate(self, problem: Problem, rng: random.Random, slip: float) -> str:
        total, text = problem.operands[0], ""
        for operand in problem.operands[1:]:
            if rng.random() < self.table.ramble:
                text += f"{total}+0={total};"
            result = total + operand
            if _habitual(total, operand) and rng.random() < self.table.habit:
                result -= 10
            elif rng.random() < slip:
                result = _slip(result, rng)
            text += f"{total}+{operand}={result};"
            total = result
        if rng.random() < slip / 4:
            total = _slip(total, rng)
        return f"{text}#{total}"

    def _ramble(self, problem: Problem, rng: random.Random) -> str:
        """A correct response with one to three unnecessary steps."""
        steps = split_steps(problem.solution)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(steps))
            total = steps[at - 1].split("=")[1][:-1] if at else str(problem.operands[0])
            steps.insert(at, f"{total}+0={total};")
        return "".join(steps)

    def _wrong(self, problem: Problem, rng: random.Random) -> str:
        """A response with a wrong answer, with an error typical of policies."""
        while True:
            response = "".join(self._corrupt(problem, rng))
            if not judge(problem, response).right:
                return response

    def _corrupt(self, problem: Problem, rng: random.Random) -> Iterator[str]:
        (how,) = rng.choices(list(FAULTS), list(FAULTS.values()))
        if how == "noise":
            yield self._demonstrate(problem, rng, max(self.table.slip, 0.15))
            return
        total, last = problem.operands[0], len(problem.operands) - 1
        fault = rng.randint(1, last)
        for i, operand in enumerate(problem.operands[1:], 1):
            if rng.random() < self.table.ramble / 2:
                yield f"{total}+0={total};"
            if i == fault and how == "skip":
                continue
            if i == fault and how == "operand":
                operand = _other(operand, 10**self.table.digits, rng)
            result = total + operand
            if i == fault and how == "carry" and result >= 10:
                result -= 10
            elif i == fault and how in ("slip", "carry"):
                result = _slip(result, rng)
            yield f"{total}+{operand}={result};"
            total = result
            if i == fault and how == "unfinished":
                return
        yield f"#{_slip(total, rng) if how == 'answer' else total}"


def is_heldout(problem: Problem) -> bool:
    digest = hashlib.sha256(problem.prompt.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32


def _habitual(total: int, operand: int) -> bool:
    return operand % 10 == HABIT_DIGIT and total % 10 + HABIT_DIGIT >= 10


def _other(operand: int, end: int, rng: random.Random) -> int:
    """Another number from 1 to end - 1."""
    number = rng.randrange(1, end - 1)
    return number + (number >= operand)


def _slip(result: int, rng: random.Random) -> int:
    """Another number of about the same size. Any other, not only near ones: a model then learns the coarse check
    first and then the exact one; with slips of only one or two it learned neither within minutes."""
    while True:
        wrong = rng.randrange(2 * result + 10)
        if wrong != result:
            return wrong
