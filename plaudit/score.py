"""Scores a file of responses and writes the lines with their scores: implements `plaudit score`."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from plaudit.client.client import CONNECT_SECONDS, RewardClient, Side
from plaudit.client.in_process import InProcess
from plaudit.client.items import items_of
from plaudit.errors import ConfigError, DataError, RequestError, RewardUnavailable, one_line
from plaudit.output import check_writable, written
from plaudit.records import Item, Score, StepScores
from plaudit.train.data.rows import Row, stream_rows

Result = Score | StepScores
AHEAD = 2  # batches being scored while the lines of an earlier one are written
SERVER_SECONDS = 600.0  # for one batch
OUTAGE_EVERY = 30.0  # interval between messages about a server that does not answer
LOOK_SECONDS = 0.5


@dataclass(slots=True)
class Tally:
    scored: int = 0
    version: str = ""
    failed: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        summary = f"{self.scored} responses scored by version {self.version or 'unknown'}"
        failed = ", ".join(f"{count} {type}" for type, count in self.failed.most_common())
        return f"{summary}; {self.failed.total()} failed: {failed}" if failed else summary


@dataclass(frozen=True, slots=True)
class _Line:
    row: Row
    items: list[Item]


def score(
    file: Path, *, model: str | None, urls: Sequence[str], api_key: str | None, out: Path | None, steps: bool,
    truncate: Side | None, batch: int, wait: float = 0.0,
) -> Tally:  # fmt: skip
    """Scored lines are written to `out`, or to standard output. Memory use is a few batches, however long the file is.
    Waits up to `wait` seconds for a server to start; a server that fails later is retried, with a message."""
    if out is not None:
        check_writable(out)
    tally = Tally()
    with ExitStack() as stack:
        client = stack.enter_context(open_client(model, urls, api_key, wait))
        sink = sys.stdout if out is None else stack.enter_context(written(out))
        bar = stack.enter_context(_progress())
        task = bar.add_task(file.name, total=None)
        for line in scored_lines(stream_rows(file), client, tally, steps=steps, truncate=truncate, batch=batch):
            sink.write(line)
            bar.update(task, completed=tally.scored + tally.failed.total())
    return tally


def scored_lines(
    rows: Iterable[Row], client: RewardClient, tally: Tally, *, steps: bool, truncate: Side | None, batch: int
) -> Iterator[str]:
    """The rows as JSON lines with their scores, all of one version; `tally` counts the results."""
    waiting: deque[tuple[list[_Line], Future[list[Result]]]] = deque()
    try:
        for lines in _batches(rows, batch):
            items = [item for line in lines for item in line.items]
            future = client.submit(items, steps=steps, truncate=truncate, version=tally.version or None)
            waiting.append((lines, future))
            # The version required of the others is known after the first batch.
            while waiting and (not tally.version or len(waiting) > AHEAD):
                yield from _finished(*waiting.popleft(), tally)
        while waiting:
            yield from _finished(*waiting.popleft(), tally)
    finally:
        for _, future in waiting:
            future.cancel()


def _batches(rows: Iterable[Row], size: int) -> Iterator[list[_Line]]:
    """Batches of lines with at least `size` responses."""
    lines: list[_Line] = []
    count = 0
    for row in rows:
        try:
            items = items_of(row.fields)
        except RequestError as error:
            raise DataError(f"{row.origin}: {error}") from None
        lines.append(_Line(row, items))
        count += len(items)
        if count >= size:
            yield lines
            lines, count = [], 0
    if lines:
        yield lines


def _finished(lines: Sequence[_Line], future: Future[list[Result]], tally: Tally) -> Iterator[str]:
    remaining = iter(future.result())
    for line in lines:
        results = [next(remaining) for _ in line.items]
        for result in results:
            tally.version = tally.version or result.version
            if result.error is None:
                tally.scored += 1
            else:
                tally.failed[result.error.type] += 1
        yield _written_line(line.row, results)


def _written_line(row: Row, results: Sequence[Result]) -> str:
    """The row's fields, without the results of an earlier scoring."""
    fields = {k: v for k, v in row.fields.items() if k not in ("score", "scores", "error", "errors")}
    per_result = [_result_fields(result) for result in results]
    if row.fields.get("responses") is None:
        fields |= per_result[0]
    else:
        # A field that only some responses have is null for the others.
        names = dict.fromkeys(["score", *(name for each in per_result for name in each)])
        plural = {"score": "scores", "error": "errors"}
        fields |= {plural.get(name, name): [each.get(name) for each in per_result] for name in names}
    return json.dumps(fields, ensure_ascii=False, default=str) + "\n"


def _result_fields(result: Result) -> dict[str, Any]:
    if result.error is not None:
        return {"error": asdict(result.error)}
    fields: dict[str, Any] = {}
    if isinstance(result, StepScores):
        fields |= {"score": result.aggregate, "steps": list(result.values)}
    else:
        fields["score"] = result.value
        if result.attributes:
            fields["attributes"] = dict(result.attributes)
    if result.truncated:
        fields["truncated"] = True
    return fields


@contextmanager
def open_client(model: str | None, urls: Sequence[str], api_key: str | None, wait: float) -> Iterator[RewardClient]:
    """A client of servers, or of a model in this process."""
    if urls:
        with RewardClient(
            urls, model=model, api_key=api_key, timeout=SERVER_SECONDS, on_retry=_OutageReport().tell
        ) as client:  # fmt: skip
            _reach(client.urls, wait)
            yield client
        return
    if model is None:
        raise ConfigError("the reward model is missing: set --model NAME_OR_DIR, or --url URL of a server")
    from plaudit.reward import load_reward

    reward = load_reward(model)
    try:
        with RewardClient("http://in-process", timeout=None, transport=InProcess(reward)) as client:
            yield client
    finally:
        reward.close()


class _OutageReport:
    """Prints that a server is being retried: at once, and then at intervals."""

    def __init__(self) -> None:
        self._last_notice = -OUTAGE_EVERY

    def tell(self, cause: str, seconds: float | None) -> None:
        now = time.monotonic()
        if now - self._last_notice >= OUTAGE_EVERY:
            self._last_notice = now
            limit = "" if seconds is None else f", for at most {seconds:.0f} s"
            print(f"plaudit: {cause}; retrying{limit}", file=sys.stderr, flush=True)


def _reach(urls: Sequence[str], wait: float) -> None:
    """Waits until one of the servers accepts a connection. A wrong address is reported at once, before anything is
    scored, instead of after all retries."""
    until = time.monotonic() + wait
    notified = False
    while (refusals := _unreachable(urls)) and len(refusals) == len(urls):
        if time.monotonic() >= until:
            raise RewardUnavailable(
                f"{'; '.join(refusals)}; start it with plaudit serve, or set --wait SECONDS if it is starting"
            )
        if not notified:
            print(f"plaudit: {'; '.join(refusals)}; waiting for it for {wait:g} s", file=sys.stderr, flush=True)
            notified = True
        time.sleep(min(LOOK_SECONDS, max(0.0, until - time.monotonic())))


def _unreachable(urls: Sequence[str]) -> list[str]:
    """The errors of the servers that accept no connection; replies are not checked here."""
    refusals = []
    with httpx.Client(trust_env=False, timeout=CONNECT_SECONDS) as http:
        for url in urls:
            try:
                http.get(f"{url}/health/live")
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                refusals.append(f"no server answers at {url} ({one_line(error) or type(error).__name__})")
            except httpx.HTTPError:
                pass  # it accepted the connection
    return refusals


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} responses"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
