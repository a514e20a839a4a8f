"""docs/modules.md is what the docstrings say, and the reading path is as short as it promises."""

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
