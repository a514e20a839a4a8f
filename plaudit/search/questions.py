"""What is asked: the questions of a world or a file, each with its right answer where that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.config.search import QuestionsTable
from plaudit.errors import DataError
from plaudit.models import bos_ids, encode, render_chat
from plaudit.train.rows import Row, read_rows
from plaudit.worlds import get_world


@dataclass(frozen=True, slots=True)
class Question:
    """prompt  as the PRM gets it: text, or the messages of a conversation
    text    as a person reads it
    """

    index: int
    prompt: str | tuple[dict[str, Any], ...]
    text: str
    prompt_ids: tuple[int, ...]
    truth: str | None = None


def open_questions(table: QuestionsTable, tokenizer: Any, seed: int) -> list[Question]:
    if table.world is not None:
        assert table.limit is not None, "the table says how many"
        problems = get_world(table.world, seed).heldout(table.limit)
        if len(problems) < table.limit:
            raise DataError(f"{table.world} has {len(problems)} held-out problems, and {table.limit} were asked for")
        rows = [{"prompt": p.prompt, table.truth: str(p.answer)} for p in problems]
        return [question(i, row, table, tokenizer, f"{table.world}[{i}]") for i, row in enumerate(rows)]
    assert table.path is not None
    return [
        question(i, row.fields, table, tokenizer, row.origin)
        for i, row in enumerate(read_rows(Path(table.path))[: table.limit])
    ]


def question(index: int, fields: Mapping[str, Any], table: QuestionsTable, tokenizer: Any, origin: str) -> Question:
    truth = fields.get(table.truth)
    told = None if truth is None else str(truth)
    messages = fields.get("messages")
    if messages is None:
        text = Row(dict(fields), origin).text("prompt")
        if not table.chat:
            return Question(index, text, text, (*bos_ids(tokenizer), *encode(tokenizer, text)), told)
        messages = [{"role": "user", "content": text}]
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages) or not messages:
        raise DataError(f"{origin}: messages must be a list of {{role, content}}, found {str(messages)[:60]!r}")
    asked = [dict(message) for message in messages]
    if table.system is not None and asked[0].get("role") != "system":
        asked.insert(0, {"role": "system", "content": table.system})
    ids = render_chat(tokenizer, asked, add_generation_prompt=True)
    shown = "\n".join(str(message.get("content")) for message in asked)
    return Question(index, tuple(asked), shown, tuple(ids), told)
