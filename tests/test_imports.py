"""Imports go one way, and the planner, the configuration and the records need no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "plaudit"

# Lower layers never import higher ones. What is on one layer may import each other.
LAYERS = [
    {"errors", "records", "config", "events", "output", "guard"},
    {"algo", "plan"},
    {"models", "worlds"},
    {"core"},
    {"reward"},
    {"serve"},
    {"train", "place", "search", "integrations"},
    {"generate", "score", "bench", "calibrate", "heap"},
    {"report"},
    {"cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
REPORT_MAY_USE = {"events", "records", "errors", "report"}


def imports() -> list[tuple[Path, str, str]]:
    """(file, importing part, imported part) for every import inside the package, wherever in the file it stands."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        part = inside.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module] if node.module != "plaudit" else [f"plaudit.{a.name}" for a in node.names]
                assert node.level == 0, f"{inside}: relative imports hide the direction"
            found += [(inside, part, n.split(".")[1]) for n in names if n.startswith("plaudit.") and part != "__init__"]
    return found


def test_the_package_was_found() -> None:
    assert len(imports()) > 20


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path} imports plaudit.{imported}"
        for path, part, imported in imports()
        if imported != "__version__" and LEVEL[imported] > LEVEL[part]
    ]
    assert not wrong, "these go against the layers of tests/test_imports.py: " + "; ".join(wrong)


def test_report_reads_only_the_event_log_and_only_the_command_line_reads_report() -> None:
    wrong = [
        f"{path} imports plaudit.{imported}"
        for path, part, imported in imports()
        if (part == "report" and imported not in REPORT_MAY_USE)
        or (imported == "report" and part not in ("report", "cli"))
    ]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize(
    "module",
    [
        "plaudit.plan", "plaudit.config", "plaudit.records", "plaudit.events", "plaudit.cli", "plaudit.score",
        "plaudit.serve.client", "plaudit.integrations.trl", "plaudit.integrations.openrlhf",
        "plaudit.integrations.verl", "plaudit.integrations.slime", "plaudit.search.tree", "plaudit.search.methods",
        "plaudit.search.rules.ets", "plaudit.train.pairs",
    ],
)  # fmt: skip
def test_these_load_without_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_no_file_is_a_drawer_of_odds_and_ends() -> None:
    drawers = {"utils.py", "helpers.py", "misc.py", "common.py"}
    assert not [path for path in PACKAGE.rglob("*.py") if path.name in drawers]


def test_no_pickle_and_no_remote_code() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names} & {"pickle", "cloudpickle", "dill"}, path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("pickle", "cloudpickle", "dill"), path
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
