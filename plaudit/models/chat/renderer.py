"""Chat templates are rendered in a process of their own.

Jinja's sandbox keeps a template from reaching Python, but not from looping or building huge strings, and a thread that
does cannot be stopped. A process can: it has a deadline, after which it is killed, and a bound on its memory.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plaudit.errors import ModelError, RequestError, UnsafeModel

WORKER = Path(__file__).with_name("template_worker.py")
START_SECONDS = 60.0
KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "SYSTEMROOT")


class Renderer:
    """One worker, started when first needed and again after a kill. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(
        self, template: str, conversations: Sequence[Sequence[Mapping[str, Any]]], add_generation_prompt: bool,
        names: Mapping[str, str], seconds: float,
    ) -> list[str]:  # fmt: skip
        """What the template writes of each conversation, for each of which it has `seconds`."""
        common = {
            "template": template, "add_generation_prompt": add_generation_prompt, "names": names, "seconds": seconds
        }  # fmt: skip
        lines = [json.dumps({**common, "messages": messages}).encode() + b"\n" for messages in conversations]
        with self._lock:
            replies, _ = exchange_lines(self._worker(), b"".join(lines), len(lines), seconds)
            if len(replies) < len(lines):
                self.close()
        texts = [_read_reply(reply) for reply in replies]
        if len(texts) < len(lines):
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
            start_new_session=True,  # a Ctrl-C in the terminal is for us to hear, not for it to die of
        )  # fmt: skip
        self._owner = os.getpid()
        if exchange(self._process, b"", time.monotonic() + START_SECONDS) is None:
            self.close()
            raise ModelError(f"the template worker did not start; try `{sys.executable} -I {WORKER}` to see why")
        return self._process


def exchange(process: subprocess.Popen[bytes], request: bytes, deadline: float) -> bytes | None:
    """A line to a child's stdin and one from its stdout; None if it died or did not answer by `deadline`."""
    replies, _ = exchange_lines(process, request, 1, deadline - time.monotonic())
    return replies[0] if replies else None


def exchange_lines(
    process: subprocess.Popen[bytes], request: bytes, count: int, seconds: float
) -> tuple[list[bytes], bool]:
    """Lines to a child's stdin and `count` lines from its stdout, each within `seconds` of the one before. Fewer come
    back if it died, or, with True beside them, if one took too long."""
    assert process.stdin is not None, "the worker is started with pipes"
    assert process.stdout is not None, "the worker is started with pipes"
    source, sink = process.stdout.fileno(), process.stdin.fileno()
    os.set_blocking(sink, False)
    unsent, reply, lines = memoryview(request), b"", list[bytes]()
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        if unsent:
            selector.register(sink, selectors.EVENT_WRITE)
        while len(lines) < count:
            ready = selector.select(deadline - time.monotonic())
            if not ready or time.monotonic() > deadline:
                return lines, True
            for key, _ in ready:
                if key.fd == sink:
                    try:
                        unsent = unsent[os.write(sink, unsent) :]
                    except BrokenPipeError:
                        return lines, False
                    if not unsent:
                        selector.unregister(sink)
                elif chunk := os.read(source, 1 << 16):
                    *whole, reply = (reply + chunk).split(b"\n")
                    if whole:
                        lines += whole
                        deadline = time.monotonic() + seconds
                else:
                    return lines, False
    return lines, False


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
            raise ModelError(f"the chat template fails: {message}; correct the template")


RENDERER = Renderer()
atexit.register(RENDERER.close)
