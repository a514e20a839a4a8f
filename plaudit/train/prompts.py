"""What a policy is asked: the prompts of a world, a file or a gym, each with what is needed to check an answer.

The i-th training prompt is a pure function of (seed, i): a resumed run needs no reader state to see the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from plaudit.config.asking import AskingTable
from plaudit.config.rl import RlDataTable
from plaudit.errors import DataError, PlauditError
from plaudit.models import bos_ids, encode, render_chat
from plaudit.records import Prompt, Sample
from plaudit.train.rows import Row, read_rows, shuffled
from plaudit.worlds import Sums, get_world
from plaudit.worlds.sums import Problem, judge


class Prompts(Protocol):
    def train(self, index: int) -> Prompt: ...

    def heldout(self) -> list[Prompt]: ...

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        """Whether the response is truly right; None where nobody knows."""


@dataclass(frozen=True, slots=True)
class Room:
    """The model's positions, and how many of them a response may take."""

    positions: int
    response: int

    def check(self, tokens: int) -> None:
        left = self.positions - self.response
        if tokens > left:
            raise DataError(
                f"the prompt has {tokens} tokens; the model has {self.positions} positions, of which "
                f"sampling.max_tokens = {self.response} are the response's: {self.positions} - {self.response} = "
                f"{left} are left; shorten the prompt or lower sampling.max_tokens"
            )


def open_prompts(data: RlDataTable, tokenizer: Any, seed: int, room: Room | None = None) -> Prompts:
    encoder = PromptEncoder(data, tokenizer, room)
    if data.world is not None:
        return WorldPrompts(get_world(data.world, seed, data.sums), encoder, data)
    if data.gym is not None:
        from plaudit.train.gym import GymPrompts  # reasoning-gym is an extra

        return GymPrompts(encoder, data, seed)
    return FilePrompts(encoder, data, seed)


class PromptEncoder:
    """The tokens of a prompt as the policy was trained on them: its text never becomes control tokens."""

    def __init__(self, data: AskingTable, tokenizer: Any, room: Room | None = None) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.room = room

    def row(self, row: Row, truth: str) -> Prompt:
        """Of a data file; `truth` is the key of what is needed to check an answer, and other keys ride along."""
        extra = {key: value for key, value in row.fields.items() if key not in ("prompt", "messages", truth)}
        if row.fields.get("messages") is not None:
            return self.messages(messages_of(row), row.fields.get(truth), row.origin, extra)
        return self.text(row.text("prompt"), row.fields.get(truth), row.origin, extra)

    def text(self, text: str, truth: Any, origin: str, extra: dict[str, Any] | None = None) -> Prompt:
        """`origin` is where the prompt came from, for messages."""
        if self.data.chat:
            shown = [
                {"role": role, "content": said}
                for shot in self.data.shots
                for role, said in zip(("user", "assistant"), shot, strict=True)
            ]
            return self.messages([*shown, {"role": "user", "content": text}], truth, origin, extra)
        ids = [*bos_ids(self.tokenizer), *encode(self.tokenizer, text)]
        self._check(ids, origin)
        return Prompt(text, tuple(ids), truth, extra or {})

    def messages(
        self, messages: Sequence[dict[str, Any]], truth: Any, origin: str, extra: dict[str, Any] | None = None
    ) -> Prompt:
        """data.system goes before messages that have no system message of their own."""
        if self.data.system is not None and messages and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.data.system}, *messages]
        try:
            ids = render_chat(self.tokenizer, messages, add_generation_prompt=True)
        except PlauditError as error:
            raise DataError(f"{origin}: {error}") from None
        self._check(ids, origin)
        shown = "\n".join(str(message.get("content")) for message in messages)
        return Prompt(shown, tuple(ids), truth, {**(extra or {}), "messages": tuple(messages)})

    def may_be_too_long(self, row: Row) -> bool:
        """False is sure without a tokenizer: a token is at least a byte, and a template under half the positions."""
        if self.room is None:
            return False
        messages = row.fields.get("messages")
        said = f"{self.data.system or ''}{self.data.shots}{row.fields.get('prompt') if messages is None else messages}"
        around = self.room.positions // 2 if self.data.chat or messages is not None else len(bos_ids(self.tokenizer))
        return len(said.encode(errors="replace")) + around > self.room.positions - self.room.response

    def _check(self, ids: list[int], origin: str) -> None:
        if not ids:
            raise DataError(f"{origin}: the prompt is empty, and the model has no begin token to stand for it")
        try:
            if self.room is not None:
                self.room.check(len(ids))
        except DataError as error:
            raise DataError(f"{origin}: {error}") from None


class WorldPrompts:
    def __init__(self, world: Sums, encoder: PromptEncoder, data: RlDataTable) -> None:
        self.world = world
        self.encoder = encoder
        self.data = data

    def train(self, index: int) -> Prompt:
        return self._prompt(self.world.problem("train", index % self.data.limit if self.data.limit else index))

    def heldout(self) -> list[Prompt]:
        """Problems of the world itself, whatever part of the training comes from longer chains."""
        plain = Sums(self.world.table.model_copy(update={"hard_share": 0.0}), self.world.seed)
        return [self._prompt(problem) for problem in plain.heldout(self.data.eval_items)]

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return judge(Problem.parse(prompt.text), sample.text).right

    def _prompt(self, problem: Problem) -> Prompt:
        return self.encoder.text(problem.prompt, str(problem.answer), f"{self.data.world}[{problem.prompt}]")


class FilePrompts:
    def __init__(self, encoder: PromptEncoder, data: RlDataTable, seed: int) -> None:
        assert data.path is not None
        rows = read_rows(Path(data.path))[: data.limit]
        if data.eval_path is not None:
            self.rows, held = rows, read_rows(Path(data.eval_path))
        else:
            count = min(data.eval_items, max(1, len(rows) // 10))
            self.rows, held = rows[:-count], rows[-count:]
        if not self.rows:
            raise DataError(
                f"{data.path} has {len(rows)} prompt(s): too few to train on and hold one out; give data.eval_path"
            )
        self.encoder = encoder
        self.data = data
        self.seed = seed
        self.held = held[: data.eval_items]
        self._check([*self.rows, *self.held])

    def train(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self.rows))
        return self._prompt(self.rows[shuffled(len(self.rows), f"{self.seed} {epoch}")[position]])

    def heldout(self) -> list[Prompt]:
        return [self._prompt(row) for row in self.held]

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return None

    def _prompt(self, row: Row) -> Prompt:
        return self.encoder.row(row, self.data.truth)

    def _check(self, rows: Sequence[Row]) -> None:
        """What is wrong with a row is told before the first step, not at the one that draws it."""
        some_have_truth = any(row.fields.get(self.data.truth) is not None for row in rows)
        for row in rows:
            if row.fields.get("messages") is not None:
                messages_of(row)
            else:
                row.text("prompt")
            if some_have_truth and row.fields.get(self.data.truth) is None:
                raise DataError(
                    f"{row.origin}: has no {self.data.truth!r} (data.truth), which other items have; "
                    f"its keys are {sorted(row.fields)}"
                )
            if self.encoder.may_be_too_long(row):
                self._prompt(row)


def messages_of(row: Row) -> list[dict[str, Any]]:
    found = row.fields["messages"]
    if not isinstance(found, list | tuple) or not found or not all(isinstance(message, Mapping) for message in found):
        raise DataError(f"{row.origin}: messages must be a list of {{role, content}}, found {str(found)[:60]!r}")
    return [dict(message) for message in found]
