"""`plaudit bench weights`: human-readable sizes, the plot, and the whole command."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from plaudit.bench.shape import LlamaShaped, count_of
from plaudit.bench.weights import Row, WeightsResult
from plaudit.bench.weights_view import draw_weights, print_weights
from plaudit.errors import ConfigError
from plaudit.place.channels.weights import Weights
from tests.forked import run_forked

RESULT = WeightsResult(
    "2026-11-15T00:00:00+00:00", "0", None, "a <machine>", "cpu", "3.11", "2.13", 100_000_000, 400_000_000, "float32",
    5, 7.5,
    [
        Row("disk", 0.5, 0.8, "write and read", 0.4, 0.8, 0),
        Row("shared, paused", 0.002, None, "message", 0.0002, None, 0),
    ],
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count"), [("100M", 100_000_000), ("1.5b", 1_500_000_000), ("250K", 250_000), ("123456", 123456)]
)
def test_human_readable_sizes_are_parsed(text: str, count: int) -> None:
    assert count_of(text) == count


@pytest.mark.parametrize("text", ["", "M", "-3M", "10", "1e9", "100 M B"])
def test_other_sizes_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="as in 100M"):
        count_of(text)


@pytest.mark.parametrize("requested", [300_000, 20_000_000, 100_000_000, 1_000_000_000, 7_000_000_000])
def test_the_model_has_about_the_requested_size(requested: int) -> None:
    weights = Weights.of(LlamaShaped(requested, torch.float32, torch.device("meta")))
    parameters = weights.nbytes / 4
    assert abs(parameters - requested) < 0.25 * requested
    assert weights.layout.aliases == {"lm_head": "embed_tokens"}


def test_the_plot_is_well_formed_and_shows_each_channel() -> None:
    root = ElementTree.fromstring(draw_weights(RESULT))
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]
    assert {"disk", "shared, paused", "500 ms", "80% of the limit", "2 ms", "moves nothing"} <= set(texts)


def test_the_table_shows_a_dash_for_a_channel_that_moves_nothing() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    print_weights(RESULT, console)
    output = console.export_text()
    assert "disk" in output
    assert "80%" in output
    assert "–" in output
    assert "The machine was busy (load 7.5 before the start)" in output


@pytest.mark.slow
def test_the_command_measures_every_channel_on_a_cpu(tmp_path: Path) -> None:
    command = [
        "bench", "weights", "--parameters", "300K", "--device", "cpu", "--repeats", "1", "--json", "--out",
        str(tmp_path / "out"),
    ]  # fmt: skip
    completed = run_forked(*command)
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert [row["channel"] for row in result["rows"]] == [
        "disk", "collective, gloo", "shared, running", "shared, paused",
    ]  # fmt: skip
    assert all(row["seconds"] > 0 and row["limit_seconds"] > 0 for row in result["rows"])
    assert json.loads((tmp_path / "out" / "weights.json").read_text()) == result
    ElementTree.parse(tmp_path / "out" / "weights.svg")
