"""Sends bad requests to a real server and checks that each gets a clean error and leaves the scores unchanged."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.serve.process import ServerProcess

EMBEDDED = Path(__file__).parents[2] / "plaudit" / "embedded"
KNOWN = {"prompt": "3+4+5=", "responses": ["3+4=7;7+5=12;#12"]}
# What an error must not disclose: paths on the server's disk, memory addresses, lines of its code.
LEAK = re.compile(r"/home|/tmp|/root|/usr|site-packages|0x[0-9a-f]{6,}|Traceback|\.py\b|File \"|line \d+, in", re.I)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Target:
    """A server, an API key for it, and its score of a known text."""

    def __init__(self, server: ServerProcess, key: str | None = None) -> None:
        self.server = server
        self.key = key
        server.http.headers.update({} if key is None else {"authorization": f"Bearer {key}"})
        self.known = self.known_score()

    def known_score(self) -> float:
        reply = self.server.rewards([KNOWN], cache=False)
        assert reply.status_code == 200, reply.text
        return float(reply.json()["items"][0]["scores"][0])

    def sound(self) -> None:
        assert self.server.process.poll() is None, self.server.log()
        assert abs(self.known_score() - self.known) < 1e-5  # batching may change scores by this much

    def refused(self, reply: httpx.Response | Answer, status: int, type: str) -> dict[str, Any]:
        """Check that the reply is a clean error of this status and type and has done no harm; return the error."""
        if isinstance(reply, httpx.Response):
            reply = Answer(reply.status_code, reply.headers, reply.content)
        error = clean_error(reply)
        assert (reply.status, error["type"]) == (status, type), error
        self.sound()
        return error

    def item_refused(self, item: Any, type: str, model: str = "sums", **fields: Any) -> dict[str, Any]:
        """Check that the item fails with this error type while the item beside it is scored; return the error."""
        reply = self.server.rewards([item, KNOWN], model, **fields)
        assert reply.status_code == 200, reply.text
        bad, good = reply.json()["items"]
        assert set(bad) == {"error"}, bad
        assert bad["error"]["type"] == type, bad
        clean_message(bad["error"]["message"])
        assert isinstance(good["scores"][0], float)
        self.sound()
        error: dict[str, Any] = bad["error"]
        return error

    def post(self, content: bytes, **headers: str) -> httpx.Response:
        """Post these bytes as JSON, or with the content type in the headers (`_` for `-`)."""
        renamed = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.server.http.post(
            "/v1/rewards", content=content, headers={"content-type": "application/json", **renamed}
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=20)

    def head(self, *lines: str, method: str = "POST", path: str = "/v1/rewards") -> bytes:
        """The head of a request without the empty line that ends it."""
        key = () if self.key is None else (f"Authorization: Bearer {self.key}",)
        first = (f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *key)
        return "".join(f"{line}\r\n" for line in (*first, *lines)).encode("latin-1")

    def raw(self, data: bytes) -> Answer:
        """Send exactly these bytes and return the answer."""
        with self.connect() as sock:
            with suppress(BrokenPipeError, ConnectionResetError):  # rejected before all was sent; the answer says why
                sock.sendall(data)
            return read_answer(sock)

    def peak_bytes(self) -> int:
        """Peak resident memory of the HTTP process."""
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]

    def tree(self) -> list[psutil.Process]:
        front = psutil.Process(self.server.process.pid)
        return [front, *front.children(recursive=True)]


def read_answer(sock: socket.socket) -> Answer:
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = sock.recv(65536)
        assert chunk, f"the connection was closed after {data!r}"
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers["content-length"]):
        chunk = sock.recv(65536)
        assert chunk, "the connection was closed within the body"
        body += chunk
    return Answer(int(first.split()[1]), headers, body[: int(headers["content-length"])])


def clean_error(answer: Answer) -> dict[str, Any]:
    """Check that the answer has exactly the expected error fields; return the error."""
    assert answer.headers["content-type"] == "application/json"
    content = answer.json()
    assert set(content) == {"error"}, content
    error: dict[str, Any] = content["error"]
    assert set(error) == {"type", "message", "request_id", "retryable"}, error
    assert re.fullmatch(r"[a-z_]+", error["type"])
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["retryable"] == (answer.status in (408, 429) or answer.status >= 500)
    clean_message(error["message"])
    return error


def clean_message(message: str) -> None:
    assert message
    assert "\n" not in message
    assert len(message) < 500
    assert not LEAK.search(message), message


def copied(name: str, directory: Path, **config: Any) -> Path:
    """A copy of an embedded model, with some keys of its config.json set."""
    shutil.copytree(EMBEDDED / name, directory)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return directory
