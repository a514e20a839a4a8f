"""docs/accelerators.md: its commands print the shown output, and its stated answers hold."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.command import plaudit_here

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def page_script() -> Any:
    spec = importlib.util.spec_from_file_location("accelerators_page", ROOT / "docs" / "accelerators.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(command: str) -> str:
    run = plaudit_here(*shlex.split(command)[1:])
    assert run.returncode == 0, run.stderr
    return run.stdout


def data(command: str) -> Any:
    return json.loads(printed(f"{command} --json"))


@pytest.mark.slow
def test_the_page_matches_the_output_of_its_commands() -> None:
    """Words are equal and numbers equal within 1%: the last digit may differ between machines."""
    stored = page_script().PAGE.read_text()
    current = page_script().page(printed)
    assert re.sub(r"\s+", " ", NUMBER.sub("#", stored)) == re.sub(r"\s+", " ", NUMBER.sub("#", current))
    for old, new in zip(NUMBER.findall(stored), NUMBER.findall(current), strict=True):
        assert _value(new) == pytest.approx(_value(old), rel=0.01, abs=0.011)


def _value(text: str) -> float:
    return float(text.replace(",", "").rstrip("."))


@pytest.mark.slow
def test_the_answers_on_the_page_follow_from_the_numbers() -> None:
    larger, _, chips, hybrid, disaggregated, prefill = (command for _, _, command in page_script().QUESTIONS)
    rows = {row["hardware"]: row for row in data(larger)["any_software"]}
    eight = rows["1x8xB200 SXM"]
    # Larger accelerators: as fast as three times as many smaller ones, at nearly the same cost.
    assert eight["step_seconds"] == pytest.approx(rows["3x8xH100 SXM"]["step_seconds"], rel=0.2)
    dollars = "dollars_per_million_tokens"
    assert eight[dollars] == pytest.approx(rows["1x8xH100 SXM"][dollars], rel=0.2)
    for chip in ("H100", "B200"):
        assert rows[f"1x8x{chip} SXM"][dollars] < rows[f"2x8x{chip} SXM"][dollars]
    load = {each["hardware"]: each for each in data(chips)["loads"]}
    gains = [load["1x8xH100 SXM"][f"{part}_{dollars}"] / load["1x8xH200 SXM"][f"{part}_{dollars}"]
             for part in ("serving", "training")]  # fmt: skip
    assert gains[0] > gains[1] > 1
    by_nodes_hybrid, by_nodes_disaggregated = (
        {row["nodes"]: row for row in data(command)["any_software"]} for command in (hybrid, disaggregated)
    )
    for nodes, row in by_nodes_hybrid.items():
        if nodes == 3:
            assert row["step_seconds"] == pytest.approx(by_nodes_disaggregated[nodes]["step_seconds"], rel=0.05)
            continue
        assert (row["step_seconds"] < by_nodes_disaggregated[nodes]["step_seconds"]) is (nodes <= 4), nodes
        assert (row[dollars] < by_nodes_disaggregated[nodes][dollars]) is (nodes <= 4), nodes
    three, two = data(prefill)["arrangements"]
    assert len(three["pools"]) == 3
    assert two["dollars_per_hour"] < three["dollars_per_hour"]
