"""Without playwright, all tests are collected, and those that need no browser run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("tests/report/test_page.py", "tests/report/test_search_page.py", "tests/serve/test_page.py")
HIDE = "import sys\nsys.modules['playwright'] = None\n"


@pytest.mark.slow
def test_page_tests_are_skipped_with_a_message_without_playwright(tmp_path: Path) -> None:
    (tmp_path / "no_playwright.py").write_text(HIDE)
    command = [sys.executable, "-m", "pytest", "-p", "no_playwright", "-p", "no:cacheprovider", *PAGES]
    # One test that needs a browser, one that does not, and a file that is skipped entirely.
    chosen = "the_page_draws or cannot_break_out"
    inherited = {name: value for name, value in os.environ.items() if name != "PLAUDIT_SHARES"}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run(
        [*command, "-k", chosen], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout
    assert "skipped: no playwright for the tests of pages: pip install playwright" in result.stdout
    assert "1 passed, 2 skipped" in result.stdout
