"""Every rival's figure on a benchmark page comes from a result file that records what ran, how, where and when."""

import importlib
import json
import re
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/benchmarks/*.md")), ROOT / "docs/protocols/nemo-aligner.md"]
RIVAL = re.compile(r"vllm|sglang|\btrl\b|pytriton|fastapi|transformers", re.IGNORECASE)
FIGURE = re.compile(r"\|\s*\**[\d.,]+")  # a cell that begins with a number


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("rival_tables")


def blocks(page: str) -> list[str]:
    """The tables of a page."""
    return re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)


def test_tables_match_their_result_files(tables: ModuleType) -> None:
    for path, text in tables.pages().items():
        assert path.read_text() == text, f"{path.name}: run python benchmarks/rival_tables.py --write"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_with_a_rival_is_written_by_hand(tables: ModuleType, page: Path) -> None:
    generated = {make(tables.read(f"{name.split()[0]}.json")) for name, (_, make) in tables.TABLES.items()}
    generated |= {tables.front()}
    for block in blocks(page.read_text()):
        if RIVAL.search(block) and FIGURE.search(block):
            assert block in generated


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_rivals_in_a_result_file_have_version_settings_and_date(tables: ModuleType, file: Path) -> None:
    record: dict[str, Any] = json.loads(file.read_text())
    if file.stem not in {name.split()[0] for name in tables.TABLES}:
        assert "rivals" not in record or not record["rivals"], "a rival that ran has a table in rival_tables.TABLES"
        return
    assert (ROOT / record["script"]).is_file()
    assert datetime.fromisoformat(record["date"]).year >= 2026
    assert re.fullmatch(r"[0-9a-f]{7,40}", record["commit"])
    assert record["machine"]
    for rival in record["rivals"].values():
        assert re.match(r"\d+\.\d+", rival["version"])
        assert rival["settings"]


def test_a_table_written_by_hand_is_detected_and_replaced(tables: ModuleType) -> None:
    by_hand = "| engine | tokens/s |\n| --- | --- |\n| vLLM | 15,000 |\n"
    assert [bool(RIVAL.search(b) and FIGURE.search(b)) for b in blocks(f"Text.\n\n{by_hand}\nMore.\n")] == [True]
    generated = "| engine | tokens/s |\n| --- | --- |\n| vLLM | 21,000 |\n\nSource: here\n"
    page = tables.put(f"Text.\n\n{by_hand}\nMore.\n", generated)
    assert page == f"Text.\n\n{generated}\nMore.\n"
    assert tables.put(page, generated) == page
    with pytest.raises(SystemExit, match="put that row in"):
        tables.put("no table", generated)
