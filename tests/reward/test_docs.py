"""docs/rewards.md shows every kind of reward and every format; tests/test_docs.py reads its examples."""

import re
import tomllib
from pathlib import Path

from plaudit.config.formats import FORMATS
from plaudit.config.reward import KINDS, ProcessTable, parse_reward

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
TABLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def test_page_has_every_kind_and_format() -> None:
    # An encoder gives no score: it is documented on the page about scaling.
    # A comparison is no reward: only `plaudit judge-check` reads it.
    assert {tomllib.loads(text)["kind"] for text in TABLES} == {*KINDS, "comparison"} - {"embedding"}
    assert {name for name in FORMATS if f"| `{name}`" in PAGE} == set(FORMATS)


def test_inline_format_example_equals_math_shepherd() -> None:
    (text,) = [text for text in TABLES if "[format]" in text]
    table = parse_reward(tomllib.loads(text), "docs/rewards.md")
    assert isinstance(table, ProcessTable)
    assert table.format == FORMATS["math-shepherd"]
