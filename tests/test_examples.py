"""The examples run, and the README beside them lists all of them; other systems are refused in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.command import plaudit_here

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def test_all_are_listed() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {file.name for file in EXAMPLES.glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "says"), [(["own_reward.py", "2"], "right answers: "), (["best_of_n.py"], "#21")])
def test_they_run(words: list[str], says: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_issue_forms_have_what_the_form_needs() -> None:
    for file in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")):
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= set(form)
        assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"])


def test_windows_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    done = plaudit_here("recipes")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "WSL 2" in done.stderr
