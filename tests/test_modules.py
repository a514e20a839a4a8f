"""docs/modules.md is what the docstrings say, the reading path is short, and every file of the log is in its index."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
READING_LINES = 3000


def test_the_table_of_modules_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/modules.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_reading_path_is_short() -> None:
    files = re.findall(r"^\| `(plaudit/[^`]+)`", (ROOT / "docs" / "reading.md").read_text(), re.MULTILINE)
    assert len(files) > 10
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= READING_LINES


def test_every_question_of_the_log_is_in_its_index() -> None:
    log = ROOT / "docs" / "log"
    titles = {page.name: page.read_text().split("\n", 1)[0].removeprefix("# ") for page in log.glob("*.md")}
    titles.pop("README.md")
    assert not [title for title in titles.values() if not title.endswith("?")], "a title is a question"
    listed = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\)", (log / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((title, name) for name, title in titles.items())
