"""docs/rewards.md shows every kind of reward and every format; tests/test_docs.py reads its examples."""

import re
import tomllib
from pathlib import Path

from plaudit.config.formats import FORMATS
from plaudit.config.reward import KINDS, ProcessTable, parse_reward

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
TABLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def test_every_kind_and_format_is_there() -> None:
    # An encoder gives no score: it is on the page about scaling.
    # A comparison is no reward: `plaudit judge-check` alone reads it.
    assert {tomllib.loads(text)["kind"] for text in TABLES} == {*KINDS, "comparison"} - {"embedding"}
    assert {name for name in FORMATS if f"| `{name}`" in PAGE} == set(FORMATS)


def test_the_inline_format_is_math_shepherd_spelt_out() -> None:
    (text,) = [text for text in TABLES if "[format]" in text]
    table = parse_reward(tomllib.loads(text), "docs/rewards.md")
    assert isinstance(table, ProcessTable)
    assert table.format == FORMATS["math-shepherd"]
