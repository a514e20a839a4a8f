"""What a policy is asked: the prompts of a world, a file or a gym, each with what is needed to check an answer.

The i-th training prompt is a pure function of (seed, i): a resumed run needs no reader state to see the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from plaudit.config.asking import AskingTable
from plaudit.config.rl import RlDataTable
from plaudit.errors import DataError, PlauditError
from plaudit.models import bos_ids, encode, render_chats
from plaudit.records import Prompt, Sample
from plaudit.train.rows import Row, read_rows, shuffled
from plaudit.worlds import Sums, get_world
from plaudit.worlds.sums import Problem, judge


class Prompts(Protocol):
    def train(self, indices: Sequence[int]) -> list[Prompt]: ...

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


@dataclass(frozen=True, slots=True)
class Asked:
    """A text or messages on their way to a prompt. `origin` is where they came from, for messages."""

    said: str | Sequence[dict[str, Any]]
    truth: Any
    origin: str
    extra: dict[str, Any] = field(default_factory=dict)


class PromptEncoder:
    """The tokens of prompts as the policy was trained on them: their text never becomes control tokens."""

    def __init__(self, data: AskingTable, tokenizer: Any, room: Room | None = None) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.room = room

    def rows(self, rows: Sequence[Row], truth: str) -> list[Prompt]:
        """Of a data file; `truth` is the key of what is needed to check an answer, and other keys ride along."""
        return self.prompts([_asked(row, truth) for row in rows])

    def prompts(self, asked: Sequence[Asked]) -> list[Prompt]:
        """Chats are rendered together: a way to the process that does it and back for each would take longer."""
        chats = [self._chat(each) for each in asked]
        pairs = list(zip(asked, chats, strict=True))
        rendered = iter(self._rendered([(each, chat) for each, chat in pairs if chat is not None]))
        begin = bos_ids(self.tokenizer) if None in chats else []
        found = []
        for each, chat in pairs:
            if chat is None:
                text, extra = str(each.said), each.extra
                ids = [*begin, *encode(self.tokenizer, text)]
            else:
                text, extra = "\n".join(str(message.get("content")) for message in chat), {"messages": tuple(chat)}
                ids, extra = next(rendered), {**each.extra, **extra}
            self._check(ids, each.origin)
            found.append(Prompt(text, tuple(ids), each.truth, extra))
        return found

    def _chat(self, asked: Asked) -> list[dict[str, Any]] | None:
        """Its messages, or None for a text that is not asked in a chat. data.system goes before messages that have no
        system message of their own."""
        if not isinstance(asked.said, str):
            messages = list(asked.said)
        elif self.data.chat:
            pairs = [zip(("user", "assistant"), shot, strict=True) for shot in self.data.shots]
            messages = [{"role": role, "content": said} for pair in pairs for role, said in pair]
            messages.append({"role": "user", "content": asked.said})
        else:
            return None
        if self.data.system is not None and messages and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.data.system}, *messages]
        return messages

    def _rendered(self, chats: Sequence[tuple[Asked, list[dict[str, Any]]]]) -> list[list[int]]:
        if not chats:
            return []  # of a model that may have no template
        try:
            return render_chats(self.tokenizer, [chat for _, chat in chats], add_generation_prompt=True)
        except PlauditError as error:
            if len(chats) == 1:
                raise DataError(f"{chats[0][0].origin}: {error}") from None
        return [ids for each in chats for ids in self._rendered([each])]  # which says whose fault it is

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

    def train(self, indices: Sequence[int]) -> list[Prompt]:
        limit = self.data.limit
        return self._prompts([self.world.problem("train", i % limit if limit else i) for i in indices])

    def heldout(self) -> list[Prompt]:
        """Problems of the world itself, whatever part of the training comes from longer chains."""
        plain = Sums(self.world.table.model_copy(update={"hard_share": 0.0}), self.world.seed)
        return self._prompts(plain.heldout(self.data.eval_items))

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return judge(Problem.parse(prompt.text), sample.text).right

    def _prompts(self, problems: Sequence[Problem]) -> list[Prompt]:
        return self.encoder.prompts(
            [Asked(each.prompt, str(each.answer), f"{self.data.world}[{each.prompt}]") for each in problems]
        )


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

    def train(self, indices: Sequence[int]) -> list[Prompt]:
        places = (divmod(index, len(self.rows)) for index in indices)
        return self._prompts([self.rows[shuffled(len(self.rows), f"{self.seed} {e}")[at]] for e, at in places])

    def heldout(self) -> list[Prompt]:
        return self._prompts(self.held)

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return None

    def _prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        return self.encoder.rows(rows, self.data.truth)

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
                self._prompts([row])


def _asked(row: Row, truth: str) -> Asked:
    extra = {key: value for key, value in row.fields.items() if key not in ("prompt", "messages", truth)}
    said = row.text("prompt") if row.fields.get("messages") is None else messages_of(row)
    return Asked(said, row.fields.get(truth), row.origin, extra)


def messages_of(row: Row) -> list[dict[str, Any]]:
    found = row.fields["messages"]
    if not isinstance(found, list | tuple) or not found or not all(isinstance(message, Mapping) for message in found):
        raise DataError(f"{row.origin}: messages must be a list of {{role, content}}, found {str(found)[:60]!r}")
    return [dict(message) for message in found]
