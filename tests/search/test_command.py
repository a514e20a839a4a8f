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


def test_a_search_prints_its_figures_and_writes_them(tmp_path: Path) -> None:
    flags = ["--world", "sums-hard", "--method", "ets", "--width", "4", "--questions", "3"]
    done = plaudit("search", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("accuracy", "KV tokens", "generated tokens", "calls", "seconds"):
        assert name in done.stdout
    figures = json.loads((tmp_path / "runs" / "search-ets" / "summary.json").read_text())
    assert f"{figures['kv_tokens']:,}" in done.stdout
    spent = figures["solver_seconds"] + figures["cluster_seconds"]
    assert figures["programme_share"] == pytest.approx(spent / figures["seconds"], abs=1e-3)
    assert f"integer programs and clustering take {figures['programme_share']:.1%} of the time" in done.stdout
    again = plaudit_here("search", *flags, cwd=tmp_path)
    assert again.returncode == 2
    assert "already has a search: --resume continues it" in again.stderr


def test_several_methods_have_a_directory_each(tmp_path: Path) -> None:
    flags = ["--method", "rebase", "--method", "best-of-n", "--width", "4", "--questions", "2", "--out", "runs/both"]
    done = plaudit_here("search", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for method in ("rebase", "best-of-n"):
        assert f"{method}, width 4: 2 questions" in done.stdout
        assert len(list(read_results(tmp_path / "runs" / f"both-{method}" / "results.jsonl"))) == 2


def test_a_run_without_an_answer_is_an_error_that_says_why(tmp_path: Path) -> None:
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
    done = plaudit_here(*flags, cwd=tmp_path)
    assert done.returncode == 2
    assert "accuracy" not in done.stdout
    assert "answered          0 of 2" in done.stdout
    said = r"no answer         2 of 2 questions, most paths for: ended without an answer that matches 'answer: (\\d+)'"
    assert said in done.stdout
    assert "no path of any question ended in an answer (best-of-n, 2 questions): ended without" in done.stderr
    assert done.stderr.count("\n") == 1
    figures = json.loads((tmp_path / "runs" / "search-best-of-n" / "summary.json").read_text())
    assert (figures["answered"], figures["questions"], "accuracy" in figures) == (0, 2, False)
    report = plaudit_here("report", "runs/search-best-of-n", cwd=tmp_path)
    assert (report.returncode, "no path of any question ended in an answer" in report.stdout) == (0, True)


def test_a_budget_that_was_too_small_is_named() -> None:
    line = {"answer": None, "right": None, "stopped": "budget: kv_tokens", "costs": {"calls": 8}}
    lines = [{"index": index, **line} for index in (0, 1)]
    figures = {"method": "rebase", **summary(lines)}
    assert figures["stopped"] == {"budget: kv_tokens": 2}
    with pytest.raises(NoAnswer, match=r"budget: kv_tokens; raise budget\.kv_tokens; all paths are in"):
        refuse_empty({Path("runs/search-rebase"): figures})


def test_best_of_n_takes_an_outcome_model_and_the_others_say_why_not(tmp_path: Path) -> None:
    flags = ["search", "--width", "4", "--questions", "2", "--set", "prm.path=sums"]
    done = plaudit_here(*flags, "--method", "best-of-n", cwd=tmp_path)
    assert (done.returncode, "accuracy" in done.stdout) == (0, True), done.stderr
    both = plaudit_here(*flags, "--method", "best-of-n", "--method", "beam", "--out", "both", cwd=tmp_path)
    assert both.returncode == 2
    assert "search.method = 'beam' chooses among steps, and sums is an outcome model" in both.stderr
    assert not (tmp_path / "both-best-of-n" / "results.jsonl").read_text(), "told before anything was searched"


@pytest.mark.slow
def test_import_plaudit_is_enough_to_search(tmp_path: Path) -> None:
    """In a process of its own: here the package has been imported by somebody else."""
    code = (
        "import plaudit; [o] = plaudit.search(['8+6+5='], engine='sums-policy', prm='sums-steps', rule='rebase', "
        "width=4, stop=';', answer=r'#(\\d+)$'); print(o.answer.text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "19\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--method", "etz"], "search.method = 'etz'"),
        (["--set", "search.widht=4"], "did you mean 'width'?"),
        (["--world", "sum", "--questions", "2"], "unknown world 'sum'; did you mean 'sums'?"),
        (["--resume", "--fresh"], "exclude each other"),
        ([str(ROOT / "plaudit" / "recipes" / "sums-sft.toml")], "task is 'sft'"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], told: str, tmp_path: Path) -> None:
    done = plaudit_here("search", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["search", "--method", "rebase", "--width", "4", "--questions", "64", "--set", "concurrent=1"]
    process = ForkedCommand([*flags, "--out", str(run)], tmp_path / "output", cwd=tmp_path)
    until = time.monotonic() + 120
    results = run / "results.jsonl"
    while time.monotonic() < until and not (results.exists() and results.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    kept = len(list(read_results(run / "results.jsonl")))
    assert 0 < kept < 64
    assert json.loads((run / "summary.json").read_text())["questions"] == kept
    done = plaudit_here(*flags, "--out", str(run), "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole = plaudit_here(*flags, "--out", str(tmp_path / "other"), cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "other"))
    for name in ("accuracy", "kv_tokens", "generated_tokens", "calls"):
        assert first[name] == second[name]
