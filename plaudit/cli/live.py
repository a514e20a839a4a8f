"""`plaudit train --live`: shows the run on a page in the browser."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


@contextmanager
def shown_live(run: Path, enabled: bool, ranks: int = 1) -> Iterator[Callable[[], None]]:
    """Yields a function to call once the run has created its event log."""
    pages = []

    def begun() -> None:
        if enabled:
            from plaudit.report.served.live_page import LivePage

            page = LivePage(run, OwnRun(ranks))
            pages.append(page)
            _open(page.url, page.port)

    try:
        yield begun
    finally:
        for page in pages:
            page.close()


class OwnRun:
    """The run of this process, as the page controls it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def state(self) -> str:
        from plaudit.train.run.pause import PAUSE
        from plaudit.train.run.signals import stop_requested

        if stop_requested():
            return "stopping"
        return ("paused" if PAUSE.waiting else "pausing") if PAUSE.requested.is_set() else "running"

    def act(self, what: str) -> str | None:
        from plaudit.train.run.pause import PAUSE
        from plaudit.train.run.signals import request_stop, stop_requested

        if what == "stop":
            # A second signal would end the process without saving.
            return (
                None if stop_requested() or request_stop() else "the run is not training now: there is nothing to save"
            )
        if what == "pause" and self.ranks > 1:
            return f"a run of {self.ranks} ranks cannot pause; stop saves a checkpoint, and --resume continues"
        (PAUSE.requested.set if what == "pause" else PAUSE.requested.clear)()
        return None


def _open(url: str, port: int) -> None:
    import webbrowser

    display = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    opened = display and webbrowser.open(url)
    hint = "" if opened else f" (from another machine: ssh -L {port}:127.0.0.1:{port} HOST)"
    typer.echo(f"live page: {url}{hint}", err=True)
