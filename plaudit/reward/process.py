"""Process reward models: a score for every step of a response. Needs no torch, as it runs in the HTTP process.

The ends of steps are known from how the input is assembled here, never guessed from the text; only inputs that are
already rendered, as text or token ids, are searched for step tags.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from plaudit.config.formats import FormatTable
from plaudit.config.reward import ProcessTable
from plaudit.errors import ConfigError, ModelError, Refused, RequestError, nearest
from plaudit.models import encode, render_text
from plaudit.models.text import codec_of, refuse_surrogates
from plaudit.records import Item, ItemError, StepScores
from plaudit.reward.reading import Intake, characters, has_tool_calls
from plaudit.reward.work import ModelInfo, Work

Prompt = str | Sequence[Mapping[str, Any]]
STEPS_KEPT = 1 << 13
CONTENTS = [f"StandsForTurn{name}Here" for name in ("A", "B", "C", "D", "E", "F")]
AGGREGATE: dict[str, Callable[[np.ndarray], float]] = {
    "last": lambda scores: float(scores[-1]),
    "min": lambda scores: float(scores.min()),
    "mean": lambda scores: float(scores.mean()),
    "prod": lambda scores: float(scores.prod()),
}


@dataclass(slots=True)
class Draft:
    """The tokens assembled so far, and the positions to read."""

    tokens: list[int]
    positions: list[int] = field(default_factory=list)

    def mark(self) -> None:
        self.positions.append(len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Turns:
    """The tokens a chat template writes around the turns of a conversation with one step per turn.

    Token ids: `opening` USER `after_user` ASSISTANT `after_assistant` USER `after_user` ASSISTANT ...
    """

    opening: list[int]
    after_user: list[int]
    after_assistant: list[int]


class ProcessReading:
    def __init__(self, table: ProcessTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo) -> None:
        self.table = table
        self.format = table.format
        self.tokenizer = tokenizer
        self.facts = facts
        self.intake = Intake(tokenizer, facts, table.max_tokens, self.format.bos)
        self.columns, self.good = _what_is_read(self.format, tokenizer, facts)
        self.tag = [] if self.format.tag is None else _tag_ids(self.format.tag, tokenizer)
        # Tokens used only by a tag: some vocabularies have such tokens that are not marked as control tokens.
        self.reserved = bool(self.tag) and self.tag[-1] in tokenizer.added_tokens_decoder
        if self.reserved and self.format.joined:
            raise ConfigError(
                f"format.joined = true, but the tag {self.format.tag!r} is a control token; set it to false"
            )
        self.turns = read_turns(tokenizer, self.format.system) if self.format.chat == "turns" else None
        self.end = tokenizer.eos_token_id
        if self.format.end and self.end is None:
            raise ConfigError(f"format.end = true, but the tokenizer of {facts.name} has no EOS token; set it to false")
        # A search sends its paths repeatedly, each time with one more step.
        self._step = lru_cache(maxsize=STEPS_KEPT)(lambda step: tuple(self.intake.content(step)))
        self._further = lru_cache(maxsize=STEPS_KEPT)(self._one_further)
        self._piece = lru_cache(maxsize=1 << 12)(lambda token: tokenizer.backend_tokenizer.decode([token]))

    def prepare(self, item: Item) -> Work:
        self.intake.refuse_huge(item)
        draft = self._draft(item)
        if not draft.positions:
            raise Refused(
                "no_steps",
                f"the input has no steps; expected text that ends with {self.format.tag or self.format.split!r}",
            )
        if draft.positions[0] < 0 or any(b <= a for a, b in pairwise(draft.positions)):
            raise Refused(
                "bad_steps", "each step must end in a separate token; one is empty or ends in the same token as another"
            )
        tokens, cut = self.intake.cut(draft.tokens, draft.positions[0], draft.positions[-1], item.truncate)
        positions = tuple(position - cut for position in draft.positions)
        return Work(tokens, positions, self.columns, len(positions), len(tokens) < len(draft.tokens))

    def grown(self, read: Sequence[int], prompt: Prompt, steps: Sequence[str]) -> Work | None:
        """The work of `prepare` for a response with these steps when only the last step is to be read, given the
        tokens that were `read` without it; None if it must be assembled from scratch."""
        split = self.format.split
        apart = steps[-2].endswith(split)
        if apart and len(split) > 1:  # the split text may begin in one step and end in the next
            apart = all(step.endswith(split) and step.find(split) == len(step) - len(split) for step in steps[:-1])
        further = self._further(steps[-1]) if apart else None
        if further is None:
            return None
        new, back = further
        size = sum(map(len, steps)) + (len(prompt) if isinstance(prompt, str) else characters(prompt))
        if len(read) + len(new) > self.intake.limit or size > self.intake.most_characters:
            return None
        tokens = [*read, *new]
        return Work(tokens, (len(tokens) - 1 - back,), self.columns, 1, False)

    def _one_further(self, step: str) -> tuple[tuple[int, ...], int] | None:
        """The tokens a step adds to those before it, and the offset of its read position from the end; None if this
        depends on other steps."""
        form = self.format
        ends = step.find(form.split)
        if form.joined or self.turns is not None or ends not in (-1, len(step) - len(form.split)):
            return None
        if form.end and (form.strip or not form.keep):  # the EOS token may follow every step that is the last
            return None
        if len(parts := self._split(step)) != 1 or not step.strip():
            return None
        try:
            ids = self._step(form.step.replace("{step}", parts[0]))
            after = self.intake.content(form.after) if form.after else []
        except Refused:
            return None
        new = (*after, *ids, *self.tag)
        if not ids or (self.reserved and new.count(self.tag[-1]) != 1):
            return None
        if form.end and not parts[0].endswith(form.split):
            return (*new, self.end), 0
        return new, len(self.tag) if form.read == "before" else 0

    def prerender(self, items: Sequence[Item]) -> None:
        """Renders the conversations of items that `prepare` will be called with, in one batch."""
        if self.format.joined or self.turns is not None:
            return
        prompts = (item.prompt if item.messages is None else item.messages[:-1] for item in items)
        chats = [self._chat(prompt) for prompt in prompts if prompt is not None]
        self.intake.prerender([(chat, "opening") for chat in chats if chat is not None])

    def finish(self, work: Work, values: np.ndarray) -> StepScores:
        if len(values) != work.steps:
            raise RuntimeError(f"expected {work.steps} rows, one for each step; the model returned {len(values)}")
        if not np.isfinite(values).all():
            error = ItemError("nonfinite_score", f"{self.facts.name} returned a step score that is not finite")
            return StepScores(error=error, truncated=work.truncated, tokens=len(work.tokens))
        scores = self._activate(values.astype(np.float64))
        aggregate = AGGREGATE[self.table.aggregate](scores)
        return StepScores(tuple(map(float, scores)), aggregate, truncated=work.truncated, tokens=len(work.tokens))

    def last_scores(self, values: np.ndarray) -> list[float | None]:
        """Scores of the last steps of many responses, (steps, labels or columns), as `finish` computes them; None for
        values that are not finite."""
        finite = np.isfinite(values).all(axis=1)
        scores = self._activate(np.where(finite[:, None], values, 0).astype(np.float64))
        return [score if sound else None for score, sound in zip(scores.tolist(), finite.tolist(), strict=True)]

    def _activate(self, values: np.ndarray) -> np.ndarray:
        """(steps, labels or columns) -> (steps,)"""
        match self.format.activation:
            case "softmax":
                raised = np.exp(values - values.max(axis=1, keepdims=True))
                chances: np.ndarray = raised[:, self.good] / raised.sum(axis=1)
                return chances
            case "sigmoid":
                return _sigmoid(values[:, self.good])
            case "mean-sigmoid":
                return _sigmoid(values.mean(axis=1))
            case _:
                return values[:, self.good]

    # Assembling the input

    def _draft(self, item: Item) -> Draft:
        if item.tokens is not None:
            return self._tagged(self.intake.tokens(item.tokens))
        if item.text is not None:
            return self._tagged(self.intake.text(item.text))
        if item.messages is not None:
            answer = self.intake.answer(item.messages)
            if has_tool_calls(item.messages[-1]):
                raise Refused(
                    "bad_messages", "the answer has tool calls, which cannot be scored as steps; send its steps as text"
                )
            return self._assembled(item.messages[:-1], self._split(answer), item.cut)
        assert item.prompt is not None
        assert item.response is not None
        response = item.response
        return self._assembled(
            item.prompt, self._split(response) if isinstance(response, str) else self._checked_steps(response), item.cut
        )

    def _assembled(self, prompt: Prompt, steps: list[str], cut: bool) -> Draft:
        if not steps:
            raise Refused("no_steps", "the response is empty; expected at least one step")
        if self.format.joined:
            draft = self._one_text(self._plain_prompt(prompt), steps)
        elif self.turns is not None:
            draft = self._conversation(self._plain_prompt(prompt), steps)
        else:
            draft = self._apart(prompt, steps, cut)
        if self.reserved and draft.tokens.count(self.tag[-1]) != len(steps):
            raise Refused(
                "bad_text", f"the step tag {self.format.tag!r} is in the prompt or in a step; remove it there"
            )
        return draft

    def _apart(self, prompt: Prompt, steps: list[str], cut: bool) -> Draft:
        draft = Draft(self._opening(prompt))
        for place, step in enumerate(steps):
            ids = self._step(self.format.step.replace("{step}", step))
            if not ids:
                raise Refused("bad_steps", f"step {place} has no tokens; expected at least one")
            draft.tokens += ids
            if self.tag:
                draft.tokens += self.tag
            draft.mark()
            if self.format.read == "before":
                draft.positions[-1] -= len(self.tag)
            if self.format.after and place < len(steps) - 1:
                draft.tokens += self.intake.content(self.format.after)
        if self.format.end and not cut and not steps[-1].endswith(self.format.split):
            draft.tokens.append(self.end)
            draft.positions[-1] = len(draft.tokens) - 1
        return draft

    def _opening(self, prompt: Prompt) -> list[int]:
        chat = self._chat(prompt)
        if chat is not None:
            return self.intake.opening(chat)
        return self.intake.prompt(self.format.prompt.replace("{prompt}", self._plain_prompt(prompt)))

    def _chat(self, prompt: Prompt) -> list[Mapping[str, Any]] | None:
        """The messages that the format makes of a prompt; None if it makes text of it."""
        form = self.format
        if form.chat == "never" or (isinstance(prompt, str) and form.chat != "answer"):
            return None
        messages: list[Mapping[str, Any]] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        headed = bool(messages) and isinstance(messages[0], Mapping) and messages[0].get("role") == "system"
        if form.system is not None and not headed:
            messages.insert(0, {"role": "system", "content": form.system})
        return messages

    def _plain_prompt(self, prompt: Prompt) -> str:
        """The prompt for a format without conversations."""
        if isinstance(prompt, str):
            return prompt
        only = prompt[0] if len(prompt) == 1 else None
        if not isinstance(only, Mapping) or only.get("role") != "user" or not isinstance(only.get("content"), str):
            raise Refused("unsupported_form", "this model's format accepts one user message and its answer only")
        return str(only["content"])

    def _one_text(self, prompt: str, steps: list[str]) -> Draft:
        form, tag = self.format, self.format.tag or ""
        text, ends = form.prompt.replace("{prompt}", prompt), []
        for place, step in enumerate(steps):
            text += (form.after if place else "") + form.step.replace("{step}", step) + tag
            ends.append(len(text))
        if text.count(tag) != len(steps):
            raise Refused("bad_text", f"the step tag {tag!r} is in the prompt or in a step; remove it there")
        try:
            refuse_surrogates(text)
            ids, spans = codec_of(self.tokenizer).spans(text)
        except RequestError as error:
            raise Refused("bad_text", str(error)) from error
        starts = [begin for begin, _ in spans]
        begin = self.intake.begin
        # The last token that begins before the tag's end is the tag's last one, also if a character has several tokens.
        return Draft([*begin, *ids], [len(begin) + bisect_left(starts, end) - 1 for end in ends])

    def _conversation(self, prompt: str, steps: list[str]) -> Draft:
        assert self.turns is not None
        turns = self.turns
        draft = Draft(list(turns.opening))
        for place, step in enumerate(steps):
            filled = self.format.step.replace("{step}", step)
            text = filled if place else self.format.prompt.replace("{prompt}", prompt) + filled
            draft.tokens += [*(turns.after_assistant if place else ()), *self.intake.content(text), *turns.after_user]
            draft.mark()
            draft.tokens += self.tag
        return draft

    # Steps

    def _split(self, response: str) -> list[str]:
        form = self.format
        if form.keep:
            steps = [response[begin:end] for begin, end in step_spans(response, form.split)]
        else:
            steps = response.split(form.split)
        return [step.strip() if form.strip else step for step in steps if step.strip()]

    def _checked_steps(self, steps: Sequence[Any]) -> list[str]:
        texts = []
        for place, step in enumerate(steps):
            text = step.strip() if self.format.strip and isinstance(step, str) else step
            if not isinstance(text, str) or not text:
                raise Refused("bad_steps", f"step {place} is {str(step)[:40]!r}; expected text that is not empty")
            texts.append(text)
        return texts

    def _tagged(self, tokens: list[int]) -> Draft:
        """Steps of a rendered input: every tag ends a step, wherever it is."""
        if self.tag:
            # In running text the tag's first token may include preceding characters.
            pattern = (
                self.tag[-1:] if self.format.joined else [*(self.turns.after_user if self.turns else ()), *self.tag]
            )
            ends = [i + len(pattern) - 1 for i in _occurrences(tokens, pattern)]
            back = len(self.tag) if self.format.read == "before" else 0
            return Draft(tokens, [end - back for end in ends])
        return Draft(tokens, self._ends_by_text(tokens))

    def _ends_by_text(self, tokens: list[int]) -> list[int]:
        finished = self.format.end and tokens[-1] == self.end
        pieces = [self._piece(token) for token in (tokens[:-1] if finished else tokens)]
        text = "".join(pieces)
        starts = np.cumsum([0, *map(len, pieces)])[:-1].tolist()
        spans = step_spans(text, self.format.split)
        if not finished and self.format.split not in text:
            return []
        positions = [bisect_left(starts, end) - 1 for _, end in spans]
        return [*positions[:-1], len(tokens) - 1] if finished and positions else positions


def step_spans(text: str, split: str) -> list[tuple[int, int]]:
    """The spans of the steps of a text, including the text that ends them. Whitespace belongs to the step before it,
    or to the first."""
    spans: list[tuple[int, int]] = []
    begin, blank = 0, True
    while begin < len(text):
        at = text.find(split, begin)
        end = len(text) if at < 0 else at + len(split)
        empty = not text[begin:end].strip()
        if spans and (empty or blank):
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
        begin, blank = end, blank and empty
    return [] if blank else spans


def _what_is_read(
    form: FormatTable, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo
) -> tuple[tuple[int, ...] | None, int]:
    """Vocabulary columns or None, and the index of the positive one among the values read."""
    if facts.causal:
        if not form.columns:
            raise ModelError(
                f"{facts.name} is a causal LM: set the process format it was trained with, such as "
                'format = "math-shepherd", or the columns to read'
            )
        columns = tuple(_column(column, tokenizer, facts) for column in form.columns)
        _refuse_lone(form, len(columns), facts)
        return columns, 0
    if form.columns:
        raise ModelError(
            f"{facts.name} has a classification head, but the format reads columns {list(form.columns)} of a causal LM"
        )
    _refuse_lone(form, len(facts.labels), facts)
    if form.label is None:
        return None, len(facts.labels) - 1
    if form.label not in facts.labels:
        raise ConfigError(
            f"format.label is {form.label!r}, which {facts.name} does not have; {nearest(form.label, facts.labels)}"
        )
    return None, facts.labels.index(form.label)


def _refuse_lone(form: FormatTable, count: int, facts: ModelInfo) -> None:
    if form.activation == "softmax" and count < 2:
        raise ConfigError(
            f'format.activation = "softmax" over the single output of {facts.name} is always 1; use "sigmoid" or "none"'
        )


def _column(column: str | int, tokenizer: PreTrainedTokenizerFast, facts: ModelInfo) -> int:
    ids = [column] if isinstance(column, int) else encode(tokenizer, column, control=True)
    unknown = isinstance(column, str) and ids[-1:] == [tokenizer.unk_token_id]
    if not ids or not 0 <= ids[-1] < facts.vocab_size or unknown:
        raise ConfigError(f"format.columns has {column!r}, which is not a token of {facts.name}")
    return ids[-1]


def _tag_ids(tag: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    ids = encode(tokenizer, tag, control=True)
    if not ids or tokenizer.unk_token_id in ids:
        raise ConfigError(f"format.tag {tag!r} is not in this tokenizer's vocabulary; use the tokenizer of the model")
    return ids


def _occurrences(tokens: list[int], pattern: list[int]) -> list[int]:
    first, size = pattern[0], len(pattern)
    return [i for i, token in enumerate(tokens) if token == first and tokens[i : i + size] == pattern]


def _sigmoid(values: np.ndarray) -> np.ndarray:
    chances: np.ndarray = np.exp(-np.logaddexp(0.0, -values))
    return chances


def read_turns(tokenizer: PreTrainedTokenizerFast, system: str | None) -> Turns:
    """Detects the turn markers in a rendered conversation, so that long conversations need not be rendered."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(CONTENTS)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    rest = render_text(tokenizer, messages)
    parts = []
    for content in CONTENTS:
        part, separator, rest = rest.partition(content)
        if not separator:
            raise ConfigError('format.chat = "turns": the chat template omits a turn; use another chat format')
        parts.append(part)
    opening, after_user, after_assistant = parts[:3]
    if parts[3:] != [after_user, after_assistant, after_user] or not after_user:
        raise ConfigError(
            'format.chat = "turns": the chat template formats later turns differently; use another chat format'
        )
    return Turns(*(encode(tokenizer, part, control=True) for part in (opening, after_user, after_assistant)))
