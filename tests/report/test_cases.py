"""Every diagnosis against runs made to show it and runs that must not; docs/report.md has the counts."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.report.cases import CASES, counts

ROOT = Path(__file__).resolve().parents[2]
RULES = sorted((ROOT / "plaudit" / "report" / "rules").glob("*.py"))


def calls(name: str) -> list[ast.Call]:
    """Of a function or method of this name, in all rules."""
    nodes = [node for path in RULES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [node for node in nodes if getattr(node.func, "id", getattr(node.func, "attr", None)) == name]


def test_every_diagnosis_has_its_cases() -> None:
    told = set()
    for call in calls("Finding"):
        name, severity = call.args[:2]
        if isinstance(severity, ast.Constant) and severity.value == "fine":
            continue
        told.add(name.value if isinstance(name, ast.Constant) else "generate takes most of the time")
    assert len(told) > 25
    assert told - {case.name for case in CASES} == set()


def test_rules_read_what_runs_write() -> None:
    """A diagnosis of a metric that nothing writes would never be told."""
    read = {a.value for call in calls("curve") for a in call.args if isinstance(a, ast.Constant)}
    others = [path for path in (ROOT / "plaudit").rglob("*.py") if "report" not in path.parts]
    text = "".join(path.read_text() for path in others)
    written = {*re.findall(r'"([a-z_]+(?:/[a-z_0-9]+)?)"', text)}
    parts = {"heldout/accuracy", "mismatch/abs_mean", "mismatch/ess", "policy/grad_norm", "policy/lr"}  # put together
    assert {name.partition("/")[2] for name in parts} <= written
    assert len(read) > 20
    assert read - written - parts == set()


@pytest.mark.slow
def test_diagnoses_are_told_where_they_should_be_and_the_page_says_how_often() -> None:
    for name, count in counts().items():
        assert count.hits >= 0.9 * count.shown, f"{name}: {count}"
        assert count.false <= 0.05 * count.quiet, f"{name}: {count}"
    script = runpy.run_path(str(ROOT / "docs" / "diagnoses.py"))
    assert script["page"]() == script["PAGE"].read_text(), "run python docs/diagnoses.py"
