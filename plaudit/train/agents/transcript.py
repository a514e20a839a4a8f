"""A growing conversation with the policy, token by token: its input and its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit.records import FinishReason, Sample


@dataclass(eq=False)
class Transcript:
    """`prompt_ids` are read and not trained on; `budget` is the number of tokens that may follow, messages included."""

    prompt_ids: tuple[int, ...] = ()
    budget: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)
    reshaped: bool = False  # whether a turn was sampled from another distribution than the tempered softmax
    experts: bytes | None = None
    versions: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turns: int = 0
    finish: FinishReason = "stop"

    @property
    def context(self) -> list[int]:
        return [*self.prompt_ids, *self.tokens]

    @property
    def left(self) -> int:
        return self.budget - len(self.tokens)

    def add(self, read: Sequence[int], wrote: Sample) -> None:
        """Add a turn: the tokens between the policy's last token and this turn, and its sample."""
        for numbers in (self.logprobs, self.raw_logprobs, self.behaviour):
            numbers += [0.0] * len(read)
        self.tokens += [*read, *wrote.token_ids]
        self.logprobs += wrote.logprobs
        self.raw_logprobs += wrote.raw_logprobs
        self.behaviour += wrote.behaviour
        self.reshaped = self.reshaped or wrote.tempered_logprobs is not None
        self.versions += [*(wrote.versions[:1] * len(read)), *wrote.versions]
        self.mask += [*([0] * len(read)), *wrote.mask]
        self.experts = wrote.experts  # a turn's has those of all that was read before it
        self.turns += 1
        self.finish = wrote.finish_reason

    def sample(self, tokenizer: Any, group: int, index: int) -> Sample:
        return Sample(
            prompt_ids=self.prompt_ids, token_ids=tuple(self.tokens),
            text=tokenizer.decode(self.tokens, skip_special_tokens=True), logprobs=tuple(self.logprobs),
            raw_logprobs=tuple(self.raw_logprobs), versions=tuple(self.versions), mask=tuple(self.mask),
            finish_reason=self.finish, group=group, index=index, extra={"turns": self.turns},
            tempered_logprobs=tuple(self.behaviour) if self.reshaped else None, experts=self.experts,
        )  # fmt: skip
