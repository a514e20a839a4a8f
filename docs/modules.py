"""Writes docs/modules.md: every package and module with the first sentence of its docstring.

python docs/modules.py          write the page
python docs/modules.py --check  exit 1 if the page is out of date
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "modules.md"
HEAD = """# Modules

What every folder and file of `plaudit/` is for: the first sentence of its docstring. Made by `python docs/modules.py`;
[architecture.md](architecture.md) says how they fit together.
"""


def sentence(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(doc.split("\n\n")[0].split())
    whole = re.match(r".+?[.:](?=\s[A-Z`]|$)", paragraph)
    return (whole[0] if whole else paragraph).replace("|", "\\|")


def page() -> str:
    parts = [HEAD]
    package = ROOT / "plaudit"
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))
        parts.append(f"## {folder.relative_to(ROOT)}\n\n{sentence(folder / '__init__.py')}\n")
        if files:
            rows = "\n".join(f"| `{path.name}` | {sentence(path)} |" for path in files)
            parts.append(f"| file | what it is for |\n| --- | --- |\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == text else "docs/modules.md is out of date: run python docs/modules.py")
    PAGE.write_text(text)
