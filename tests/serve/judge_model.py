"""A small causal chat LM, and the requests with which tests generate text from it on a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from plaudit.core import Engine
from plaudit.models import render_chat
from tests.models.builders import CHATML, byte_tokenizer, causal, write_plain
from tests.serve.process import ServerProcess

CHAT = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "hello?"}]
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% if mood is defined %}{{ mood }}\n{% endif %}" + CHATML
)  # fmt: skip


def write_judge(directory: Path) -> Path:
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    module = causal(vocab_size=len(tokenizer), max_position_embeddings=256, hidden_size=32)
    with torch.no_grad():
        for parameter in module.parameters():  # so that the most likely token depends on the prompt
            if parameter.dim() > 1:
                parameter.mul_(8)
    return write_plain(module, directory, tokenizer)


def post(server: ServerProcess, path: str, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(path, json={"model": "judge", **fields})
    assert reply.status_code == 200, reply.text
    content: dict[str, Any] = reply.json()
    return content


def chat(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    return post(server, "/v1/chat/completions", **{"messages": CHAT, "max_tokens": 12, "temperature": 0, **fields})


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def streamed(server: ServerProcess, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "judge", "stream": True, **fields}
    with server.http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"] == "text/event-stream"
        lines = list(reply.iter_lines())
    assert [line for line in lines if line][-1] == "data: [DONE]"
    return list(events(iter(lines)))


def prompt_of(engine: Engine, **options: Any) -> list[int]:
    return render_chat(engine.tokenizer, CHAT, True, **options)
