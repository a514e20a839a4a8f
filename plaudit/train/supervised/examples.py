"""Training examples: token ids and targets, ready to be packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A response to imitate: the loss is on the tokens from `answer_at` on."""

    tokens: tuple[int, ...]
    answer_at: int


@dataclass(frozen=True, slots=True)
class Comparison:
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Rating:
    """One number per attribute; NaN for missing ratings."""

    tokens: tuple[int, ...]
    ratings: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepTargets:
    """`ends[i]` is the index of the token that ends step i, `targets[i]` the probability that the step is right."""

    tokens: tuple[int, ...]
    ends: tuple[int, ...]
    targets: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Preferred:
    """A preference pair for a policy. `reference`: the log-probs of both responses under the initial policy."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    reference: tuple[float, float] = (0.0, 0.0)

    @property
    def responses(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class Labelled:
    """A response that is desirable or not, and one to another prompt, by which the policy's drift is measured.
    `reference`: the log-probs of both after this prompt at the start."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    desirable: bool
    other: tuple[int, ...] = ()
    reference: tuple[float, float] = (0.0, 0.0)

    @property
    def responses(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.response, self.other


Example = Demonstration | Comparison | Rating | StepTargets | Preferred | Labelled


def token_count(example: Example) -> int:
    if isinstance(example, Preferred):
        return len(example.prompt) + len(example.chosen) + len(example.rejected)
    if isinstance(example, Labelled):
        return len(example.prompt) + max(map(len, example.responses))  # of two passes the larger
    if isinstance(example, Comparison):
        return len(example.chosen) + len(example.rejected)
    return len(example.tokens)


def shares(examples: Sequence[Example], count: int) -> list[list[Example]]:
    """The examples in order, in at most `count` parts of about as many tokens each."""
    parts: list[list[Example]] = [[] for _ in range(count)]
    total, before = sum(map(token_count, examples)), 0
    for example in examples:
        middle = before + token_count(example) / 2
        parts[min(count - 1, int(middle * count / total))].append(example)
        before += token_count(example)
    return [part for part in parts if part]
