"""Questions distributed over processes: the same trees as in one process, and runs that lose a process."""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from plaudit.config.search import SearchRecipe, load_search
from plaudit.errors import ConfigError, RunError
from plaudit.search import workers
from plaudit.search.record import Record, read_results
from plaudit.search.search import run_searches
from plaudit.search.summary import progress_bar
from plaudit.search.workers import SearchWorkers

FLAGS = {"data.limit": 8, "search.width": 4, "search.method": "rebase"}


def recipe(processes: int = 1, **flags: Any) -> SearchRecipe:
    return load_search(None, {**FLAGS, **flags}, [f"processes={processes}"])


def searched(directory: Path, settings: SearchRecipe, *, resume: bool = False) -> dict[str, Any]:
    [(_, figures)] = run_searches({directory: settings}, progress_bar, resume=resume)
    return figures


def trees(directory: Path) -> list[Any]:
    lines = sorted(read_results(directory / "results.jsonl"), key=lambda line: line["index"])
    return [(line["index"], line["answer"], [node["text"] for node in line["nodes"]]) for line in lines]


def test_trees_equal_those_of_one_process(tmp_path: Path) -> None:
    one, two = searched(tmp_path / "one", recipe()), searched(tmp_path / "two", recipe(2))
    assert trees(tmp_path / "one") == trees(tmp_path / "two")
    assert {key: one[key] for key in ("accuracy", "generated_tokens", "kv_tokens", "calls")} == {
        key: two[key] for key in ("accuracy", "generated_tokens", "kv_tokens", "calls")
    }
    assert two["phases"]["generate"] > 0


@pytest.mark.slow
def test_worker_processes_search_several_methods(tmp_path: Path) -> None:
    recipes = {tmp_path / method: recipe(2, **{"search.method": method}) for method in ("beam", "best-of-n")}
    figures = dict(run_searches(recipes, progress_bar))
    assert [figures[directory]["method"] for directory in recipes] == ["beam", "best-of-n"]
    assert all(each["questions"] == 8 for each in figures.values())


@pytest.mark.slow
def test_killed_process_ends_the_run_and_results_are_kept(tmp_path: Path) -> None:
    settings = recipe(2, **{"data.limit": 12})
    settings = settings.model_copy(update={"concurrent": 2})
    with Record(tmp_path / "run", settings) as record:
        pool = SearchWorkers([settings])
        try:
            questions = pool.questions()
            lines = pool.lines(questions)
            record.add(next(lines))
            os.kill(pool._workers[0].child.pid, signal.SIGKILL)
            with pytest.raises(RunError, match=r"search process 1 was ended by SIGKILL; --resume"):
                deque(map(record.add, lines), maxlen=0)
        finally:
            pool.close()
        assert 0 < len(record.done) < len(questions)
    figures = searched(tmp_path / "run", settings, resume=True)
    assert figures["questions"] == 12
    alone = searched(tmp_path / "alone", recipe(**{"data.limit": 12}))
    assert trees(tmp_path / "run") == trees(tmp_path / "alone")
    assert alone["accuracy"] == figures["accuracy"]


@pytest.mark.slow
def test_stopped_process_is_detected_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SILENCE_SECONDS", 15.0)
    pool = SearchWorkers([recipe(2)])
    try:
        os.kill(pool._workers[1].child.pid, signal.SIGSTOP)
        with pytest.raises(RunError, match="search process 2 sent no heartbeat and was killed"):
            list(pool.lines(pool.questions()))
    finally:
        pool.close()


@pytest.mark.slow
def test_error_of_a_worker_process_is_reported(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    tree = {"task": "search", "processes": 2, "model": {"path": "sums-policy"}, "data": {"path": str(questions)}}
    tables = {"search": {"method": "rebase"}, "prm": {"path": "sums"}}
    with pytest.raises(RunError, match=r"search process \d: .* is an outcome model"):
        SearchWorkers([SearchRecipe.model_validate({**tree, **tables})])


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"search": {"method": "auto"}}, "runs its pilot in one process: remove processes"),
        ({"engine": {"name": "openai", "url": "http://127.0.0.1:1"}}, "engine.url is a server: remove processes"),
    ],
)
def test_settings_unsupported_with_processes_are_rejected(tables: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        load_search(None, FLAGS, ["processes=2", *(f"{k}.{n}={v}" for k, t in tables.items() for n, v in t.items())])
