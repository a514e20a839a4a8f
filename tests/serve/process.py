"""Runs a real server in a separate process, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from plaudit.config import to_toml
from tests.forked import ForkedCommand

READY_SECONDS = 240.0


class ServerProcess:
    """`plaudit serve` on a free port. `tree` is a serve.toml as plain data; `environment` is added to the process's
    environment; `launcher` are Python arguments that start the server. Without them it is forked, which saves the
    seconds of its imports. The server and its workers are in a separate process group."""

    def __init__(
        self, tree: dict[str, Any] | None = None, *arguments: str, environment: dict[str, str] | None = None,
        wait: bool = True, launcher: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.directory = tempfile.TemporaryDirectory()
        self.port = free_port()
        command = ["serve", "--port", str(self.port), *arguments]
        if tree is not None:
            file = Path(self.directory.name) / "serve.toml"
            file.write_text(to_toml(tree))
            command += ["--config", str(file)]
        self.begin(command, environment, launcher, wait)

    def begin(
        self, command: Sequence[str], environment: dict[str, str] | None, launcher: Sequence[str], wait: bool
    ) -> None:  # fmt: skip
        self.output = (Path(self.directory.name) / "output").open("w+b")
        self.process: ForkedCommand | subprocess.Popen[bytes]
        added = {"OMP_NUM_THREADS": "1", **(environment or {})}
        if not launcher:
            self.process = ForkedCommand(command, Path(self.output.name), added)
        else:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "plaudit", *command], stdout=self.output, stderr=subprocess.STDOUT,
                env={**os.environ, **added}, process_group=0,
            )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        if wait:
            self.wait_ready()

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            try:
                if self.http.get("/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready within {seconds} s:\n{self.log()}")

    def ready(self) -> bool:
        try:
            return self.http.get("/health/ready", timeout=20).status_code == 200
        except httpx.TransportError:
            return False

    def rewards(self, items: list[Any], model: str = "sums", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/rewards", json={"model": model, "items": items, **fields})

    def score(self, prompt: str, response: str, model: str = "sums") -> float:
        reply = self.rewards([{"prompt": prompt, "responses": [response]}], model)
        assert reply.status_code == 200, reply.text
        return float(reply.json()["items"][0]["scores"][0])

    def workers(self, name: str = "plaudit-worker") -> list[psutil.Process]:
        return [each for each in self.descendants() if each.name() == name]

    def descendants(self) -> list[psutil.Process]:
        """All other processes of its process group, oldest first."""
        processes = []
        for each in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if each.pid != self.process.pid and os.getpgid(each.pid) == self.process.pid:
                    processes.append(each)
        return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the metric's series with these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total += float(value)
        return total

    def log(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not stopped within {seconds} s:\n{self.log()}") from None

    def kill(self) -> None:
        for child in self.descendants() if self.process.poll() is None else []:
            child.kill()
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self.output.close()
        self.directory.cleanup()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
