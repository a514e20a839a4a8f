"""The effect on a neighbour and a health probe while a client sends the most expensive requests that the limits allow.

    python benchmarks/attacks.py [SECONDS] [NAME]

Starts `plaudit serve` on this machine with two API keys. For each attack, or those whose name begins with NAME, a
process repeats its request with one key on four connections (gRPC: on 20, with and without a key; `GET /docs`: on 60
that never read); meanwhile `/health/live` is probed every 20 ms and the other key scores one text after another.
Reports p50 and p99 of the probe and the neighbour's median latency for each attack, and the same without an attack.
Writes benchmarks/results/attacks.json if all are run.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent))
from stamp import ROOT, processor, stamp

RESULTS = ROOT / "benchmarks" / "results" / "attacks.json"
HOSTILE, NEIGHBOUR = "hostile-key-1", "neighbour-key-1"
CONNECTIONS = 4
MOST_BYTES, MOST_VALUES = 64 << 20, 3_900_000  # just within the default limits: 64 MiB and 4,000,000
ITEM = {"prompt": "3+4+5=", "responses": ["3+4=7;7+5=12;#12"]}


def truth(values: bytes) -> bytes:
    """A body with these values in its generic part, in an item that is rejected only after it was parsed."""
    return b'{"items": [{"text": "a", "truth": [' + values + b"1]}]}"


ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "3.9 million token ids": (
        "/v1/rewards",
        lambda: b'{"items": [{"tokens": [' + b"1," * MOST_VALUES + b"1]}]}",
    ),
    "3.9 million floats": ("/v1/rewards", lambda: truth(b"1.5," * MOST_VALUES)),
    "1.9 million empty lists": ("/v1/rewards", lambda: truth(b"[]," * (MOST_VALUES // 2))),
    "lists 500 deep": ("/v1/rewards", lambda: truth((b"[" * 500 + b"]" * 500 + b",") * (MOST_VALUES // 501))),
    "3.9 million keys": (
        "/classify",
        lambda: b'{"model": "sums", "input": {' + b",".join(b'"%d":1' % n for n in range(MOST_VALUES)) + b"}}",
    ),
    "integers of 4,299 digits": (
        "/classify",
        lambda: b'{"model": "sums", "input": [' + (b"9" * 4299 + b",") * (MOST_BYTES // 4301) + b"1]}",
    ),
    "64 MiB of escapes": (
        "/v1/rewards",
        lambda: b'{"items": [{"text": "' + b"\\u0416" * (MOST_BYTES // 6 - 9) + b'"}]}',
    ),
    "64 MiB of text": ("/get_reward", lambda: b'{"query": ["' + b"a" * (MOST_BYTES - 40) + b'"]}'),
    "4,096 texts of 2,000 characters": (
        "/v1/rewards",
        lambda: json.dumps({"items": [{"text": "7+8=" * 500}] * 4096}).encode(),
    ),
}  # fmt: skip

GRPC_CALLS, GRPC_BYTES = 20, (16 << 20) - 64  # below limits.grpc_message_bytes
UNREAD_CONNECTIONS, UNREAD_REQUESTS = 60, 2000


def grpc_raw() -> bytes:
    return b"\x3a" + varint(GRPC_BYTES) + b"a" * GRPC_BYTES  # raw_input_contents


def grpc_empty() -> bytes:
    return b"\x2a\x00" * (GRPC_BYTES // 2)  # 8 million inputs


def grpc_typed() -> bytes:
    numbers = b"\x1a" + varint(GRPC_BYTES) + b"\x05" * GRPC_BYTES  # int64_contents
    tensor = b"\x12\x05INT64\x2a" + varint(len(numbers)) + numbers
    return b"\x2a" + varint(len(tensor)) + tensor


def varint(number: int) -> bytes:
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


# name -> the message, and whether its calls have a key
GRPC_ATTACKS: dict[str, tuple[Callable[[], bytes], bool]] = {
    f"gRPC, {what}{'' if key else ', no key'}": (message, key)
    for what, message in (
        ("16 MiB raw", grpc_raw),
        ("16 MiB typed", grpc_typed),
        ("16 MiB of empty inputs", grpc_empty),
    )
    for key in (False, True)
}
UNREAD = "GET /docs, pipelined and never read"


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """Yields the URL and the gRPC port."""
    ports = []
    for _ in range(2):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
    port = ports[0]
    words = ["serve", "--port", str(port), "--model", "sums", "--api-key", f"hostile={HOSTILE}"]
    words += ["--api-key", f"neighbour={NEIGHBOUR}", "--grpc-port", str(ports[1])]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-m", "plaudit", *words], stdout=log, stderr=log, cwd=ROOT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url)
            yield url, ports[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def wait_ready(url: str) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server was not ready within 300 s")


def attack(url: str, name: str, replies: Any) -> None:
    """Runs the attack in a separate process until it is stopped."""
    path, body = ATTACKS[name]
    packed = gzip.compress(body(), 1)
    headers = {
        "authorization": f"Bearer {HOSTILE}", "content-type": "application/json", "content-encoding": "gzip",
    }  # fmt: skip

    async def one(http: httpx.AsyncClient) -> None:
        while True:
            reply = await http.post(url + path, content=packed, headers=headers)
            replies.put(reply.status_code)
            if reply.status_code == 503:
                await asyncio.sleep(0.1)

    async def all_of_them() -> None:
        async with httpx.AsyncClient(timeout=600) as http:
            await asyncio.gather(*(one(http) for _ in range(CONNECTIONS)))

    asyncio.run(all_of_them())


def attack_grpc(port: int, name: str, replies: Any) -> None:
    import grpc

    make, key = GRPC_ATTACKS[name]
    message = make()
    metadata = [("authorization", f"Bearer {HOSTILE}")] if key else []
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]

    async def one() -> None:
        while True:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                try:
                    await call(message, metadata=metadata)
                except grpc.aio.AioRpcError as error:
                    replies.put(error.code().name)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(GRPC_CALLS)))

    asyncio.run(all_of_them())


def attack_unread(url: str, replies: Any) -> None:
    requests = b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n" * UNREAD_REQUESTS
    port = int(url.rpartition(":")[2])

    async def one() -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
                writer.write(requests)
                replies.put("sent")
                await asyncio.wait_for(writer.wait_closed(), 10)
            except (OSError, TimeoutError):
                await asyncio.sleep(0.1)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(UNREAD_CONNECTIONS)))

    asyncio.run(all_of_them())


async def measure(url: str, seconds: float) -> dict[str, float]:
    end = time.monotonic() + seconds
    probes: list[float] = []
    scores: list[float] = []

    async def probe(http: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            began = time.perf_counter()
            assert (await http.get(f"{url}/health/live")).status_code == 200
            probes.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)

    async def score(http: httpx.AsyncClient) -> None:
        headers = {"authorization": f"Bearer {NEIGHBOUR}"}
        while time.monotonic() < end:
            began = time.perf_counter()
            reply = await http.post(f"{url}/v1/rewards", json={"items": [ITEM], "cache": False}, headers=headers)
            assert reply.status_code == 200, reply.text
            scores.append(time.perf_counter() - began)

    async with httpx.AsyncClient(timeout=600) as http:
        await asyncio.gather(probe(http), score(http))
    hundredths = statistics.quantiles(probes, n=100, method="inclusive")
    return {
        "live_p50_ms": round(statistics.median(probes) * 1000, 1), "live_p99_ms": round(hundredths[98] * 1000, 1),
        "live_max_ms": round(max(probes) * 1000, 1), "probes": len(probes),
        "neighbour_p50_ms": round(statistics.median(scores) * 1000, 1), "neighbour_requests": len(scores),
    }  # fmt: skip


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 15.0
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    spawn = multiprocessing.get_context("spawn")
    with server() as (url, grpc_port):
        asyncio.run(measure(url, 3.0))  # warm-up
        rows: dict[str, Any] = {"none": asyncio.run(measure(url, seconds))}
        for name in (*ATTACKS, *GRPC_ATTACKS, UNREAD):
            if not name.startswith(only):
                continue
            replies = spawn.Queue()
            if name in ATTACKS:
                hostile = spawn.Process(target=attack, args=(url, name, replies))
            elif name in GRPC_ATTACKS:
                hostile = spawn.Process(target=attack_grpc, args=(grpc_port, name, replies))
            else:
                hostile = spawn.Process(target=attack_unread, args=(url, replies))
            hostile.start()
            replies.get(timeout=300)  # the attack is running: one of its requests has been answered
            row = asyncio.run(measure(url, seconds))
            hostile.kill()
            hostile.join()
            rows[name] = row
            print(name, row, flush=True)
            time.sleep(3.0)
    if only:
        return
    base = rows["none"]["neighbour_p50_ms"]
    result = {
        **stamp(__file__, processor(), {}), "seconds": seconds, "connections": CONNECTIONS,
        "load_average": round(os.getloadavg()[0], 1), "attacks": rows,
        "worst_live_p99_ms": max(row["live_p99_ms"] for row in rows.values()),
        "worst_neighbour_ratio": round(max(row["neighbour_p50_ms"] for row in rows.values()) / base, 2),
    }  # fmt: skip
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
