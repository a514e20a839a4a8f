"""The tree in docs/architecture.md, and the links of all pages; tests/test_docs.py runs their code blocks."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
ARCHITECTURE = README.parent / "docs" / "architecture.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", ARCHITECTURE.read_text(), re.DOTALL | re.MULTILINE)


def test_documented_tree_matches_the_package() -> None:
    (tree,) = [text for name, text in BLOCKS if not name and "plaudit/\n" in text]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ")}
    existing = {
        p.name for p in (README.parent / "plaudit").iterdir() if not p.name.startswith("_") and p.name != "py.typed"
    }
    assert named == existing


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub generates for the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_links_and_anchors_exist() -> None:
    root = README.parent
    for page in (*root.glob("*.md"), *root.glob("examples/*.md"), *root.glob("docs/**/*.md")):
        for link in re.findall(r"\]\(([^)\s:]+)\)", prose(page)):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(target), f"{page.name} links to {link}, a heading that is not there"


def test_readme_is_short_and_has_a_picture() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 60
    (picture,) = re.findall(r"^!\[[^\]]+\]\(([^)]+)\)$", text, re.MULTILINE)
    assert (README.parent / picture).is_file()
