"""What a policy is asked: the prompts of a world, a file or a gym, each with what is needed to check an answer.

The i-th training prompt is a pure function of (seed, i): a resumed run needs no reader state to see the same data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from plaudit.config.rl import RlDataTable
from plaudit.errors import DataError
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


def open_prompts(data: RlDataTable, tokenizer: Any, seed: int) -> Prompts:
    if data.world is not None:
        return WorldPrompts(get_world(data.world, seed, data.sums), PromptEncoder(data, tokenizer), data)
    if data.gym is not None:
        from plaudit.train.gym import GymPrompts  # reasoning-gym is an extra

        return GymPrompts(PromptEncoder(data, tokenizer), data, seed)
    return FilePrompts(PromptEncoder(data, tokenizer), data, seed)


class PromptEncoder:
    """The tokens of a prompt as the policy was trained on them: its text never becomes control tokens."""

    def __init__(self, data: RlDataTable, tokenizer: Any) -> None:
        self.data = data
        self.tokenizer = tokenizer

    def text(self, text: str, truth: Any, extra: dict[str, Any] | None = None) -> Prompt:
        if self.data.chat:
            system = [] if self.data.system is None else [{"role": "system", "content": self.data.system}]
            return self.messages([*system, {"role": "user", "content": text}], truth, extra)
        ids = [*bos_ids(self.tokenizer), *encode(self.tokenizer, text)]
        if not ids:
            raise DataError("a prompt is empty and the model has no begin token to stand for it")
        return Prompt(text, tuple(ids), truth, extra or {})

    def messages(self, messages: list[dict[str, Any]], truth: Any, extra: dict[str, Any] | None = None) -> Prompt:
        ids = render_chat(self.tokenizer, messages, add_generation_prompt=True)
        shown = "\n".join(str(message.get("content")) for message in messages)
        return Prompt(shown, tuple(ids), truth, {**(extra or {}), "messages": tuple(messages)})


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
        return self.encoder.text(problem.prompt, str(problem.answer))


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
            raise DataError(f"{data.path} has {len(rows)} prompt(s): too few to train on and hold one out")
        self.encoder = encoder
        self.data = data
        self.seed = seed
        self.held = held[: data.eval_items]

    def train(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self.rows))
        return self._prompt(self.rows[shuffled(len(self.rows), f"{self.seed} {epoch}")[position]])

    def heldout(self) -> list[Prompt]:
        return [self._prompt(row) for row in self.held]

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return None

    def _prompt(self, row: Row) -> Prompt:
        truth = row.fields.get(self.data.truth)
        extra = {key: value for key, value in row.fields.items() if key not in ("prompt", "messages", self.data.truth)}
        try:
            if "messages" in row.fields:
                return self.encoder.messages(list(row.fields["messages"]), truth, extra)
            return self.encoder.text(row.text("prompt"), truth, extra)
        except DataError as error:
            raise DataError(f"{row.origin}: {error}") from None
