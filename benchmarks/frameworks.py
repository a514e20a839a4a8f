"""One route in plain ASGI, in Starlette and in Plaudit's application, on the same listener.

    python benchmarks/frameworks.py [--connections 64] [--seconds 5] [--rounds 3]

The route reads a JSON body (one item of 8 tokens) and answers with one score; no model runs:
    asgi        a bare function without checks or metrics
    starlette   Starlette with only this route, without checks or metrics
    behind      Plaudit's application as a route of Starlette, the least that a port to Starlette would add
    plaudit     Plaudit's application: host, key, limits, admission, deadlines, metrics and the log
Servers alternate, each in its own process. Reports the median over rounds of requests per second and of the server's
CPU time per request. Runs in .venv-vllm, which includes Starlette. Writes benchmarks/results/frameworks.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rivals.load_client import write_records
from stamp import processor, stamp, versions

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
RESULTS = ROOT / "benchmarks" / "results" / "frameworks.json"
APPS = ("asgi", "starlette", "behind", "plaudit")
PATH = "/v1/rewards"
JSON = b"application/json"


def scored(body: bytes) -> bytes:
    import msgspec

    items = msgspec.json.decode(body)["items"]
    return msgspec.json.encode({"items": [{"scores": [float(len(item["tokens"]))]} for item in items]})


async def plain(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    reply = scored(body)
    headers = [(b"content-type", JSON), (b"content-length", str(len(reply)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reply})


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def endpoint(request: Request) -> Response:
        return Response(scored(await request.body()), media_type="application/json")

    return Starlette(routes=[Route(PATH, endpoint, methods=["POST"])])


def ours() -> Any:
    from plaudit.config.serve import LimitsTable
    from plaudit.serve.http.app import Admission, App
    from plaudit.serve.http.keys import Keys
    from plaudit.serve.http.message import Limits, Reply, Request, Route, Routes
    from plaudit.serve.logs import Log
    from plaudit.serve.metrics import Metrics

    async def handler(request: Request) -> Reply:
        return Reply(200, scored(request.content))

    limits, metrics = LimitsTable(), Metrics()
    admission = Admission(limits.queued_tokens, limits.buffered_bytes, 1, 429, metrics)
    keys = Keys({}, keyless=True, allow_open=frozenset())
    return App(
        Routes([Route("POST", PATH, "key", handler, work=True)]), keys, admission,
        Limits(limits.body_bytes, limits.body_seconds, limits.request_seconds), metrics,
        Log(metrics.log_failures.inc), log_requests=False,
    )  # fmt: skip


def behind() -> Any:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    return Starlette(routes=[Mount("/", app=ours())])


def serve(kind: str) -> None:
    """Serves on a free port, which is printed, until stdin closes; then prints the CPU seconds used."""
    import uvloop

    from plaudit.config.serve import LimitsTable
    from plaudit.serve.http.listener import Listener

    app = {"asgi": lambda: plain, "starlette": starlette, "behind": behind, "plaudit": ours}[kind]()

    async def run() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        listener = Listener(app, LimitsTable())
        await listener.start([sock])
        print(sock.getsockname()[1], flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            assert line.strip() == "cpu"
            print(time.process_time(), flush=True)
        await listener.stop()

    uvloop.run(run())


def measure(kind: str, connections: int, seconds: float, folder: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}"}
    server = subprocess.Popen(
        [f"{PYTHON}", __file__, "--serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())

        def load(seconds: float) -> Any:
            command = [sys.executable, f"{ROOT / 'benchmarks/rivals/load_client.py'}", f"{port}", f"{connections}"]
            command += [f"{folder / 'requests'}", f"{folder / 'answers'}", f"{seconds}"]
            return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)

        def cpu() -> float:
            print("cpu", file=server.stdin, flush=True)
            return float(server.stdout.readline())  # type: ignore[union-attr]

        load(1.0)
        before = cpu()
        sent = load(seconds)
        count = len(sent["latencies"])
        return {"requests/s": count / sent["seconds"], "CPU us": 1e6 * (cpu() - before) / count}
    finally:
        server.stdin.close()
        server.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", choices=APPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if not PYTHON.exists():
        raise SystemExit("Starlette is not installed; run: make .venv-vllm/.installed")
    body = json.dumps({"items": [{"tokens": list(range(5, 13))}]}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in APPS}
    with tempfile.TemporaryDirectory() as place:
        write_records(Path(place) / "requests", [f"{head}\r\n\r\n".encode() + body] * int(20_000 * options.seconds))
        for _ in range(options.rounds):
            for kind in APPS:
                rounds[kind].append(measure(kind, options.connections, options.seconds, Path(place)))
                print(kind, rounds[kind][-1], file=sys.stderr, flush=True)
    rows = [{"app": kind, **{name: median(r[name] for r in rounds[kind]) for name in rounds[kind][0]}} for kind in APPS]
    for row in rows:
        print(f"{row['app']:10} {row['requests/s']:8.0f} requests/s {row['CPU us']:6.1f} us of CPU a request")
    installed = versions(PYTHON, ("starlette", "uvloop", "httptools"))
    record = {
        **stamp(__file__, processor(), {"starlette": (installed["starlette"], "one route, no middleware of its own")}),
        "versions": installed, "connections": options.connections, "seconds": options.seconds, "rounds": rounds,
        "rows": rows,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
