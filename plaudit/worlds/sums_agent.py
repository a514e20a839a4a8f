"""An agent for the sums world: it asks the policy over HTTP what to add, and returns the sum, until there is an answer.

user        7+8+4=
assistant   7+8        the stop string "=" is not part of an answer's text
tool        15;
assistant   15+4
tool        19;
assistant   #19
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from plaudit.records import Prompt
from plaudit.worlds.sums import STEP_END

SECONDS = 120.0
_SUM = re.compile(r"(\d{1,9})\+(\d{1,9})")


def play(prompt: Prompt, base_url: str, api_key: str, max_turns: int = 24) -> float:
    """1 for the correct answer, 0 for any other, or for none after `max_turns`."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt.text}]
    with closing(HTTPConnection(urlsplit(base_url).netloc, timeout=SECONDS)) as connection:
        for _ in range(max_turns):
            body = {"model": "policy", "messages": messages, "stop": ["="]}
            choice = _post(connection, f"{base_url}/chat/completions", api_key, body)["choices"][0]
            text = choice["message"]["content"]
            if choice["finish_reason"] == "length" or not (call := _SUM.fullmatch(text)):
                return float(text == f"#{prompt.truth}")
            messages += [choice["message"], {"role": "tool", "content": f"{int(call[1]) + int(call[2])}{STEP_END}"}]
    return 0.0


def _post(connection: HTTPConnection, url: str, api_key: str, body: Mapping[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    connection.request("POST", urlsplit(url).path, json.dumps(body), headers)
    with connection.getresponse() as reply:
        content = reply.read()
    if reply.status != 200:
        raise RuntimeError(f"the policy's endpoint replied with status {reply.status}: {content.decode()[:300]}")
    return json.loads(content)
