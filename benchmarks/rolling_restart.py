"""Requests lost while two servers restart one after the other behind a proxy, with the files of deploy/.

    python benchmarks/rolling_restart.py [REQUESTS]

For each proxy, eight clients with keep-alive connections send small requests without any retry of their own, at least
REQUESTS (10,000) and until both servers have restarted. A request is lost unless its reply is 200 with the right score.
nginx and HAProxy must be installed. Writes benchmarks/results/rolling_restart.json.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from stamp import ROOT, processor, stamp

RESULTS = ROOT / "benchmarks" / "results" / "rolling_restart.json"
CLIENTS = 8
PAUSE_SECONDS = 0.01  # between a client's requests
WAIT_SECONDS = 300.0
SETTLE_SECONDS = 4.0  # between the restarts: longer than a proxy needs to see that a server is back
BODY = json.dumps({"model": "sums", "items": [{"prompt": "3+4+5=", "responses": ["3+4=7;7+5=12;#12"]}]})
# name -> program, its configuration, the server's setting for when it listens
PROXIES = {
    "nginx": ("nginx", "nginx.conf", "start"),
    "haproxy, active checks": ("haproxy", "haproxy.cfg", "start"),
    "haproxy, tcp": ("haproxy", "haproxy-tcp.cfg", "ready"),
}


def missing() -> list[str]:
    return sorted({program for program, _, _ in PROXIES.values() if shutil.which(program) is None})


class Server:
    """`plaudit serve` on a port of its own, which it keeps when it restarts."""

    def __init__(self, listen: str, directory: Path) -> None:
        self.port = free_port()
        self._log = (directory / f"server-{self.port}").open("ab")
        config = directory / f"serve-{self.port}.toml"
        config.write_text(f'port = {self.port}\nlisten = "{listen}"\ndrain_delay = 3.0\n[models.sums]\npath = "sums"\n')
        self._command = [sys.executable, "-m", "plaudit", "serve", "--config", str(config)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, cwd=ROOT)

    def wait_ready(self) -> None:
        wait_for(f"http://127.0.0.1:{self.port}/health/ready", self._process)

    def restart(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(WAIT_SECONDS)
        if code:
            raise SystemExit(f"a server ended with {code}")
        self.start()
        self.wait_ready()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


@contextmanager
def proxy(name: str, ports: tuple[int, int], directory: Path) -> Iterator[int]:
    """Runs the proxy with its file of deploy/, other addresses put in. Yields its port."""
    program, file, _ = PROXIES[name]
    port = free_port()
    text = (ROOT / "deploy" / file).read_text()
    for number, each in enumerate(ports, 1):
        text = text.replace(f"10.0.0.{number}:5555", f"127.0.0.1:{each}")
    text = re.sub(r"(listen |bind :)80\b", lambda m: f"{m[1].replace('bind :', 'bind 127.0.0.1:')}{port}", text)
    config = directory / file
    if program == "nginx":
        own = "".join(f"{part}_temp_path {directory};" for part in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        head = f"daemon off; pid {directory}/pid; error_log {directory}/errors; events {{}}"
        text = f"{head}\nhttp {{ access_log off; {own}\n{text}}}\n"
        command = ["nginx", "-p", str(directory), "-e", f"{directory}/errors", "-c", str(config)]
    else:
        command = ["haproxy", "-db", "-f", str(config)]
    config.write_text(text)
    with (directory / f"{program}-output").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            wait_for(f"http://127.0.0.1:{port}/health/live", process)
            yield port
        finally:
            process.terminate()
            process.wait(30)


class Clients:
    """Threads that send requests until they are stopped, and count the outcomes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]
        self._lock = threading.Lock()
        self._expected: Any = None
        self.longest = 0.0
        for each in self._threads:
            each.start()

    def _run(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._stop.is_set():
            if connection is None:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            began = time.perf_counter()
            outcome = self._send(connection)
            with self._lock:
                self.outcomes[outcome] += 1
                self.longest = max(self.longest, time.perf_counter() - began)
            if connection.sock is None or outcome != "200":
                connection.close()
                connection = None
            time.sleep(PAUSE_SECONDS)

    def _send(self, connection: http.client.HTTPConnection) -> str:
        try:
            connection.request("POST", "/v1/rewards", BODY, {"content-type": "application/json"})
            reply = connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        if reply.status != 200:
            return str(reply.status)
        scores = json.loads(content)["items"][0]["scores"]
        with self._lock:
            self._expected = self._expected or scores
            return "200" if scores == self._expected else "another score"

    @property
    def sent(self) -> int:
        with self._lock:
            return self.outcomes.total()

    def stop(self) -> None:
        self._stop.set()
        for each in self._threads:
            each.join(WAIT_SECONDS)


def rolling_restart(name: str, requests: int) -> dict[str, Any]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [Server(PROXIES[name][2], directory) for _ in range(2)]
        for server in servers:
            stack.callback(server.end)
        for server in servers:
            server.wait_ready()
        port = stack.enter_context(proxy(name, (servers[0].port, servers[1].port), directory))
        time.sleep(SETTLE_SECONDS)
        clients = Clients(port)
        try:
            for server in servers:
                time.sleep(SETTLE_SECONDS)
                server.restart()
            until = time.monotonic() + SETTLE_SECONDS
            while time.monotonic() < until or clients.sent < requests:
                time.sleep(0.1)
        finally:
            clients.stop()
    sent = clients.outcomes.total()
    lost = {outcome: count for outcome, count in clients.outcomes.items() if outcome != "200"}
    return {
        "requests": sent, "lost": sum(lost.values()), "outcomes": lost, "longest_seconds": round(clients.longest, 2),
    }  # fmt: skip


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{url} did not answer within {WAIT_SECONDS:g} s")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def version(program: str) -> str:
    shown = subprocess.run([program, "-v"], capture_output=True, text=True, check=True)
    return (shown.stdout + shown.stderr).splitlines()[0]


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    if programs := missing():
        raise SystemExit(f"not installed: {', '.join(programs)}")
    rows = {}
    for name in PROXIES:
        rows[name] = rolling_restart(name, requests)
        print(name, rows[name], flush=True)
    versions = {program: version(program) for program in ("nginx", "haproxy")}
    result = {**stamp(__file__, processor(), {}), "clients": CLIENTS, "versions": versions, "proxies": rows}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
