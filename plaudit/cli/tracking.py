"""`plaudit train --track`: a separate process sends the run's metrics, so a tracker can neither slow nor end the
run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

PIPED = "PLAUDIT_TRACKED"
LAST_SECONDS = 60.0  # for metrics not sent yet when the run is over


@contextmanager
def tracked(run: Path, tracker: str | None) -> Iterator[Callable[[], None]]:
    """Yields a function to call once the run has created its event log."""
    sender: list[subprocess.Popen[bytes]] = []

    def begun() -> None:
        if tracker is not None:
            words = [sys.executable, "-m", "plaudit", "report", str(run), "--to", tracker, "--follow"]
            # A separate session: Ctrl-C ends the run, and the remaining metrics are still sent.
            process = subprocess.Popen(
                words, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                env={**os.environ, PIPED: "1"},
            )  # fmt: skip
            sender.append(process)

    try:
        yield begun
    finally:
        for process in sender:
            _finish(process, run, tracker)


def run_is_over() -> Callable[[], bool]:
    """For the tracking process: whether the run has closed our standard input. A failed run writes no `end`."""
    over = threading.Event()
    if PIPED in os.environ:

        def wait() -> None:
            sys.stdin.buffer.read()
            over.set()

        threading.Thread(target=wait, daemon=True).start()
    return over.is_set


def _finish(process: subprocess.Popen[bytes], run: Path, tracker: str | None) -> None:
    again = f"`plaudit report {run} --to {tracker}` sends the whole run"
    if process.stdin is not None:
        process.stdin.close()
    try:
        code = process.wait(LAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        typer.echo(f"warning: {tracker} had not received all metrics within {LAST_SECONDS:g} s; {again}", err=True)
    else:
        if code:
            typer.echo(f"warning: {tracker} did not receive all metrics; {again}", err=True)
