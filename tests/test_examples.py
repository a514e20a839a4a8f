"""The examples run, and their README lists all of them; Windows is rejected in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.command import plaudit_here
from tests.notebook import code_cells, run_notebook

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def test_readme_lists_all_examples() -> None:
    listed = set(re.findall(r"\]\((\w+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {file.name for pattern in ("*.py", "*.ipynb") for file in EXAMPLES.glob(pattern)}


def test_notebooks_have_short_stored_outputs() -> None:
    for file in EXAMPLES.glob("*.ipynb"):
        notebook = json.loads(file.read_text(encoding="utf-8"))
        assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
        for cell in code_cells(notebook):
            assert 0 < len(json.dumps(cell["outputs"])) < 2000, (
                f"{file.name}: python -m tests.notebook {file} stores them"
            )


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda file: file.name)
def test_notebooks_run_and_reproduce_the_stored_outputs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for numbers, which training on another processor may change; those are within 15 of the stored ones."""
    monkeypatch.chdir(tmp_path)
    cells = code_cells(json.loads(file.read_text(encoding="utf-8")))
    for cell, new_outputs in zip(cells, run_notebook(file), strict=True):
        stored, actual = (json.dumps(outputs, sort_keys=True) for outputs in (cell["outputs"], new_outputs))
        assert NUMBER.sub("N", actual) == NUMBER.sub("N", stored)
        for old, new in zip(NUMBER.findall(stored), NUMBER.findall(actual), strict=True):
            assert float(new) == pytest.approx(float(old), abs=15)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "says"), [(["own_reward.py", "2"], "right answers: "), (["best_of_n.py"], "#21")])
def test_example_scripts_run(words: list[str], says: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / words[0]), *words[1:]]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert says in result.stdout


def test_issue_forms_have_the_required_fields() -> None:
    for file in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")):
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= set(form)
        assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"])


def test_windows_is_rejected_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    result = plaudit_here("recipes")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "WSL 2" in result.stderr
