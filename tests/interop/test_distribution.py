"""`python -m build` and `twine check`: the files for a package registry, and whether it can render the README."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.interop.environments import ROOT, run_module

pytestmark = pytest.mark.interop


def test_distribution_passes_twine_check(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "plaudit", source / "plaudit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run_module(".venv-docs", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source), seconds=300)
    files = sorted((tmp_path / "dist").iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    output = run_module(".venv-docs", "twine", "check", "--strict", *map(str, files))
    assert output.count("PASSED") == 2
