"""The README's drawing of the tree, and links of all pages; their code blocks are run by tests/test_docs.py."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def test_the_tree_is_the_tree() -> None:
    (tree,) = [text for name, text in BLOCKS if not name and "plaudit/\n" in text]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ")}
    there = {
        p.name for p in (README.parent / "plaudit").iterdir() if not p.name.startswith("_") and p.name != "py.typed"
    }
    assert named == there


def test_links_lead_somewhere() -> None:
    for page in (README, *README.parent.glob("*.md"), *README.parent.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
