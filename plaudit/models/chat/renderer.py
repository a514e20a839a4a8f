"""Renders chat templates in a separate process.

Jinja's sandbox keeps a template from accessing Python, but not from looping or building huge strings, and a thread that
does cannot be stopped. The process has a deadline, after which it is killed, and a memory limit.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from plaudit.errors import ModelError, RequestError, UnsafeModel
from plaudit.process.lines import exchange_lines

WORKER = Path(__file__).with_name("template_worker.py")
START_SECONDS = 60.0
KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "SYSTEMROOT")


class Renderer:
    """One worker process, started on first use and again after a kill. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(
        self, template: str, conversations: Sequence[Sequence[Mapping[str, Any]]], add_generation_prompt: bool,
        names: Mapping[str, str], seconds: float, variables: Sequence[Mapping[str, Any]],
    ) -> list[str]:  # fmt: skip
        """Render each conversation with its variables, with a timeout of `seconds` each."""
        common = {
            "template": template, "add_generation_prompt": add_generation_prompt, "names": names, "seconds": seconds
        }  # fmt: skip
        lines = [json.dumps(common).encode() + b"\n"]
        before: Sequence[Mapping[str, Any]] = ()
        for messages, each in zip(conversations, variables, strict=True):
            # Responses to one prompt share all messages but the last.
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(messages, before, strict=False)))
            request = {"shared": shared, "messages": messages[shared:], "variables": each}
            lines.append(json.dumps(request).encode() + b"\n")
            before = messages
        with self._lock:
            replies, _ = exchange_lines(*pipes(self._worker()), b"".join(lines), len(conversations), seconds)
            if len(replies) < len(conversations):
                self.close()
        texts = [_read_reply(reply) for reply in replies]
        if len(texts) < len(conversations):
            raise ModelError(
                f"the chat template did not finish in {seconds:g} s or ran out of memory, and was stopped; "
                "correct the template"
            )
        return texts

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.communicate()

    def _worker(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self.close()
        environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,  # so that Ctrl-C in the terminal does not kill it
        )  # fmt: skip
        self._owner = os.getpid()
        if not exchange_lines(*pipes(self._process), b"", 1, START_SECONDS)[0]:
            self.close()
            raise ModelError(f"the template worker did not start; try `{sys.executable} -I {WORKER}` to see why")
        return self._process


def pipes(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The descriptors of a child's stdin and stdout."""
    assert process.stdin is not None, "the worker is started with pipes"
    assert process.stdout is not None, "the worker is started with pipes"
    return process.stdin.fileno(), process.stdout.fileno()


def _read_reply(line: bytes) -> str:
    reply = json.loads(line)
    message = " ".join(str(reply.get("message", "")).split())[:300]
    match reply["kind"]:
        case "text":
            return str(reply["text"])
        case "unsafe":
            raise UnsafeModel(
                f"the chat template tries to leave its sandbox ({message}); nothing was run: correct the template"
            )
        case "refused":
            raise RequestError(f"the chat template refuses these messages: {message}")
        case _:
            raise ModelError(f"the chat template failed: {message}; correct the template")


RENDERER = Renderer()
atexit.register(RENDERER.close)
