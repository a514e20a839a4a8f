"""One append-only event log per run. All code that shows, plots or forwards a run reads only this log.

Each line is one JSON object: `t` (seconds since the log was opened, monotonic), `kind`, then `step`, `version`, `role`,
`rank` where they apply, then the fields of the kind:

    metric  values: {name: number}              span    name, seconds
    memory  phase, bytes: {owner: count}, ...   sample  prompt, response, ...
    note    text, ...                           plan    task, algorithm, steps, clip_norm, memory: {phase: ...}
    proof   hashes: {name: hash}, chained (train/run/proof.py)

For a phase's memory, `bytes` are those at its peak, by owner; `start` and `end` are the differences at its start and
end, `taken` the device's own counters (start, end, peak), `capacity` the device's memory.

A line is written in one write, so a reader never sees a partial line, except the last line of a writer that was
killed; readers skip it and the next writer terminates it. A run resumed at step k writes a `resume` note: events that
an earlier, killed attempt logged for later steps are then void, and `read_events` omits them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from plaudit.errors import StorageError

Kind = Literal["metric", "span", "memory", "sample", "note", "plan", "proof"]
Event = dict[str, Any]

LOG = "events.jsonl"  # of the process that trains
START, RESUME, CHANGED, WARNING, END = "start", "resume", "changed", "warning", "end"
VERIFIED = "verified.json"  # beside the log: the last result of `plaudit verify`


class EventLog:
    """The writer: one per process and file."""

    def __init__(self, directory: Path, role: str = "main", rank: int = 0) -> None:
        self.path = directory / (LOG if role == "main" else f"events-{role}-{rank}.jsonl")
        self._common: Event = {} if role == "main" else {"role": role, "rank": rank}
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._end_torn_line()
        self._start = time.monotonic()
        self.note(START, wall=time.time(), pid=os.getpid())

    def write(self, kind: Kind, *, step: int | None = None, version: int | None = None, **fields: Any) -> None:
        event: Event = {"t": round(time.monotonic() - self._start, 6), "kind": kind, **self._common}
        if step is not None:
            event["step"] = step
        if version is not None:
            event["version"] = version
        line = json.dumps(finite({**event, **fields}), ensure_ascii=False, separators=(",", ":")) + "\n"
        data = line.encode("utf-8", errors="backslashreplace")
        try:
            written = os.write(self._file, data)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}; free some space and --resume") from error
        if written != len(data):
            self._end_torn_line()
            raise StorageError(f"cannot write {self.path}: the disk is full; free some space and --resume")

    def metric(self, values: Mapping[str, float], *, step: int | None = None, version: int | None = None) -> None:
        self.write("metric", step=step, version=version, values=dict(values))

    def note(self, text: str, *, step: int | None = None, **fields: Any) -> None:
        self.write("note", step=step, text=text, **fields)

    @contextmanager
    def span(self, name: str, *, step: int | None = None) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.write("span", step=step, name=name, seconds=round(time.monotonic() - begin, 6))

    def close(self) -> None:
        os.close(self._file)

    def _end_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            end = _last_newline(self._file, size)
            os.ftruncate(self._file, end)


def _last_newline(file: int, size: int) -> int:
    """The offset just after the last newline, reading backwards."""
    block = 1 << 16
    while size > 0:
        start = max(0, size - block)
        newline = os.pread(file, size - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        size = start
    return 0


def finite(value: Any) -> Any:
    """The value as a log stores it. JSON has no NaN or infinity: they are strings, which `float()` converts back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read_lines(path: Path) -> Iterator[Event]:
    """The complete events of one file, as written. Safe during the run and after it was killed."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and line.strip():
                yield json.loads(line)


def read_events(directory: Path) -> list[Event]:
    """The valid events of a run: all writers merged by time, without voided attempts."""
    events = [event for path in sorted(directory.glob("events*.jsonl")) for event in read_valid(path)]
    return sorted(events, key=lambda event: float(event["wall"]))


def read_valid(path: Path) -> list[Event]:
    """The valid events of one file, in its order, with the time of each as `wall`."""
    kept: list[Event] = []
    wall = 0.0
    for event in read_lines(path):
        if event["kind"] == "note" and event["text"] == START:
            wall = float(event["wall"])
        if event["kind"] == "note" and event["text"] == RESUME:
            kept = [old for old in kept if old.get("step", 0) <= event["step"]]
        kept.append({**event, "wall": wall + float(event["t"])})
    return kept
