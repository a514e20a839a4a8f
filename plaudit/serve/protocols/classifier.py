"""The part that vLLM, TEI and Infinity share: tokenises prompts as transformers does, and returns class logits.

These protocols return the output of the model's head. Reward weights and standardisation are not applied.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.config.reward import OutcomeTable
from plaudit.errors import Refused
from plaudit.records import Item, ItemError
from plaudit.reward.encoder_reading import EncoderReading
from plaudit.reward.pairs import Cut, fitted, kept
from plaudit.reward.process import ProcessReading
from plaudit.reward.reading import Intake, OutcomeReading
from plaudit.reward.work import Work
from plaudit.serve.http.message import HttpError, Request
from plaudit.serve.model import INLINE_CHARACTERS, INLINE_TOKENS, ServedModel
from plaudit.serve.scoring import PROCESS_MODEL, REWARD_MODEL, ScoringService
from plaudit.serve.version import TextReading


@dataclass(frozen=True, slots=True)
class Text:
    """special                whether the tokenizer adds its special tokens
    text_most, pair_most   maximum tokens of each that are used; 0: no limit
    """

    text: str
    pair: str | None = None
    special: bool = True
    text_most: int = 0
    pair_most: int = 0


@dataclass(frozen=True, slots=True)
class Chat:
    messages: Sequence[Mapping[str, Any]]
    opening: bool = False
    """Whether the template appends the generation prompt of the assistant."""


Prompt = Text | Chat | Sequence[int]


class Classifier:
    def __init__(self, scoring: ScoringService) -> None:
        self.scoring = scoring
        self._paths: dict[str, str] = {}
        for name, served in scoring.models.served.items():
            if isinstance(served, ServedModel) and served.current.table.path is not None:
                for path in (served.current.table.path, str(Path(served.current.table.path).resolve())):
                    self._paths.setdefault(path, name)

    def find(self, name: str | None, kind: str | None = None) -> ServedModel:
        """Finds a model by name, alias or, as verl does, by the path it was loaded from; the first one if None."""
        if not name:
            name = REWARD_MODEL if kind == "outcome" or REWARD_MODEL in self.scoring.aliases else PROCESS_MODEL
        return self.scoring.find_model(self._paths.get(name, name), kind)

    async def tokens(self, served: ServedModel, prompts: Sequence[Prompt], cut: Cut) -> list[list[int] | ItemError]:
        self.scoring.check_count(len(prompts))
        reading = served.loaded()
        over = threading.Event()
        if _effort(prompts) <= INLINE_CHARACTERS:
            return _tokenised(reading, prompts, cut, over)
        try:
            return await served.in_turn(
                lambda piece: _tokenised(reading, piece, cut, over), prompts, lambda prompt: _effort([prompt])
            )
        finally:
            over.set()  # a thread cannot be cancelled: it checks this before each prompt

    async def full_tokens(self, served: ServedModel, prompt: Prompt) -> list[int]:
        """Tokens of a prompt, without a length limit."""
        try:
            return await asyncio.to_thread(full_tokens, served.loaded(), prompt, Cut())
        except Refused as error:
            raise HttpError(400, error.type, str(error)) from error

    async def logits(
        self, request: Request, served: ServedModel, tokens: Sequence[list[int]], priority: int = 0
    ) -> list[np.ndarray]:
        """Class logits of each token list, (labels,)."""
        table = served.current.table
        mean = isinstance(table, OutcomeTable) and table.pool == "mean"
        works = [
            Work(t, tuple(range(len(t))) if mean else (len(t) - 1,), None, 0, False, types=getattr(t, "types", b""))
            for t in tokens
        ]
        return [rows.mean(axis=0) for rows in await self._read(request, served, works, priority)]

    async def rows(
        self, request: Request, served: ServedModel, tokens: Sequence[list[int]], priority: int = 0
    ) -> list[np.ndarray]:
        """Outputs for each token, (tokens, labels); for a process model with a step tag (steps, labels or columns)."""
        reading = served.reading
        if isinstance(reading, EncoderReading):
            raise HttpError(422, "wrong_kind", f"{served.name} scores whole texts, not tokens: use /classify")
        works: Sequence[Work | None]
        if isinstance(reading, ProcessReading) and reading.tag:
            small = sum(map(len, tokens)) <= INLINE_TOKENS
            works = _steps(reading, tokens) if small else await asyncio.to_thread(_steps, reading, tokens)
        elif isinstance(reading, ProcessReading) and reading.columns is not None:
            works = [Work(ids, tuple(range(len(ids))), reading.columns, 0, False) for ids in tokens]
        else:
            works = [Work(ids, tuple(range(len(ids))), None, 0, False) for ids in tokens]
        # Without a step tag every token is read: too many to cache separately.
        steps = isinstance(reading, ProcessReading) and bool(reading.tag)
        sound = [work for work in works if work is not None]
        remaining = iter(await self._read(request, served, sound, priority, path=steps))
        return [np.zeros((0, 0), dtype=np.float32) if work is None else next(remaining) for work in works]

    async def _read(
        self, request: Request, served: ServedModel, works: Sequence[Work], priority: int, *, path: bool = False
    ) -> list[np.ndarray]:
        reading = served.reading
        bias = np.float32(reading.bias) if isinstance(reading, OutcomeReading) and reading.table.bias else None
        _, answers = await self.scoring.read(request, served, works, priority=priority, path=path)
        rows = []
        for place, answer in enumerate(answers):
            if isinstance(answer, ItemError):
                raise HttpError(500, answer.type, f"input {place}: {answer.message}")
            assert isinstance(answer, np.ndarray)
            if not np.isfinite(answer).all():
                raise HttpError(500, "nonfinite_score", f"input {place}: {served.name} gave no finite number")
            rows.append(answer if bias is None else answer + bias)
        return rows


def activate(logits: np.ndarray, multi_label: bool = False) -> np.ndarray:
    """Applies softmax to the logits of exclusive labels, the sigmoid to a single label or to independent labels.
    (..., labels) -> (..., labels)"""
    values = logits.astype(np.float64)
    if values.shape[-1] == 1 or multi_label:
        chances: np.ndarray = np.exp(-np.logaddexp(0.0, -values))
        return chances
    raised = np.exp(values - values.max(axis=-1, keepdims=True, initial=-np.inf))
    shares: np.ndarray = raised / raised.sum(axis=-1, keepdims=True)
    return shares


def _steps(reading: ProcessReading, tokens: Sequence[list[int]]) -> list[Work | None]:
    """The positions to read for each token list; None if it has no steps."""
    works: list[Work | None] = []
    for ids in tokens:
        try:
            works.append(reading.prepare(Item(tokens=tuple(ids))))
        except Refused as error:
            if error.type != "no_steps":
                raise HttpError(400, error.type, str(error)) from error
            works.append(None)
    return works


def _effort(prompts: Sequence[Prompt]) -> int:
    """Estimates the cost in characters. A chat counts most: its template is rendered in another process."""
    effort = 0
    for prompt in prompts:
        if isinstance(prompt, Text):
            effort += len(prompt.text) + len(prompt.pair or "")
        elif isinstance(prompt, Chat):
            return INLINE_CHARACTERS + 1
        else:
            effort += len(prompt) * INLINE_CHARACTERS // INLINE_TOKENS
    return effort


def _tokenised(
    reading: TextReading, prompts: Sequence[Prompt], cut: Cut, over: threading.Event
) -> list[list[int] | ItemError]:
    rows: list[list[int] | ItemError] = []
    for prompt in prompts:
        if over.is_set():
            break  # the request was cancelled
        try:
            rows.append(_scorable(reading, prompt, cut))
        except Refused as error:
            rows.append(ItemError(error.type, str(error)))
    return rows


def _scorable(reading: TextReading, prompt: Prompt, cut: Cut) -> list[int]:
    tokens, intake = full_tokens(reading, prompt, cut), reading.intake
    if not tokens:
        raise Refused("empty", "the prompt has no tokens; expected at least one")
    if len(tokens) > intake.limit:
        raise Refused(
            "too_long", f"the prompt has {len(tokens)} tokens; {intake.facts.name} accepts {intake.limit}; shorten it"
        )
    intake.tokens(tokens)
    return tokens


def full_tokens(reading: TextReading, prompt: Prompt, cut: Cut) -> list[int]:
    if isinstance(prompt, Text):
        return _encoded(reading.intake, prompt, cut)
    if isinstance(prompt, Chat):
        ids = reading.intake.opening(prompt.messages) if prompt.opening else _conversation(reading, prompt.messages)
    else:
        ids = list(prompt)
    return kept(ids, cut.most, cut.side)


def _conversation(reading: TextReading, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """An answered conversation as in every other protocol; with any other last message as the template writes it."""
    if isinstance(reading, OutcomeReading) and reading.apart and messages[-1].get("role") == "assistant":
        return reading.conversation(messages)
    return reading.intake.conversation(messages)


def _encoded(intake: Intake, prompt: Text, cut: Cut) -> list[int]:
    intake.refuse_huge(Item(text=prompt.text + (prompt.pair or "")))
    intake.refuse_surrogates(prompt.text + (prompt.pair or ""))
    text = _shortened(intake, prompt.text, prompt.text_most)
    pair = None if prompt.pair is None else _shortened(intake, prompt.pair, prompt.pair_most)
    return fitted(*intake.encoding(text, pair, prompt.special), cut)


def _shortened(intake: Intake, text: str, most: int) -> str:
    """The text truncated after its first `most` tokens."""
    while text and most:
        spans = intake.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(spans) <= most:
            break
        # The shorter text may be tokenised differently and still have too many tokens.
        text = text[: min(spans[most - 1][1], spans[most][0], len(text) - 1)]
    return text
