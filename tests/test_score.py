"""`plaudit score` as a user runs it: real processes, the embedded models, a real server."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from plaudit.client.client import RewardClient
from plaudit.client.in_process import InProcess
from plaudit.errors import ConfigError, DataError, RewardUnavailable, StorageError, VersionChanged
from plaudit.records import Item, ItemError, Score, StepScores
from plaudit.reward import load_reward
from plaudit.score import Tally, score, scored_lines
from plaudit.train.data.rows import Row
from tests.command import plaudit_here
from tests.forked import run_forked
from tests.serve.process import free_port
from tests.serve.scripted import Answer, Asked, Scripted, right

ROWS: list[dict[str, Any]] = [
    {"prompt": "3+4+5=", "response": "3+4=7;7+5=12;#12", "id": 7},
    {"prompt": "3+4+5=", "responses": ["3+4=7;7+5=12;#12", "", ["3+4=9;", "9+5=14;", "#14"]]},
    {"text": "3+4+5=3+4=7;7+5=12;#12<eos>"},  # rendered: it includes the end token
    {"tokens": [1, 12, 14], "score": "an older one"},
]


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked("score", *arguments)


def options(**overrides: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = dict.fromkeys(("model", "api_key", "out", "truncate"))
    return {**defaults, "urls": [], "steps": False, "batch": 256, **overrides}


def test_file_is_scored_in_process_and_failed_items_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "scored.jsonl"
    result = command(str(write(tmp_path / "rows.jsonl", ROWS)), "--model", "sums-steps", "--steps", "--out", str(out))
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    lines = read(out.read_text())
    alone, group, text, tokens = lines
    local = load_reward("sums-steps").score([Item(prompt="3+4+5=", response="3+4=7;7+5=12;#12")])[0]
    assert isinstance(local, StepScores)
    assert alone == {**ROWS[0], "score": pytest.approx(local.aggregate), "steps": pytest.approx(local.values)}
    assert group["scores"] == [pytest.approx(local.aggregate), None, pytest.approx(group["steps"][2][-1])]
    assert [None if steps is None else len(steps) for steps in group["steps"]] == [3, None, 3]
    assert group["errors"] == [None, {"type": "no_steps", "message": group["errors"][1]["message"]}, None]
    assert text["score"] == pytest.approx(local.aggregate, abs=1e-5)
    assert (tokens["error"]["type"], "score" in tokens) == ("no_steps", False)
    assert result.stderr == f"plaudit: 4 responses scored by version {local.version}; 2 failed: 2 no_steps\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "scored.jsonl"]


def test_invalid_row_is_a_one_line_error_with_exit_code_2(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [ROWS[0], {"prompt": "1+2="}])
    with Scripted() as scripted:
        result = plaudit_here("score", str(rows), "--url", scripted.url, "--out", str(tmp_path / "out.jsonl"))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("plaudit: rows.jsonl:2: an Item with a prompt needs a response")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [rows]


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with Scripted() as scripted:
        yield scripted


def numbers(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "response": str(i), "id": i} for i in range(count)]


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_output_keeps_the_order_of_lines_for_every_batch_size(
    scripted: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: int
) -> None:
    rows = write(tmp_path / "rows.jsonl", numbers(50))
    tally = score(rows, **options(urls=[scripted.url], model="sums", batch=batch))
    assert read(capsys.readouterr().out) == [{**row, "score": float(row["id"])} for row in numbers(50)]
    assert (tally.scored, tally.failed.total(), tally.version) == (50, 0, "0-a")
    assert {request.body["model"] for request in scripted.asked} == {"sums"}
    assert sum(request.responses for request in scripted.asked) == 50


def test_parquet_is_read_and_null_fields_are_ignored(scripted: Scripted, tmp_path: Path) -> None:
    rows = [{"prompt": "p", "response": "1", "responses": None}, {"prompt": "p", "responses": ["2", "3"]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    out = tmp_path / "out.jsonl"
    tally = score(tmp_path / "rows.parquet", **options(urls=[scripted.url], out=out))
    one, two = read(out.read_text())
    assert (one["score"], two["scores"], tally.scored) == (1.0, [2.0, 3.0], 3)


class Endless:
    """An endless iterator of rows that counts the rows read."""

    taken = 0

    def __iter__(self) -> Iterator[Row]:
        while True:
            self.taken += 1
            yield Row({"prompt": "p", "response": "r"}, f"row {self.taken}")


class Ones:
    def score(self, items: Sequence[Item]) -> list[Score | StepScores]:
        return [
            Score(error=ItemError("odd", "")) if item.truth else Score(1.0, attributes={"help": 2.0}) for item in items
        ]

    def close(self) -> None:
        pass


def test_rows_are_streamed() -> None:
    rows = Endless()
    with RewardClient(transport=InProcess(Ones())) as client:
        lines = scored_lines(rows, client, Tally(), steps=False, truncate=None, batch=10)
        for _ in range(200):
            assert json.loads(next(lines)) == {
                "prompt": "p", "response": "r", "score": 1.0, "attributes": {"help": 2.0},
            }  # fmt: skip
        lines.close()  # type: ignore[attr-defined]
    assert rows.taken <= 200 + 40


def test_failed_scoring_leaves_the_old_file(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", numbers(20))
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    with pytest.raises(ConfigError, match="the reward model is missing: set --model NAME_OR_DIR, or --url"):
        score(rows, **options(out=out))
    with pytest.raises(StorageError, match="does not exist"):
        score(rows, **options(urls=["http://127.0.0.1:1"], out=tmp_path / "none" / "out.jsonl"))
    with Scripted() as scripted:
        with pytest.raises(DataError, match="no data file at"):
            score(tmp_path / "none.jsonl", **options(urls=[scripted.url], out=out))
        scripted.script = lambda number, asked: Answer(right(asked, f"{number // 3}-a"))
        with pytest.raises(VersionChanged, match="serves version 1-a, but 0-a was requested"):
            score(rows, **options(urls=[scripted.url], out=out, batch=2))
    assert out.read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_unreachable_server_is_reported_at_once(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", numbers(3))
    url = f"http://127.0.0.1:{free_port()}"
    result = plaudit_here("score", str(rows), "--url", url, "--out", str(tmp_path / "out.jsonl"))
    assert result.returncode == 2
    assert re.fullmatch(
        rf"plaudit: no server answers at {url} \(.*\); start it with plaudit serve, or set --wait SECONDS .*\n",
        result.stderr,
    )
    assert list(tmp_path.iterdir()) == [rows]
    with Scripted() as available:  # one available server of two is enough
        assert score(rows, **options(urls=[url, available.url], out=tmp_path / "out.jsonl")).scored == 3


def test_wait_option_waits_for_a_starting_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(tmp_path / "rows.jsonl", numbers(3))
    port = free_port()
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(
            score, rows, **options(urls=[f"http://127.0.0.1:{port}"], out=tmp_path / "out.jsonl", wait=120.0)
        )
        messages = ""
        deadline = time.monotonic() + 60
        while "waiting for it for 120 s" not in messages and time.monotonic() < deadline:
            messages += capsys.readouterr().err
            time.sleep(0.05)
        assert f"no server answers at http://127.0.0.1:{port}" in messages
        with Scripted(port=port):
            assert scoring.result(120).scored == 3


def test_outage_is_reported_when_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first batch is scored; for the second one the server answers 503 three times."""

    def script(number: int, asked: Asked) -> Answer:
        return Answer(b"{}", 503) if 1 <= number <= 3 else Answer(right(asked))

    rows = write(tmp_path / "rows.jsonl", numbers(4))
    with Scripted(script) as scripted:
        assert score(rows, **options(urls=[scripted.url], out=tmp_path / "out.jsonl", batch=2)).scored == 4
        messages = capsys.readouterr().err
    assert re.fullmatch(rf"plaudit: {scripted.url} answered 503; retrying, for at most \d+ s\n", messages)


def test_lost_server_is_an_error_and_writes_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit.score.SERVER_SECONDS", 0.5)
    rows = write(tmp_path / "rows.jsonl", numbers(3))
    with (
        Scripted(lambda _, __: Answer(b"{}", 503)) as scripted,
        pytest.raises(RewardUnavailable, match="no scores from"),
    ):
        score(rows, **options(urls=[scripted.url], out=tmp_path / "out.jsonl"))
    assert list(tmp_path.iterdir()) == [rows]
