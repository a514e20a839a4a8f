"""The code blocks of README, CONTRIBUTING and docs/, and the commands in them.

A comment right before a block sets how it is tested:

    <!-- not run: needs a GPU -->          parsed but not run, for this reason
    <!-- slow: starts two processes -->    run by the slow tests
    <!-- added to: sums-grpo -->           TOML: tables that replace those of that recipe
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
NOTES = ("not run", "slow", "added to")
_NOTE = re.compile(r"<!-- ([a-z ]+?): *(.*?) *-->")


@dataclass(frozen=True)
class Block:
    """after: the next block on the page if it is text, which is the expected output of this block."""

    page: str
    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)
    after: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def not_run(self) -> bool:
        return "not run" in self.notes


def blocks_of(text: str, page: str) -> list[Block]:
    """Raises ValueError for a comment before a block that is empty or that no test reads."""
    blocks: list[Block] = []
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        if not lines[start].startswith("```"):
            start += 1
            continue
        end = lines.index("```", start + 1)
        body = "".join(f"{line}\n" for line in lines[start + 1 : end])
        blocks.append(Block(page, start + 1, lines[start][3:].strip(), body, _notes(lines, start, page)))
        start = end + 1
    return [
        Block(b.page, b.line, b.language, b.text, b.notes, n.text if n is not None and n.language == "text" else None)
        for b, n in zip(blocks, [*blocks[1:], None], strict=False)
    ]


def _notes(lines: list[str], at: int, page: str) -> dict[str, str]:
    notes: dict[str, str] = {}
    above = at - 1
    while above >= 0 and (lines[above].startswith("<!--") or not lines[above].strip()):
        if lines[above].startswith("<!--"):
            match = _NOTE.fullmatch(lines[above])
            if match is None or match[1] not in NOTES or not match[2]:
                raise ValueError(
                    f"{page}:{above + 1}: expected <!-- {' or '.join(NOTES)}: ... -->, found {lines[above]}"
                )
            notes[match[1]] = match[2]
        above -= 1
    return notes


def commands(text: str) -> Iterator[str]:
    """The commands of a shell block, with continuation lines joined; comments are kept."""
    pending = ""
    for line in text.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quoted string that continues on the next line
            continue
        if words:
            yield pending
        pending = ""
    if pending:
        raise ValueError(f"a command that does not end: {pending}")


BLOCKS = [block for page in PAGES for block in blocks_of(page.read_text("utf-8"), str(page.relative_to(ROOT)))]


def furnished(place: Path) -> Path:
    """The directory with the files that the pages' commands use: models at placeholder paths, rows to score."""
    import pyarrow as pa
    from pyarrow import parquet

    for name in {name for block in BLOCKS for name in re.findall(r"(?:path/to|my|models)/[a-z0-9-]+", block.text)}:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(ROOT / "plaudit" / "embedded" / stand_in(name))
    rows = [{"prompt": "7+8+4=", "response": f"7+8=15;15+4={n};#{n}"} for n in (19, 18)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), place / "rows.parquet")
    return place


def stand_in(name: str) -> str:
    """The embedded model that replaces a placeholder name."""
    if re.search("prm|process|llemma", name):
        return "sums-steps"
    return "sums" if re.search("reward|rm", name) else "sums-policy"
