"""Generates samples for prompts: implements `plaudit generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plaudit.core import Engine, SamplingParams
from plaudit.errors import DataError
from plaudit.models import bos_ids, choose_device, encode, has_chat_template, load_policy, render_chats
from plaudit.models.chat.chat import Message
from plaudit.output import check_writable, written
from plaudit.records import Sample
from plaudit.train.data.rows import Row, read_rows


def given_prompts(texts: Sequence[str], file: Path | None) -> list[Row]:
    """The prompts of the command line, or the rows of a file: {"prompt": text} or {"messages": [...]}."""
    if (file is None) == (not texts):
        raise DataError("expected either prompts or --input FILE" + (", not both" if texts else ""))
    if file is not None:
        return read_rows(file)
    return [Row({"prompt": text}, f"prompt {number}") for number, text in enumerate(texts, 1)]


def prompt_ids(tokenizer: Any, rows: Sequence[Row], raw: bool = False) -> list[list[int]]:
    """The tokens a policy is trained on: a prompt's text never becomes control tokens. If the model has a chat
    template, a plain prompt is the user's message, unless `raw`."""
    chat = has_chat_template(tokenizer) and not raw
    conversations: dict[int, Sequence[Message]] = {}
    for place, row in enumerate(rows):
        if "messages" in row.fields:
            conversations[place] = row.fields["messages"]
        elif chat:
            conversations[place] = [{"role": "user", "content": row.text("prompt")}]
    rendered = iter(render_chats(tokenizer, list(conversations.values()), True) if conversations else ())
    return [
        next(rendered) if place in conversations else [*bos_ids(tokenizer), *encode(tokenizer, row.text("prompt"))]
        for place, row in enumerate(rows)
    ]


def generate(
    model: str, rows: Sequence[Row], params: SamplingParams, *, seed: int, device: str, dtype: str, out: Path | None,
    stream: bool, raw: bool = False,
) -> Iterator[str]:  # fmt: skip
    """Output to print: with `stream` and a single sample its text as it is generated, otherwise a JSON line per
    sample; empty if `out` receives the lines."""
    if out is not None:
        check_writable(out)
    loaded = load_policy(model, dtype, choose_device(device))
    engine = Engine(loaded.module, loaded.tokenizer, seed=seed)
    if stream and out is None and len(rows) == params.n == 1:
        for update in engine.stream(prompt_ids(engine.tokenizer, rows, raw)[0], params):
            yield update.text
        yield "\n"
        return
    lines = [f"{line}\n" for line in sample_lines(engine, rows, params, raw)]
    if out is not None:
        with written(out) as file:
            file.writelines(lines)
    else:
        yield from lines


def sample_lines(engine: Engine, rows: Sequence[Row], params: SamplingParams, raw: bool = False) -> list[str]:
    """One JSON object per sample, in the order of the prompts."""
    samples = engine.generate(prompt_ids(engine.tokenizer, rows, raw), params)
    return [_line(rows[sample.group], sample) for sample in samples]


def _line(row: Row, sample: Sample) -> str:
    prompt_fields = {key: row.fields[key] for key in ("prompt", "messages") if key in row.fields}
    got = {"text": sample.text, "tokens": len(sample.token_ids), "finish_reason": sample.finish_reason}
    return json.dumps({**prompt_fields, "index": sample.index, **got}, ensure_ascii=False)
