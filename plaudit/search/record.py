"""The run directory of a search: every question's tree as a line, and a summary.

runs/<name>/  recipe.toml  results.jsonl  summary.json  events.jsonl  lock, of `method = "auto"` also choice.json

A question is written when it is finished, in a single write. A resumed run searches only missing questions: those that
failed or were interrupted are searched again.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plaudit.config import differences, to_toml
from plaudit.config.search import SearchRecipe, parse_search
from plaudit.errors import RunError, StorageError
from plaudit.events import EventLog
from plaudit.output import written
from plaudit.search.pilot import Chosen
from plaudit.search.runner import Outcome
from plaudit.search.tree.costs import totals
from plaudit.search.tree.tree import Node
from plaudit.train.run.run_lock import locked

# Keys that do not affect results; a resumed run may change them.
MAY_CHANGE = (
    "concurrent", "lanes", "processes", "threads", "data.limit", "engine", "prm.url", "prm.key_env", "prm.timeout",
    "prm.concurrency", "orm.url", "orm.key_env", "orm.timeout", "orm.concurrency", "model.device",
)  # fmt: skip
NO_ANSWER = "no answer"  # the status of a question whose paths all failed
TREES_SHOWN = 12  # trees copied to the event log, for the report


class Record:
    """Holds the directory's lock while used as a context manager."""

    def __init__(self, directory: Path, recipe: SearchRecipe, *, resume: bool = False, fresh: bool = False) -> None:
        self.directory = directory
        self.recipe = recipe
        self.resume = resume
        self.fresh = fresh
        self.results = directory / "results.jsonl"
        self.choice: dict[str, Any] | None = None
        self.done: dict[int, dict[str, Any]] = {}
        self.events: EventLog
        self._shown = 0

    def __enter__(self) -> Self:
        self._lock = locked(self.directory)
        try:
            self._prepare()
            self._file = os.open(self.results, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except BaseException:
            os.close(self._lock)
            raise
        self.events = EventLog(self.directory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.events.close()
        os.close(self._file)
        os.close(self._lock)

    def chose(self, choice: Chosen) -> None:
        """Records the choice of `method = "auto"` for resumed runs, with the pilot's questions as results."""
        self.choice = choice.figures()
        with written(self.directory / "choice.json") as file:
            file.write(json.dumps(self.choice, indent=2) + "\n")
        for outcome in choice.kept:
            self.add(result(outcome))

    def add(self, line: dict[str, Any]) -> None:
        """A finished question, from `result`."""
        self.done[line["index"]] = {key: value for key, value in line.items() if key != "nodes"}
        data = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
        try:
            count = os.write(self._file, data)
        except OSError as error:
            raise StorageError(
                f"cannot write {self.results}: {error.strerror}; free some space and --resume"
            ) from error
        if count != len(data):
            raise StorageError(f"cannot write {self.results}: the disk is full; free some space and --resume")
        if self._shown < TREES_SHOWN:
            self._shown += 1
            self.events.write("sample", step=line["index"], **line)

    def summarise(self, seconds: float, phases: Mapping[str, float], undecided: int = 0) -> dict[str, Any]:
        """Summarises the whole run; also written to summary.json and the event log. `phases` and `undecided` (answers
        that could not be compared) are of this part. `programme_share`: the share of time spent on integer programs and
        clustering."""
        search = self.recipe.search
        method = search.method if self.choice is None else self.choice["method"]
        figures = {"method": method, "width": search.width, **summary(self.done.values())}
        share = (figures.get("solver_seconds", 0.0) + figures.get("cluster_seconds", 0.0)) / max(seconds, 1e-9)
        figures |= {"seconds": round(seconds, 3), "programme_share": round(share, 4)}
        figures["phases"] = {name: round(spent, 3) for name, spent in phases.items()}
        if self.choice is not None:
            figures["choice"] = self.choice
        if undecided:
            figures["undecided"] = undecided
        with written(self.directory / "summary.json") as file:
            file.write(json.dumps(figures, indent=2) + "\n")
        plain = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self.events.metric(plain, step=len(self.done))
        self.events.note("search", **figures)
        return figures

    def _prepare(self) -> None:
        stored = self.directory / "recipe.toml"
        begun = self.results.exists() and self.results.stat().st_size > 0
        if self.fresh or not begun:
            written_whole = [self.directory / name for name in ("summary.json", "choice.json")]
            for path in (stored, self.results, *written_whole, *self.directory.glob("events*.jsonl")):
                path.unlink(missing_ok=True)
        elif not self.resume:
            raise RunError(
                f"{self.directory} already has a search: --resume continues it, --fresh starts over, "
                "--out sets another directory"
            )
        else:
            before = parse_search(tomllib.loads(stored.read_text()), str(stored))
            for key, (old, new) in differences(before, self.recipe, MAY_CHANGE).items():
                raise RunError(
                    f"cannot resume {self.directory}: it was started with {key} = {old!r}, but the recipe has "
                    f"{new!r}; restore the value, or use --fresh"
                )
            self._keep_complete()
            if (chosen := self.directory / "choice.json").is_file():
                self.choice = json.loads(chosen.read_text())
        with written(stored) as file:
            file.write(to_toml(self.recipe))

    def _keep_complete(self) -> None:
        with written(self.results) as file:
            for line in read_results(self.results):
                if line["stopped"].startswith(("failed", "interrupted")) or line["index"] in self.done:
                    continue
                self.done[line["index"]] = {key: value for key, value in line.items() if key != "nodes"}
                file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_results(path: Path) -> Iterator[dict[str, Any]]:
    """The questions of a results file; an incomplete last line of a killed run is skipped."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def result(outcome: Outcome) -> dict[str, Any]:
    """One question as a line of results.jsonl."""
    question, costs = outcome.question, outcome.driver.costs.figures()
    costs = {name: round(value, 6) if isinstance(value, float) else value for name, value in costs.items()}
    return {
        "index": question.index,
        "prompt": question.text,
        "truth": question.truth,
        "answer": None if outcome.answer is None else outcome.answer.text,
        "right": outcome.right,
        "stopped": outcome.stopped,
        "answers": [{"text": a.text, "weight": a.weight, "node": a.node} for a in outcome.answers],
        "costs": costs,
        "nodes": [_node(node) for node in outcome.tree.nodes],
    }


def _node(node: Node) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": node.id, "parent": node.parent, "text": node.text, "tokens": len(node.tokens), "state": node.state,
        "score": node.score, "value": node.value, "round": node.round,
    }  # fmt: skip
    for name in ("cluster", "error"):
        if getattr(node, name) is not None:
            fields[name] = getattr(node, name)
    if node.twin != node.id:
        fields["twin"] = node.twin
    return fields


def summary(lines: Any) -> dict[str, Any]:
    """Totals over questions: sums of their costs, and maxima of peaks. `no_answer`: for each reason, the number of
    questions without an answer mostly because of it."""
    ordered = sorted(lines, key=lambda line: line["index"])
    judged = [line["right"] for line in ordered if line["right"] is not None]
    spent = totals(line["costs"] for line in ordered)
    figures: dict[str, Any] = {
        "questions": len(ordered),
        "answered": sum(line["answer"] is not None for line in ordered),
        "failed": sum(line["stopped"].startswith("failed") for line in ordered),
    }
    if judged and figures["answered"]:  # without any answer accuracy is undefined
        accuracy = sum(judged) / len(judged)
        figures |= {"accuracy": accuracy, "accuracy_se": math.sqrt(accuracy * (1 - accuracy) / len(judged))}
    names = {"generated": "generated_tokens", "solver": "solver_seconds", "clustering": "cluster_seconds"}
    for name, value in spent.items():
        if name != "seconds":
            figures[names.get(name, name)] = value
    none = Counter(
        reason for kind, _, reason in (line["stopped"].partition(": ") for line in ordered) if kind == NO_ANSWER
    )
    if none:
        figures["no_answer"] = dict(none.most_common())
    # The kind of budget matters, since the user can change it; the text of a failure belongs to a single question.
    reasons = (line["stopped"] for line in ordered)
    short = (reason if reason.startswith("budget") else reason.partition(":")[0] for reason in reasons)
    return figures | {"stopped": dict(Counter(short))}
