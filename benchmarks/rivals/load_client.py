"""Sends prepared HTTP requests over keep-alive connections, in a separate process with raw sockets.

    python load_client.py PORT CONNECTIONS REQUESTS ANSWERS [SECONDS]

REQUESTS and ANSWERS are files of records: 4 bytes of length (little endian), then the bytes. Every connection sends the
next request as soon as its previous one is answered, until none is left or SECONDS have passed. ANSWERS receives the
body of every answer in the order of the requests. Prints {"seconds", "latencies" (in seconds, in that order), "cpu":
CPU seconds of the client itself}. Any status other than 200 ends the run with the response text.
"""

from __future__ import annotations

import gc
import json
import selectors
import socket
import struct
import sys
import time
from pathlib import Path


def records(path: str) -> list[bytes]:
    data = Path(path).read_bytes()
    found, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found


def write_records(path: str | Path, rows: list[bytes]) -> None:
    Path(path).write_bytes(b"".join(struct.pack("<I", len(row)) + row for row in rows))


def body_of(answer: bytes) -> bytes | None:
    """The body once it is complete; None before."""
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return None
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            if len(body) < int(value):
                return None
            break
    else:
        raise SystemExit(f"an answer without Content-Length: {head!r}")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"refused: {head.splitlines()[0]!r} {body[:500]!r}")
    return body


def main() -> None:
    port, connections, requests_file, answers_file, *rest = sys.argv[1:]
    seconds = float(rest[0]) if rest else float("inf")
    requests = records(requests_file)
    answers: list[bytes] = [b""] * len(requests)
    started, latencies = [0.0] * len(requests), [0.0] * len(requests)
    selector = selectors.DefaultSelector()
    sockets = []
    for _ in range(min(int(connections), len(requests))):
        connection = socket.create_connection(("127.0.0.1", int(port)), timeout=60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ)
        sockets.append(connection)
    asking: dict[socket.socket, int] = {}  # the request that a connection waits for
    received: dict[socket.socket, bytes] = {}
    upcoming = 0
    gc.disable()
    cpu, begin = time.process_time(), time.perf_counter()

    def send_next(connection: socket.socket) -> None:
        nonlocal upcoming
        if upcoming == len(requests) or time.perf_counter() - begin > seconds:
            asking.pop(connection, None)
            selector.unregister(connection)  # the server may close it now: it is idle
            return
        asking[connection] = upcoming
        received[connection] = b""
        started[upcoming] = time.perf_counter()
        connection.sendall(requests[upcoming])
        upcoming += 1

    for connection in sockets:
        send_next(connection)
    while asking:
        ready = selector.select(timeout=120)
        if not ready:
            raise SystemExit("no answer for 120 seconds")
        for key, _ in ready:
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 16)
            if not data:
                raise SystemExit("the server closed a connection")
            received[connection] += data
            body = body_of(received[connection])
            if body is not None:
                number = asking[connection]
                latencies[number] = time.perf_counter() - started[number]
                answers[number] = body
                send_next(connection)
    passed = time.perf_counter() - begin
    write_records(answers_file, answers[:upcoming])
    print(json.dumps({"seconds": passed, "latencies": latencies[:upcoming], "cpu": time.process_time() - cpu}))


if __name__ == "__main__":
    main()
