"""Every diagnosis on synthetic runs with and without the problem; docs/report.md has the counts."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.report.cases import CASES, counts

ROOT = Path(__file__).resolve().parents[2]
RULES = sorted((ROOT / "plaudit" / "report" / "rules").glob("*.py"))


def calls(name: str) -> list[ast.Call]:
    """All calls of a function or method of this name in the rules."""
    nodes = [node for path in RULES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [node for node in nodes if getattr(node.func, "id", getattr(node.func, "attr", None)) == name]


def test_every_diagnosis_has_a_case() -> None:
    names = set()
    for call in calls("Finding"):
        name, severity = call.args[:2]
        if isinstance(severity, ast.Constant) and severity.value == "fine":
            continue
        names.add(name.value if isinstance(name, ast.Constant) else "generate takes most of the time")
    assert len(names) > 25
    assert names - {case.name for case in CASES} == set()


def test_rules_read_only_metrics_that_runs_write() -> None:
    """A diagnosis that reads a metric that nothing writes would never be reported."""
    read = {a.value for call in calls("curve") for a in call.args if isinstance(a, ast.Constant)}
    others = [path for path in (ROOT / "plaudit").rglob("*.py") if "report" not in path.parts]
    text = "".join(path.read_text() for path in others)
    written = {*re.findall(r'"([a-z_]+(?:/[a-z_0-9]+)?)"', text)}
    parts = {
        "heldout/accuracy",
        "mismatch/abs_mean",
        "mismatch/ess",
        "policy/grad_norm",
        "policy/lr",
    }  # names composed at runtime
    assert {name.partition("/")[2] for name in parts} <= written
    assert len(read) > 20
    assert read - written - parts == set()


@pytest.mark.slow
def test_diagnosis_hit_and_false_alarm_rates_and_the_docs_page() -> None:
    for name, count in counts().items():
        assert count.hits >= 0.9 * count.shown, f"{name}: {count}"
        assert count.false <= 0.05 * count.quiet, f"{name}: {count}"
    script = runpy.run_path(str(ROOT / "docs" / "diagnoses.py"))
    assert script["page"]() == script["PAGE"].read_text(), "run python docs/diagnoses.py"
