import json
import math
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from plaudit.errors import StorageError
from plaudit.events import RESUME, EventLog, read_events, read_lines


def test_every_event_is_one_json_line_with_time_and_step(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.metric({"loss": 1.5}, step=1, version=4)
    with log.span("generate", step=1):
        pass
    log.write("memory", phase="train", bytes={"weights": 10})
    log.write("sample", step=1, prompt="7+8=", response="line\nbreak \ud800")
    log.close()
    lines = (tmp_path / "events.jsonl").read_bytes().decode().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["kind"] for event in events] == ["note", "metric", "span", "memory", "sample"]
    assert events[0]["text"] == "start"
    assert events[1] | {"t": 0} == {"t": 0, "kind": "metric", "step": 1, "version": 4, "values": {"loss": 1.5}}
    assert events[2]["seconds"] >= 0
    assert all(a["t"] <= b["t"] for a, b in pairwise(events))


def test_nan_and_infinity_round_trip(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.metric({"a": math.nan, "b": -math.inf})
    log.close()
    values = list(read_lines(log.path))[-1]["values"]
    assert math.isnan(float(values["a"]))
    assert float(values["b"]) == -math.inf


def test_torn_last_line_is_skipped_and_terminated_on_reopen(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.metric({"loss": 1.0}, step=1)
    log.close()
    with log.path.open("ab") as file:
        file.write(b'{"t": 3, "kind": "met')
    assert [event["kind"] for event in read_lines(log.path)] == ["note", "metric"]
    again = EventLog(tmp_path)
    again.metric({"loss": 0.5}, step=2)
    again.close()
    assert [event["kind"] for event in read_lines(log.path)] == ["note", "metric", "note", "metric"]


def test_log_with_a_single_torn_line_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"x" * 200_000)
    log = EventLog(tmp_path)
    log.close()
    assert [event["text"] for event in read_lines(log.path)] == ["start"]


def test_resume_discards_later_events_of_the_killed_attempt(tmp_path: Path) -> None:
    first = EventLog(tmp_path)
    for step in range(1, 6):
        first.metric({"loss": 10.0 + step}, step=step)
    first.close()
    second = EventLog(tmp_path)
    second.note(RESUME, step=3)
    for step in (4, 5, 6):
        second.metric({"loss": 20.0 + step}, step=step)
    second.close()
    metrics = [(e["step"], e["values"]["loss"]) for e in read_events(tmp_path) if e["kind"] == "metric"]
    assert metrics == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0), (5, 25.0), (6, 26.0)]


def test_logs_of_several_processes_are_merged_by_time(tmp_path: Path) -> None:
    logs = [EventLog(tmp_path), EventLog(tmp_path, "rollout", 0), EventLog(tmp_path, "rollout", 1)]
    for turn in range(3):
        for log in logs:
            log.note(f"turn {turn}")
    for log in logs:
        log.close()
    assert {path.name for path in tmp_path.iterdir()} == {
        "events.jsonl", "events-rollout-0.jsonl", "events-rollout-1.jsonl",
    }  # fmt: skip
    turns = [event["text"] for event in read_events(tmp_path) if event["text"] != "start"]
    assert turns == sorted(turns)
    assert {event.get("rank") for event in read_events(tmp_path)} == {None, 0, 1}


def test_reader_sees_complete_lines_during_writes(tmp_path: Path) -> None:
    log = EventLog(tmp_path)

    def write() -> None:
        for step in range(200):
            log.metric({"loss": float(step)}, step=step)

    thread = threading.Thread(target=write)
    thread.start()
    steps: list[int] = []
    while len(steps) < 200:
        writing = thread.is_alive()
        steps = [event["step"] for event in read_lines(log.path) if event["kind"] == "metric"]
        assert steps == list(range(len(steps)))
        assert writing or len(steps) == 200
    thread.join()


def test_killed_writer_leaves_a_readable_log(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from plaudit.events import EventLog\n"
        "log = EventLog(Path(sys.argv[1])); print('up', flush=True); step = 0\n"
        "while True: step += 1; log.metric({'x': 1.0}, step=step)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    while os.path.getsize(tmp_path / "events.jsonl") < 50_000:  # noqa: PTH202
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    steps = [e["step"] for e in read_events(tmp_path) if e["kind"] == "metric"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 100


def test_full_disk_is_a_one_line_error_and_the_log_stays_valid(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path; from plaudit.events import EventLog\n"
        "from plaudit.errors import StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "log = EventLog(Path(sys.argv[1]))\n"
        "try:\n  while True: log.metric({'x': 1.0}, step=1)\n"
        "except StorageError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "cannot write" in result.stdout
    assert result.stdout.count("\n") == 1
    data = (tmp_path / "events.jsonl").read_bytes()
    assert data.endswith(b"\n")
    assert all(json.loads(line) for line in data.splitlines())


def test_writing_to_a_closed_log_raises(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.close()
    with pytest.raises(StorageError):
        log.metric({"x": 1.0})
