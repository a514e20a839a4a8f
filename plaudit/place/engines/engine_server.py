"""Starts an external engine server in its own environment: its log is kept, and it ends with this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

from plaudit.errors import EngineError, EngineLost

LOOK_EVERY = 0.25  # poll interval until it is ready
END_SECONDS = 30.0


class EngineServer:
    """`url` is its address once `wait_ready` has returned."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`cores` are the CPUs that it may use; empty: those of this process."""
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            try:
                leashed = [sys.executable, "-m", "plaudit.place.engines.leash", ",".join(map(str, cores)), *command]
                self._process = subprocess.Popen(
                    leashed, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True,
                    env={**os.environ, **(environment or {})},
                )  # fmt: skip
            except OSError as error:
                raise EngineError(f"{name} cannot be started: {error}") from error

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, seconds: float, path: str = "/health") -> None:
        until = time.monotonic() + seconds
        with httpx.Client(base_url=self.url, trust_env=False, timeout=5) as http:
            while time.monotonic() < until:
                self.check()
                try:
                    if http.get(path).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(LOOK_EVERY)
        raise EngineLost(f"{self.name} was not ready within {seconds:g} s: see {self.log}, or raise engine.start")

    def check(self) -> None:
        """Raise if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineLost(f"{self.name} ended with exit {code}: {self._last_log_line()} (whole log: {self.log})")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last_log_line(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line]
        return (telling or lines or ["no output"])[-1][-300:]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
