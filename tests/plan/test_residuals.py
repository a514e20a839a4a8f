"""Every plan reports how far published measurements of its kind were from their plans."""

import json
import math
import statistics
from pathlib import Path

import pytest

from plaudit.plan import accelerator, predict
from plaudit.plan.residuals import COLUMNS, DATA, KINDS, bar, error_bars, family
from plaudit.plan.shape.hardware import catalogue
from tests.command import plaudit_here

ROOT = Path(__file__).parent.parent.parent
RESULT = json.loads((ROOT / "benchmarks/results/planner_validation.json").read_text())
ROWS = [[*line.split(",")[:4], float(line.split(",")[4])] for line in RESULT["residuals"]]


def test_the_package_has_the_residuals_of_the_result() -> None:
    assert DATA.read_text().splitlines() == [",".join(COLUMNS), *RESULT["residuals"]]
    # And they are those of the targets that the same file reports.
    steps = [abs(row[-1]) for row in ROWS if row[0] == "step"]
    assert len(steps) == RESULT["targets"]["step time"]["rows"]
    assert statistics.median(steps) == pytest.approx(RESULT["targets"]["step time"]["median"], abs=1e-3)


def test_a_bar_is_taken_over_the_rows_that_are_most_like_the_plan() -> None:
    for kind, chip, model, placement in {tuple(row[:4]) for row in ROWS}:
        same = [row[-1] for row in ROWS if row[:4] == [kind, chip, model, placement]]
        if len(same) < 5:
            continue
        found = bar(kind, chip, model, placement)
        sizes = sorted(map(abs, same))
        assert (found.rows, found.extrapolated) == (len(same), False)
        assert found.median == statistics.median(sizes)
        assert sum(size <= found.p90 for size in sizes) >= 0.9 * len(sizes)  # as many are within it as it says
        assert found.bias == statistics.median(same)


def test_few_rows_are_joined_by_their_neighbours_on_the_same_accelerators() -> None:
    few = bar("training", "Hopper", "dense", "")
    assert few.of == "Hopper, any model"
    assert few.rows == sum(row[:2] == ["training", "Hopper"] for row in ROWS)
    assert not few.extrapolated


def test_hardware_without_rows_is_marked() -> None:
    run = predict("qwen2.5-7b", "1x8xMI300X", "hybrid")
    bars = {found.kind: found for found in error_bars(run)}
    assert bars.keys() == KINDS.keys()
    assert all(found.extrapolated for found in bars.values())
    assert "extrapolated" in str(bars["step"])
    hopper = {found.kind: found for found in error_bars(predict("qwen2.5-7b", "1x8xH100", "hybrid"))}
    assert not hopper["step"].extrapolated
    assert hopper["step"].of == "Hopper, dense"  # four of them are on shared devices: too few
    # Blackwell has serving and training, and no RL step.
    blackwell = {found.kind: found for found in error_bars(predict("qwen2.5-7b", "1x8xB200", "hybrid"))}
    assert (blackwell["step"].extrapolated, blackwell["generation"].extrapolated) == (True, False)
    mixed = predict("qwen2.5-7b", "1x8xH100", "disaggregated", generation_hardware="1x8xB200")
    assert next(found for found in error_bars(mixed) if found.kind == "step").extrapolated


def test_every_accelerator_has_a_family() -> None:
    known = {"Ampere", "Hopper", "Ada", "Blackwell", "CDNA", "TPU"}
    assert {family(chip) for chip in catalogue().values()} == known
    assert family(accelerator("H20")) == "Hopper"


def test_tables_and_data_have_the_error() -> None:
    words = ("--model", "qwen2.5-7b", "--placement", "hybrid")
    run = plaudit_here("plan", *words, cwd=ROOT)
    assert "error against published runs: step time ±" in run.stdout
    data = json.loads(plaudit_here("plan", *words, "--json", cwd=ROOT).stdout)
    step = data["plans"][0]["errors"]["step"]
    assert 0 < step["median"] <= step["p90"]
    assert step["rows"] >= 5
    assert not math.isnan(step["bias"])
    sweep = plaudit_here("plan", *words, "--budget", "60/h", "--compare", "H100,MI300X", cwd=ROOT).stdout
    assert "extrapolated, none is on such an accelerator" in sweep
