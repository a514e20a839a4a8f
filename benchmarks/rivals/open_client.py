"""Sends prepared HTTP requests at random arrival times, whether or not earlier ones have been answered.

    python open_client.py PORT RATE SEED REQUESTS

REQUESTS is a file of records in load_client.py's format. Arrivals are a Poisson process of RATE requests per second. A
request uses an idle connection or opens one, and its latency counts from its arrival, so waiting in the client is
included. Prints {"seconds", "latencies" (in seconds, in order), "late": the longest delay in seconds between an arrival
and its sending}. Any status other than 200 ends the run with the response text.
"""

from __future__ import annotations

import gc
import json
import random
import selectors
import socket
import sys
import time

from load_client import body_of, records


def main() -> None:
    port, rate, seed, requests_file = sys.argv[1:]
    requests, draw = records(requests_file), random.Random(int(seed))
    arrivals, at = [], 0.0
    for _ in requests:
        at += draw.expovariate(float(rate))
        arrivals.append(at)
    latencies = [0.0] * len(requests)
    selector, idle = selectors.DefaultSelector(), []
    asking: dict[socket.socket, int] = {}
    received: dict[socket.socket, bytes] = {}
    upcoming, late = 0, 0.0
    gc.disable()
    begin = time.perf_counter()
    while upcoming < len(requests) or asking:
        now = time.perf_counter() - begin
        while upcoming < len(requests) and arrivals[upcoming] <= now:
            connection = idle.pop() if idle else opened(int(port), selector)
            asking[connection], received[connection] = upcoming, b""
            connection.sendall(requests[upcoming])
            late = max(late, time.perf_counter() - begin - arrivals[upcoming])
            upcoming += 1
        wait = max(arrivals[upcoming] - (time.perf_counter() - begin), 0.0) if upcoming < len(requests) else 120.0
        ready = selector.select(wait)
        if not ready and upcoming == len(requests):
            raise SystemExit("no answer for 120 seconds")
        for key, _ in ready:
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 16)
            if not data and connection in asking:
                raise SystemExit("the server closed a connection")
            if not data:  # it was idle for too long and the server closed it
                idle.remove(connection)
                selector.unregister(connection)
                continue
            received[connection] += data
            if body_of(received[connection]) is not None:
                number = asking.pop(connection)
                latencies[number] = time.perf_counter() - begin - arrivals[number]
                idle.append(connection)
    print(json.dumps({"seconds": time.perf_counter() - begin, "latencies": latencies, "late": late}))


def opened(port: int, selector: selectors.BaseSelector) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    selector.register(connection, selectors.EVENT_READ)
    return connection


if __name__ == "__main__":
    main()
