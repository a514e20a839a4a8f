"""Tables of modules, keys and metrics match the code, the reading path is short, the log's index is complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READING_LINES = 3500


@pytest.mark.parametrize("script", ["docs/modules.py", "docs/keys.py", "docs/metrics.py"])
def test_tables_of_modules_keys_and_metrics_are_up_to_date(script: str) -> None:
    result = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_reading_path_is_short() -> None:
    files = re.findall(r"^\| `(plaudit/[^`]+)`", (ROOT / "docs" / "reading.md").read_text(), re.MULTILINE)
    assert len(files) > 10
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= READING_LINES


def test_log_index_lists_every_page_and_titles_are_questions() -> None:
    log = ROOT / "docs" / "log"
    titles = {page.name: page.read_text().split("\n", 1)[0].removeprefix("# ") for page in log.glob("*.md")}
    titles.pop("README.md")
    assert not [title for title in titles.values() if not title.endswith("?")], "a title is a question"
    listed = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\)", (log / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((title, name) for name, title in titles.items())
