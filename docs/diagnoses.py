"""Writes into docs/report.md how often each diagnosis is reported where it should be, and where it should not.

python docs/diagnoses.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "report.md"
BEGIN, END = "<!-- counted by docs/diagnoses.py -->\n", "<!-- end of what is counted -->\n"


def page() -> str:
    from tests.report.cases import table

    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(), encoding="utf-8")
