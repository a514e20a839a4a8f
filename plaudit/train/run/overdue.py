"""Warns while a run waits for a slow server: a stopped process accepts connections and does not respond.

After some time without a response the server's health is checked, which a busy server reports within a second. The
recipe sets the timeout.
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


def ignore_warning(_: str) -> None:
    """Ignore a warning."""


@contextmanager
def overdue(name: str, urls: Sequence[str], patience: float, key: str, warn: Warn) -> Iterator[None]:
    """Warn if the block takes long. `name`: the server; `key`: the recipe key of `patience`. `warn` may be called from
    another thread."""
    started = time.monotonic()
    warned, over = threading.Event(), threading.Event()

    def warn_if_slow() -> None:
        silent = [url for url in urls if not _is_alive(url)]
        if silent:
            what = f"{name} at {', '.join(silent)} does not respond, nor does its /health/live: it is stopped or down"
        else:
            what = f"{name} at {', '.join(urls)} is alive and has not responded yet: it is overloaded"
        if not over.is_set():
            warned.set()
            warn(f"{what}; waited {time.monotonic() - started:.0f} s of {patience:g} s ({key})")

    timer = threading.Timer(NOTICE_SECONDS, warn_if_slow)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        over.set()
        timer.cancel()
    if warned.is_set():
        warn(f"{name} responded after {time.monotonic() - started:.0f} s")


def _is_alive(url: str) -> bool:
    """Whether the server responds at all, with any status."""
    try:
        httpx.get(f"{url.rstrip('/')}/health/live", timeout=PROBE_SECONDS, trust_env=False)
    except httpx.HTTPError:
        return False
    return True
