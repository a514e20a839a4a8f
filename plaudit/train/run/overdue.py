"""Tells a person that a server is waited for, while it is waited for: a stopped one takes connections and says nothing.

After a while without an answer the server is asked whether it lives, which one at work says within a second. How long
the run then waits its recipe says, not this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx

NOTICE_SECONDS = 15.0
PROBE_SECONDS = 5.0

Warn = Callable[[str], None]


def nobody(_: str) -> None:
    """Where there is nobody to warn."""


@contextmanager
def overdue(name: str, urls: Sequence[str], patience: float, key: str, warn: Warn) -> Iterator[None]:
    """`name`: what is waited for; `key`: the recipe's, of `patience`. `warn` may be called from another thread."""
    begun = time.monotonic()
    warned, over = threading.Event(), threading.Event()

    def tell() -> None:
        silent = [url for url in urls if not _lives(url)]
        if silent:
            what = f"{name} at {', '.join(silent)} does not answer, nor does its /health/live: it is stopped or away"
        else:
            what = f"{name} at {', '.join(urls)} lives and has not answered yet: it has more to do than it can"
        if not over.is_set():
            warned.set()
            warn(f"{what}; waited for {time.monotonic() - begun:.0f} s so far, {patience:g} at most ({key})")

    timer = threading.Timer(NOTICE_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        over.set()
        timer.cancel()
    if warned.is_set():
        warn(f"{name} has answered after {time.monotonic() - begun:.0f} s")


def _lives(url: str) -> bool:
    """Any answer is a sign of life."""
    try:
        httpx.get(f"{url.rstrip('/')}/health/live", timeout=PROBE_SECONDS, trust_env=False)
    except httpx.HTTPError:
        return False
    return True
