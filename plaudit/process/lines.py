"""Exchanges lines with a child process over two pipes, in bounded time and memory. Standard library only."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import Literal

Fault = Literal["", "late", "ended", "surplus"]


def exchange_lines(
    sink: int, source: int, request: bytes, count: int, seconds: float, longest: int | None = None
) -> tuple[list[bytes], Fault]:
    """Writes `request` to one pipe and reads `count` lines from the other, each within `seconds` of the previous one.
    Fewer are returned with the reason: the timeout, or the other end closed or wrote a line longer than `longest`. All
    of them and "surplus" are returned if more was written than requested."""
    unsent, rest, lines = memoryview(request), b"", list[bytes]()
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(source, select.POLLIN)
    if unsent:
        os.set_blocking(sink, False)
        poll.register(sink, select.POLLOUT)
    while len(lines) < count:
        left = deadline - time.monotonic()
        ready = poll.poll(1000 * left) if left > 0 else []
        if not ready:
            return lines, "late"
        for descriptor, _ in ready:
            if descriptor == sink:
                try:
                    unsent = unsent[os.write(sink, unsent) :]
                except BrokenPipeError:
                    return lines, "ended"
                if not unsent:
                    poll.unregister(sink)
            elif chunk := os.read(source, 1 << 16):
                *whole, rest = (rest + chunk).split(b"\n")
                if longest is not None and len(max([*whole, rest], key=len)) > longest:
                    return lines, "ended"
                if whole:
                    lines += whole
                    deadline = time.monotonic() + seconds
            else:
                return lines, "ended"
    return lines[:count], "surplus" if rest or len(lines) > count else ""


def exchange_untrusted(
    sink: int, source: int, requests: Sequence[bytes], seconds: float, longest: int | None = None
) -> tuple[list[bytes], Fault]:
    """The reply to each request of a process that may run anybody's code. Every request begins with a new nonce that
    its reply must begin with, so that no reply counts for another request. The first wrong or missing reply, or
    surplus output after the last, ends the exchange: that request and those after it have no reply, and the process
    must be ended."""
    nonces = [os.urandom(8).hex().encode() for _ in requests]
    sent = b"".join(b"%s %s\n" % pair for pair in zip(nonces, requests, strict=True))
    lines, fault = exchange_lines(sink, source, sent, len(requests), seconds, longest)
    replies: list[bytes] = []
    for nonce, line in zip(nonces, lines, strict=False):
        replied, _, reply = line.partition(b" ")
        if replied != nonce:
            return replies, "surplus"
        replies.append(reply)
    return replies[:-1] if fault == "surplus" else replies, fault


def has_output(source: int) -> bool:
    """Whether a process wrote without a request, or closed its end."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(0))
