"""`plaudit search` as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plaudit.errors import NoAnswer
from plaudit.search.record import read_results, summary
from plaudit.search.summary import refuse_empty
from tests.command import plaudit_here
from tests.forked import ForkedCommand, run_forked

ROOT = Path(__file__).parents[2]


def plaudit(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_forked(*arguments, cwd=cwd)


def test_search_prints_and_writes_its_summary(tmp_path: Path) -> None:
    flags = ["--world", "sums-hard", "--method", "ets", "--width", "4", "--questions", "3"]
    result = plaudit("search", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for name in ("accuracy", "KV tokens", "generated tokens", "calls", "seconds"):
        assert name in result.stdout
    figures = json.loads((tmp_path / "runs" / "search-ets" / "summary.json").read_text())
    assert f"{figures['kv_tokens']:,}" in result.stdout
    spent = figures["solver_seconds"] + figures["cluster_seconds"]
    assert figures["programme_share"] == pytest.approx(spent / figures["seconds"], abs=1e-3)
    assert f"integer programs and clustering take {figures['programme_share']:.1%} of the time" in result.stdout
    again = plaudit_here("search", *flags, cwd=tmp_path)
    assert again.returncode == 2
    assert "already has a search: --resume continues it" in again.stderr


def test_each_method_has_its_own_directory(tmp_path: Path) -> None:
    flags = ["--method", "rebase", "--method", "best-of-n", "--width", "4", "--questions", "2", "--out", "runs/both"]
    result = plaudit_here("search", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for method in ("rebase", "best-of-n"):
        assert f"{method}, width 4: 2 questions" in result.stdout
        assert len(list(read_results(tmp_path / "runs" / f"both-{method}" / "results.jsonl"))) == 2


def test_run_without_any_answer_is_an_error_with_the_reason(tmp_path: Path) -> None:
    flags = [
        "search",
        "--method",
        "best-of-n",
        "--width",
        "2",
        "--questions",
        "2",
        "--set",
        r"steps.answer=answer: (\d+)",
    ]
    result = plaudit_here(*flags, cwd=tmp_path)
    assert result.returncode == 2
    assert "accuracy" not in result.stdout
    assert "answered          0 of 2" in result.stdout
    expected = (
        r"no answer         2 of 2 questions, most paths for: ended without an answer that matches 'answer: (\\d+)'"
    )
    assert expected in result.stdout
    assert "no path of any question ended in an answer (best-of-n, 2 questions): ended without" in result.stderr
    assert result.stderr.count("\n") == 1
    figures = json.loads((tmp_path / "runs" / "search-best-of-n" / "summary.json").read_text())
    assert (figures["answered"], figures["questions"], "accuracy" in figures) == (0, 2, False)
    report = plaudit_here("report", "runs/search-best-of-n", cwd=tmp_path)
    assert (report.returncode, "no path of any question ended in an answer" in report.stdout) == (0, True)


def test_exhausted_budget_is_named_in_the_error() -> None:
    line = {"answer": None, "right": None, "stopped": "budget: kv_tokens", "costs": {"calls": 8}}
    lines = [{"index": index, **line} for index in (0, 1)]
    figures = {"method": "rebase", **summary(lines)}
    assert figures["stopped"] == {"budget: kv_tokens": 2}
    with pytest.raises(NoAnswer, match=r"budget: kv_tokens; raise budget\.kv_tokens; all paths are in"):
        refuse_empty({Path("runs/search-rebase"): figures})


def test_outcome_model_works_with_best_of_n_and_is_rejected_otherwise(tmp_path: Path) -> None:
    flags = ["search", "--width", "4", "--questions", "2", "--set", "prm.path=sums"]
    result = plaudit_here(*flags, "--method", "best-of-n", cwd=tmp_path)
    assert (result.returncode, "accuracy" in result.stdout) == (0, True), result.stderr
    both = plaudit_here(*flags, "--method", "best-of-n", "--method", "beam", "--out", "both", cwd=tmp_path)
    assert both.returncode == 2
    assert "search.method = 'beam' chooses among steps, and sums is an outcome model" in both.stderr
    assert not (tmp_path / "both-best-of-n" / "results.jsonl").read_text(), "told before anything was searched"


@pytest.mark.slow
def test_search_works_after_import_plaudit_alone(tmp_path: Path) -> None:
    """In a separate process, because other tests have already imported the package in this one."""
    code = (
        "import plaudit; [o] = plaudit.search(['8+6+5='], engine='sums-policy', prm='sums-steps', rule='rebase', "
        "width=4, stop=';', answer=r'#(\\d+)$'); print(o.answer.text)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "19\n"), result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "etz"], "search.method = 'etz'"),
        (["--set", "search.widht=4"], "did you mean 'width'?"),
        (["--world", "sum", "--questions", "2"], "unknown world 'sum'; did you mean 'sums'?"),
        (["--resume", "--fresh"], "exclude each other"),
        ([str(ROOT / "plaudit" / "recipes" / "sums-sft.toml")], "task is 'sft'"),
    ],
)
def test_invalid_arguments_give_a_one_line_error(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = plaudit_here("search", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_interrupted_search_can_be_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["search", "--method", "rebase", "--width", "4", "--questions", "64", "--set", "concurrent=1"]
    process = ForkedCommand([*flags, "--out", str(run)], tmp_path / "output", cwd=tmp_path)
    deadline = time.monotonic() + 120
    results = run / "results.jsonl"
    while time.monotonic() < deadline and not (results.exists() and results.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    completed = len(list(read_results(run / "results.jsonl")))
    assert 0 < completed < 64
    assert json.loads((run / "summary.json").read_text())["questions"] == completed
    resumed = plaudit_here(*flags, "--out", str(run), "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    uninterrupted = plaudit_here(*flags, "--out", str(tmp_path / "other"), cwd=tmp_path)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "other"))
    for name in ("accuracy", "kv_tokens", "generated_tokens", "calls"):
        assert first[name] == second[name]
