"""Plaudit's HTTP listener beside granian, uvicorn and hypercorn, each in front of the same ASGI applications.

    pip install --target DIR granian hypercorn
    python benchmarks/listeners.py --packages DIR [--seconds 4] [--rounds 3] [--only cases,floods,rate]

cases    the raw requests of tests/serve/raw_cases.py: how many are handled as RFC 9112 and 9110 demand, and how many
         bodies or refused heads are executed as a request
floods   what a client without a key can do: for each flood the longest delay of another client's requests, and whether
         the server sheds the load (closes the flooding connections, or continues to accept others)
rate     requests/s and the server's CPU time per request through Plaudit's application at 1, 16 and 64 connections;
         servers alternate, the median over rounds is reported

Each server runs with the strictest limits that it has. Writes benchmarks/results/listeners.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from frameworks import PATH, ours
from rivals.load_client import write_records
from stamp import ROOT, processor, stamp, versions

sys.path.insert(0, str(ROOT))
from tests.serve.raw_cases import Recorder, fault, outcome, table

RESULTS = ROOT / "benchmarks" / "results" / "listeners.json"
SERVERS = ("plaudit", "granian", "uvicorn httptools", "uvicorn h11", "hypercorn")
RIVALS = {
    "granian": "embedded in an event loop, HTTP/1 only, one runtime thread, header_read_timeout 3 s, 64 KiB buffer",
    "uvicorn": "uvloop, no access log, no lifespan; with httptools and with h11",
    "hypercorn": "on asyncio's API with uvloop, HTTP/1 only by default of plain TCP; read_timeout 3 s",
}
CONNECTIONS = 400  # limit of connections where there is one
FILES = 1024  # descriptors of the server: what it has where it limits nothing
SHED_SECONDS = 12.0  # four times the deadlines that are configured
LARGE = 8 << 20
FLOOD_SECONDS = 3.0
BODY = json.dumps({"items": [{"tokens": list(range(5, 13))}]}).encode()


class Everything:
    """Recorder, and for floods: /small, and /large, whose reply is LARGE."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.cancelled = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in (
            "/small",
            "/page",
            "/large",
            "/wait",
            "/read",
            "/cancelled",
        ):
            await self.recorder(scope, receive, send)
            return
        if scope["path"] == "/read":
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass
        if scope["path"] == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.cancelled += 1
            return
        sizes = {"/large": LARGE, "/page": 50_000}
        body = b" " * sizes.get(scope["path"], 1) if scope["path"] != "/cancelled" else b"%d" % self.cancelled
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        for start in range(0, len(body), 1 << 16):
            part = body[start : start + (1 << 16)]
            await send({"type": "http.response.body", "body": part, "more_body": start + len(part) < len(body)})


# The servers


def serve(kind: str, application: str) -> None:
    """Serves on a free port, which is printed, until SIGTERM; prints the CPU seconds used for every line of stdin."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    app = ours() if application == "plaudit" else Everything()

    def report() -> None:
        for _ in sys.stdin:
            print(time.process_time(), flush=True)
        os._exit(0)

    threading.Thread(target=report, daemon=True).start()
    import uvloop

    uvloop.run({"plaudit": _plaudit, "granian": _granian, "hypercorn": _hypercorn}.get(kind, _uvicorn)(app, kind))


def _announce(port: int) -> None:
    print(port, flush=True)


async def _plaudit(app: Any, kind: str) -> None:
    from plaudit.config.serve import LimitsTable
    from plaudit.serve.http.address import bind
    from plaudit.serve.http.listener import Listener

    sock = bind("127.0.0.1", 0)
    await Listener(app, LimitsTable(connections=CONNECTIONS, header_seconds=3, write_seconds=3)).start([sock])
    _announce(sock.getsockname()[1])
    await asyncio.Event().wait()


async def _uvicorn(app: Any, kind: str) -> None:
    import uvicorn

    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    _announce(sock.getsockname()[1])
    http: Any = kind.split()[1]
    config = uvicorn.Config(
        app, http=http, lifespan="off", log_level="error", access_log=False, ws="none", timeout_keep_alive=5,
        backlog=1024, h11_max_incomplete_event_size=65536,
    )  # fmt: skip
    await uvicorn.Server(config).serve([sock])


async def _hypercorn(app: Any, kind: str) -> None:
    from hypercorn.asyncio import serve as run
    from hypercorn.config import Config

    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    _announce(sock.getsockname()[1])
    config = Config()
    config.bind = [f"fd://{sock.fileno()}"]
    config.read_timeout = 3
    config.backlog = 1024
    config.keep_alive_max_requests = 1 << 40
    config.loglevel = "CRITICAL"
    await run(app, config)


async def _granian(app: Any, kind: str) -> None:
    from granian.constants import HTTPModes, Interfaces
    from granian.http import HTTP1Settings
    from granian.server.embed import Server

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    settings = HTTP1Settings(header_read_timeout=3000, max_buffer_size=65536)
    server = Server(
        app, port=port, interface=Interfaces.ASGINL, http=HTTPModes.http1, http1_settings=settings, websockets=False,
        log_enabled=False, backlog=1024,
    )  # fmt: skip
    task = asyncio.create_task(server.serve())
    while True:
        await asyncio.sleep(0.05)
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
    _announce(port)
    await task


class Running:
    def __init__(self, kind: str, application: str, packages: str) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{packages}"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind, "--application", application], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def cpu(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("cpu", file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def memory(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) >> 10


@contextmanager
def running(kind: str, application: str, packages: str) -> Iterator[Running]:
    server = Running(kind, application, packages)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(30)
        for stream in (server.process.stdin, server.process.stdout):
            if stream is not None:
                stream.close()


# The cases


def cases(kind: str, packages: str) -> dict[str, Any]:
    wrong: dict[str, str] = {}
    smuggled: list[str] = []
    every = table()
    with running(kind, "everything", packages) as server:
        for case in every:
            if server.process.poll() is not None:
                raise SystemExit(f"{kind} has ended at {case.id}")
            found = outcome(server.port, case, seconds=2)
            problem = fault(case, found)
            if problem is not None:
                wrong[case.id] = f"{case.verdict}: {problem}"[:300]
            if any("/smuggled" in each and "/a" not in each for each in found.executed):
                smuggled.append(case.id)
    return {"cases": len(every), "right": len(every) - len(wrong), "smuggled": smuggled, "wrong": wrong}


# The floods


def connected(port: int, *, receive: int = 0) -> socket.socket:
    sock = socket.socket()
    if receive:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    sock.settimeout(5)
    sock.connect(("127.0.0.1", port))
    return sock


def small(port: int) -> bool:
    with suppress(OSError), connected(port) as sock:
        sock.sendall(b"GET /small HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        return sock.recv(100).startswith(b"HTTP/1.1 200")
    return False


def closed(sock: socket.socket) -> bool:
    """Whether the server has closed it; reads what it sent."""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def reset(sock: socket.socket) -> bool:
    """Whether the server has given up on a connection that does not read."""
    information = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return information[0] != 1  # no longer established


GET_PAGE = b"GET /page HTTP/1.1\r\nHost: h\r\n\r\n"


def flood(kind: str, name: str, packages: str) -> dict[str, Any]:
    """Runs a flood and measures the longest delay of another client, and whether the server is rid of it afterwards."""
    with running(kind, "everything", packages) as server, ExitStack() as stack:
        assert small(server.port)
        before, delays, stop = server.memory(), [], threading.Event()
        failures = 0

        def probe() -> None:
            nonlocal failures
            while not stop.is_set():
                began = time.perf_counter()
                failures += not small(server.port)
                delays.append(time.perf_counter() - began)
                time.sleep(0.02)

        thread = threading.Thread(target=probe)
        thread.start()
        shed: bool | str = FLOODS[name](server.port, stack)
        stop.set()
        thread.join()
        return {
            "longest delay s": round(max(delays), 3), "failed requests": failures, "of": len(delays), "shed": shed,
            "MiB more": server.memory() - before, "alive": server.process.poll() is None,
        }  # fmt: skip


def _opened(port: int, stack: ExitStack, count: int, data: bytes = b"", receive: int = 0) -> list[socket.socket]:
    found = []
    for _ in range(count):
        sock = stack.enter_context(connected(port, receive=receive))
        if data:
            sock.sendall(data)
        found.append(sock)
    return found


def _until(condition: Callable[[], bool], seconds: float = SHED_SECONDS) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.2)
    return condition()


def _all_closed(socks: list[socket.socket]) -> bool:
    return _until(lambda: all(map(closed, socks)))


def slow_headers(port: int, stack: ExitStack) -> bool:
    socks = _opened(port, stack, 100, b"GET /small HTTP/1.1\r\nHost: h\r\n")
    open_ = set(socks)
    end = time.monotonic() + SHED_SECONDS
    while open_ and time.monotonic() < end:
        for sock in list(open_):
            with suppress(OSError):
                sock.send(b"X")
            if closed(sock):
                open_.discard(sock)
        time.sleep(0.2)
    return not open_


def never_sending(port: int, stack: ExitStack) -> bool:
    return _all_closed(_opened(port, stack, 100))


def never_reading(port: int, stack: ExitStack) -> bool:
    socks = _opened(port, stack, 20, b"GET /large HTTP/1.1\r\nHost: h\r\n\r\n", receive=4096)
    return _until(lambda: all(map(reset, socks)))


def pipelining(port: int, stack: ExitStack) -> bool:
    socks = _opened(port, stack, 60, receive=65536)
    _push(socks, GET_PAGE * 10_000, FLOOD_SECONDS)
    return _until(lambda: all(map(reset, socks)))


def many_idle(port: int, stack: ExitStack) -> bool:
    """More idle connections than the server has descriptors; then a new client."""
    with suppress(OSError):
        _opened(port, stack, FILES + 200, b"GET /small HTTP/1.1\r\nHost: h\r\n\r\n")
    return all(small(port) for _ in range(5))


def tiny_chunks(port: int, stack: ExitStack) -> bool:
    socks = _opened(port, stack, 60, b"POST /read HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    _push(socks, b"1\r\na\r\n" * 100_000, FLOOD_SECONDS)
    return small(port)


def many_headers(port: int, stack: ExitStack) -> bool:
    """Requests of 10,000 headers; shed: they are refused."""
    data = b"GET /small HTTP/1.1\r\nHost: h\r\n" + b"".join(b"X%d: 1\r\n" % n for n in range(10_000)) + b"\r\n"
    return _refused(port, stack, data)


def endless_header(port: int, stack: ExitStack) -> bool:
    return _refused(port, stack, b"GET /small HTTP/1.1\r\nHost: h\r\nX: " + b"a" * (4 << 20))


def endless_trailer(port: int, stack: ExitStack) -> bool:
    head = b"POST /read HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    return _refused(port, stack, head + b"X: a\r\n" * 700_000)


def endless_extension(port: int, stack: ExitStack) -> bool:
    head = b"POST /read HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1;"
    return _refused(port, stack, head + b"a" * (4 << 20))


def _refused(port: int, stack: ExitStack, data: bytes) -> bool:
    socks = _opened(port, stack, 5)
    _push(socks, data, FLOOD_SECONDS, repeat=False)
    refused = 0
    for sock in socks:
        sock.setblocking(True)
        sock.settimeout(3)
        with suppress(TimeoutError):
            try:
                refused += not sock.recv(100).startswith(b"HTTP/1.1 200")
            except ConnectionError:
                refused += 1
    return refused == len(socks)


def _push(socks: list[socket.socket], data: bytes, seconds: float, repeat: bool = True) -> None:
    """Send as much as the server takes, on all connections."""
    view, at = memoryview(data), dict.fromkeys(socks, 0)
    end = time.monotonic() + seconds
    for sock in socks:
        sock.setblocking(False)
    while at and time.monotonic() < end:
        for sock in list(at):
            try:
                at[sock] += sock.send(view[at[sock] : at[sock] + (1 << 18)])
                if at[sock] >= len(data):
                    at[sock] = 0
                    if not repeat:
                        del at[sock]
            except BlockingIOError:
                pass
            except OSError:
                del at[sock]
        time.sleep(0.005)


FLOODS: dict[str, Callable[[int, ExitStack], bool]] = {
    "slow headers": slow_headers, "never sending": never_sending, "never reading 8 MiB": never_reading,
    "60 pipelining, never reading": pipelining, "more idle than descriptors": many_idle,
    "60 sending chunks of a byte": tiny_chunks, "10,000 headers": many_headers, "a header of 4 MiB": endless_header,
    "a trailer of 4 MiB": endless_trailer, "a chunk extension of 4 MiB": endless_extension,
}  # fmt: skip


def disconnects(kind: str, packages: str) -> bool:
    """Whether the application learns that a client has gone."""
    with running(kind, "everything", packages) as server:
        with connected(server.port) as sock:
            sock.sendall(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n")
            time.sleep(0.3)
        time.sleep(0.5)
        with connected(server.port) as sock:
            sock.sendall(b"GET /cancelled HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        return answer.endswith(b"\r\n1")


# The rate


def rate(kind: str, connections: int, seconds: float, packages: str, folder: Path) -> dict[str, float]:
    with running(kind, "plaudit", packages) as server:

        def load(seconds: float) -> Any:
            command = [
                sys.executable,
                f"{ROOT / 'benchmarks/rivals/load_client.py'}",
                f"{server.port}",
                f"{connections}",
            ]
            command += [f"{folder / 'requests'}"]
            command += [f"{folder / 'answers'}", f"{seconds}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise SystemExit(f"{kind} at {connections} connections: {done.stderr}")
            return json.loads(done.stdout)

        load(0.5)
        before = server.cpu()
        sent = load(seconds)
        count = len(sent["latencies"])
        return {"requests/s": count / sent["seconds"], "CPU us": 1e6 * (server.cpu() - before) / count}


def rates(options: argparse.Namespace) -> list[dict[str, Any]]:
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_records(Path(folder) / "requests", [f"{head}\r\n\r\n".encode() + BODY] * int(15_000 * options.seconds))
        for connections in (1, 16, 64):
            found: dict[str, list[dict[str, float]]] = {kind: [] for kind in options.servers}
            for _ in range(options.rounds):
                for kind in options.servers:
                    found[kind].append(rate(kind, connections, options.seconds, options.packages, Path(folder)))
            for kind, rounds in found.items():
                row = {name: round(median(each[name] for each in rounds), 1) for name in rounds[0]}
                rows.append({"server": kind, "connections": connections, **row, "rounds": rounds})
                print(f"{kind:18} {connections:3} {row}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", default="")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="cases,floods,rate", help="parts to run; the others keep their results")
    parser.add_argument("--servers", type=lambda text: text.split(","), default=list(SERVERS))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--application", default="everything", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.application)
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    parts = options.only.split(",")
    if "cases" in parts:
        found = record.setdefault("cases", {})
        for kind in options.servers:
            found[kind] = cases(kind, options.packages)
            print(kind, {**found[kind], "wrong": len(found[kind]["wrong"])}, file=sys.stderr, flush=True)
    if "floods" in parts:
        for kind in options.servers:
            record.setdefault("notified of disconnects", {})[kind] = disconnects(kind, options.packages)
            for name in FLOODS:
                row = record.setdefault("floods", {}).setdefault(name, {})
                row[kind] = flood(kind, name, options.packages)
                print(name, kind, row[kind], file=sys.stderr, flush=True)
    if "rate" in parts:
        record["rate"] = rates(options)
    os.environ["PYTHONPATH"] = options.packages
    installed = versions(sys.executable, ("granian", "uvicorn", "h11", "httptools", "hypercorn", "uvloop"))
    record = {
        **stamp(__file__, processor(), {}),
        "versions": installed,
        "settings": dict(RIVALS),
        **{k: record[k] for k in record if k in KEPT},
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


KEPT = ("cases", "floods", "notified of disconnects", "rate")


if __name__ == "__main__":
    main()
