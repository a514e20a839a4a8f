"""Follows a run of another process through its event log: its events as they are written, and a live view."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from plaudit.events import CHANGED, END, RESUME, START, WARNING, Event
from plaudit.report.history import HELD_OUT
from plaudit.report.live import LiveView
from plaudit.report.source import event_log


class Tail:
    """The events of a log, until the run writes its `end` note, its process exits, or `over` returns true."""

    def __init__(self, run: Path, poll_seconds: float = 0.25, over: Callable[[], bool] = lambda: False) -> None:
        self.over = over
        self.path = event_log(run)
        self.poll_seconds = poll_seconds
        self._writer: int | None = None
        self._ended = False

    def __iter__(self) -> Iterator[Event]:
        place = 0
        while True:
            over = self._ended or self.over() or (self._writer is not None and not _runs(self._writer))
            before = place
            for end, event in _complete_lines(self.path, before):
                place = end
                if event["kind"] == "note" and event["text"] == START:
                    self._writer, self._ended = int(event["pid"]), False
                elif event["kind"] == "note" and event["text"] == END:
                    self._ended = True
                yield event
            # Checked before reading: everything the process wrote before it exited is then read.
            if over and place == before:
                return
            time.sleep(self.poll_seconds)


class Following:
    """Shows the run until it is over, or the user presses Ctrl-C."""

    def __init__(self, run: Path, console: Console | None = None, poll_seconds: float = 0.25) -> None:
        self.tail = Tail(run, poll_seconds)
        self._begun = self._now = 0.0
        # The speed shown is that of the run, not of reading its log.
        self.view = LiveView(run.resolve().name, console, clock=lambda: self._now)

    def show(self) -> None:
        with self.view.bar(0, 0):
            try:
                for event in self.tail:
                    self._take(event)
            except KeyboardInterrupt:
                pass  # Ctrl-C closes the view; the run continues
        self.view.close()

    def _take(self, event: Event) -> None:
        kind, step = event["kind"], event.get("step", 0)
        self._now = self._begun + float(event["t"])
        if kind == "note":
            self._note(event, step)
        elif kind == "plan" and isinstance(event.get("steps"), int):
            self.view.expect(step, event["steps"])
        elif kind == "metric":
            values = {name: float(value) for name, value in event["values"].items()}
            figures = {name.removeprefix(HELD_OUT): v for name, v in values.items() if name.startswith(HELD_OUT)}
            rest = {name: value for name, value in values.items() if not name.startswith(HELD_OUT)}
            if rest:
                self.view.step(step, rest)
            if figures:
                self.view.figures(step, figures)

    def _note(self, event: Event, step: int) -> None:
        if event["text"] == START:
            self._begun = float(event["wall"])
        elif event["text"] == RESUME:
            self.view.rewind(step)
        elif event["text"] == CHANGED:
            self.view.warn(f"resumed with {event['key']} = {event['new']} in place of {event['old']}")
        elif event["text"] == WARNING:
            self.view.warn(event["message"])


def _complete_lines(path: Path, place: int) -> list[tuple[int, Event]]:
    """The events from this offset of the file, each with the offset where it ends.

    An incomplete line is left for the next call: if its writer was killed, the next writer truncates it and writes over
    it.
    """
    events = []
    with path.open("rb") as file:
        file.seek(place)
        for line in file:
            if line.endswith(b"\n"):
                place += len(line)
                events.append((place, json.loads(line)))
    return events


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process belongs to another user
        return True
    try:
        # A zombie (state Z) has exited, but its parent has not waited for it.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # a system without /proc
        return True
