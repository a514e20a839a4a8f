"""Two tasks of many steps, each of which can be checked exactly; for policies trained from scratch.

chain      additions, subtractions and multiplications in a row, modulo 100. The demonstrations contain systematic
           mistakes: with some carries, borrows and sevens the result is mostly off by eleven, so a policy repeats the
           same mistakes, and so does a vote. The answer is right or wrong.
           73a+84b-90=   a73+84=58;b58-90=67;#67   (37 + 48 - 9: units come first, which is quickly learned)
countdown  numbers of which some must be used, in order, to reach a target. The arithmetic is easy and the choice is
           not: a step is right while the target can still be reached. A path is right if it reaches it.
           a12b7c33?45=  a+12=12;b=12;c+33=45;#45
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwx"
SYMBOLS = "0123456789+-*=;#?" + LETTERS
STOP, ANSWER = ";", r"#(\d+)$"
SLIP = 0.01  # chance of any other result


class Chain:
    """level: number of operations. Multiplication by 3, 7 and 9 modulo 100 is invertible, so no mistake disappears on
    the way."""

    name = "chain"
    levels = (8, 10, 12, 16)
    lessons = (1, 2, 3, 4, 6, *levels)  # short ones teach the arithmetic quickly
    habit = 0.7  # chance of the habitual mistake where it is possible
    step_tokens = 10

    def steps(self, level: int) -> int:
        return level

    def lesson(self, rng: random.Random) -> tuple[str, str]:
        return self.draw(rng, rng.choice(self.lessons))

    def draw(self, rng: random.Random, level: int) -> tuple[str, str]:
        """Draws a question and a demonstration of it."""
        value = rng.randrange(100)
        prompt, lines = _digits(value), []
        for letter in LETTERS[:level]:
            sign = rng.choice("+-*")
            operand = rng.choice((3, 7, 9)) if sign == "*" else rng.randrange(1, 100)
            prompt += letter + sign + _digits(operand)
            habitual, result = self.habitual(value, sign, operand), _applied(value, sign, operand)
            if habitual is not None and rng.random() < self.habit:
                result = habitual
            elif rng.random() < SLIP:
                result = rng.randrange(100)
            lines.append(f"{letter}{_digits(value)}{sign}{_digits(operand)}={_digits(result)};")
            value = result
        return prompt + "=", "".join([*lines, f"#{_digits(value)}"])

    def habitual(self, value: int, sign: str, operand: int) -> int | None:
        """The habitual mistake in place of the result, in about one of six steps."""
        last = operand % 10
        carried = sign == "+" and last in (6, 7) and value % 10 + last >= 10
        borrowed = sign == "-" and last in (8, 9) and value % 10 < last
        return (
            (_applied(value, sign, operand) - 11) % 100 if carried or borrowed or (sign, operand) == ("*", 7) else None
        )

    def labels(self, prompt: str, steps: Sequence[str]) -> list[bool]:
        """For each step, whether everything up to it is right."""
        value, operations = self.parsed(prompt)
        right, marks = True, []
        for at, step in enumerate(steps):
            if at < len(operations):
                letter, sign, operand = operations[at]
                result = _applied(value, sign, operand)
                right = right and step == f"{letter}{_digits(value)}{sign}{_digits(operand)}={_digits(result)};"
                value = result
            else:
                right = right and at == len(operations) and step == f"#{_digits(value)}"
            marks.append(right)
        return marks

    def right(self, prompt: str, response: str) -> bool:
        value, operations = self.parsed(prompt)
        for _, sign, operand in operations:
            value = _applied(value, sign, operand)
        return response.endswith(f"#{_digits(value)}")

    def parsed(self, prompt: str) -> tuple[int, list[tuple[str, str, int]]]:
        found = re.findall(r"([a-x])([-+*])(\d\d)", prompt)
        return int(prompt[1::-1]), [(letter, sign, int(operand[::-1])) for letter, sign, operand in found]


class Countdown:
    """level: the largest number allowed; a question has twelve numbers."""

    name = "countdown"
    levels = (5, 9, 15, 25, 40, 60, 99)
    count = 12
    lessons = (2, 4, 8, count, count)
    step_tokens = 11

    def steps(self, level: int) -> int:
        return self.count

    def lesson(self, rng: random.Random) -> tuple[str, str]:
        return self.draw(rng, rng.choice(self.levels), rng.choice(self.lessons))

    def draw(self, rng: random.Random, level: int, count: int = count) -> tuple[str, str]:
        numbers = [rng.randint(1, level) for _ in range(count)]
        value, lines = 0, []
        for letter, number in zip(LETTERS, numbers, strict=False):
            taken = rng.random() < 0.5
            value += number if taken else 0
            lines.append(f"{letter}{f'+{number}' if taken else ''}={value};")
        listed = "".join(f"{letter}{number}" for letter, number in zip(LETTERS, numbers, strict=False))
        return f"{listed}?{value}=", "".join([*lines, f"#{value}"])

    def labels(self, prompt: str, steps: Sequence[str]) -> list[bool]:
        numbers = [int(number) for number in re.findall(r"[a-x](\d+)", prompt)]
        target = int(re.search(r"\?(\d+)", prompt).group(1))  # type: ignore[union-attr]
        reach = [1]  # for each suffix length, a bit set of the sums it can make
        for number in reversed(numbers):
            reach.append(reach[-1] | reach[-1] << number)
        value, right, marks = 0, True, []
        for at, step in enumerate(steps):
            if at < len(numbers):
                letter, number = LETTERS[at], numbers[at]
                value += number if "+" in step else 0
                right = right and step == f"{letter}{f'+{number}' if '+' in step else ''}={value};"
                right = right and value <= target and bool(reach[len(numbers) - at - 1] >> (target - value) & 1)
            else:
                right = right and at == len(numbers) and value == target and step == f"#{value}"
            marks.append(right)
        return marks

    def right(self, prompt: str, response: str) -> bool:
        steps = split(response)
        return len(steps) == self.count + 1 and all(self.labels(prompt, steps))


Ground = Chain | Countdown
GROUNDS: dict[str, Ground] = {"chain": Chain(), "countdown": Countdown()}


def questions(ground: Ground, level: int, count: int, part: str) -> list[str]:
    """Prompts of one level. Different parts share a prompt only by chance, about one in billions."""
    rng = random.Random(f"{ground.name} {level} {part}")
    return [ground.draw(rng, level)[0] for _ in range(count)]


def demonstrations(ground: Ground, count: int) -> list[dict[str, str]]:
    rng = random.Random(f"{ground.name} demonstrations")
    pairs = [ground.lesson(rng) for _ in range(count)]
    return [{"prompt": prompt, "response": response} for prompt, response in pairs]


def split(response: str) -> list[str]:
    """Splits a response into steps, each with its terminator."""
    return re.findall(r"[^;]*;|[^;]+$", response)


def _digits(value: int) -> str:
    return f"{value % 10}{value // 10}"


def _applied(value: int, sign: str, operand: int) -> int:
    return (value * operand if sign == "*" else value + operand if sign == "+" else value - operand) % 100


def new_tokenizer() -> Any:
    """A tokenizer with one token per character."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *SYMBOLS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        model_max_length=512, clean_up_tokenization_spaces=False,
    )  # fmt: skip
