"""Exchanges lines with a child process over two pipes, in bounded time and memory. Standard library only."""

from __future__ import annotations

import os
import selectors
import time


def exchange_lines(
    sink: int, source: int, request: bytes, count: int, seconds: float, longest: int | None = None
) -> tuple[list[bytes], bool]:
    """Writes `request` to one pipe and reads `count` lines from the other, each within `seconds` of the previous one.
    Fewer are returned if the other end closed or a line is longer than `longest`, or, together with True, on a
    timeout."""
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
                    if longest is not None and len(max([*whole, reply], key=len)) > longest:
                        return lines, False
                    if whole:
                        lines += whole
                        deadline = time.monotonic() + seconds
                else:
                    return lines, False
    return lines, False
