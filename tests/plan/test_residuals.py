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


def test_the_packaged_residuals_match_the_result_file() -> None:
    assert DATA.read_text().splitlines() == [",".join(COLUMNS), *RESULT["residuals"]]
    # They reproduce the targets reported in the same file.
    steps = [abs(row[-1]) for row in ROWS if row[0] == "step"]
    assert len(steps) == RESULT["targets"]["step time"]["rows"]
    assert statistics.median(steps) == pytest.approx(RESULT["targets"]["step time"]["median"], abs=1e-3)


def test_an_error_bar_uses_the_rows_of_the_same_kind_as_the_plan() -> None:
    for kind, chip, model, placement in {tuple(row[:4]) for row in ROWS}:
        same = [row[-1] for row in ROWS if row[:4] == [kind, chip, model, placement]]
        if len(same) < 5:
            continue
        error_bar = bar(kind, chip, model, placement)
        sizes = sorted(map(abs, same))
        assert (error_bar.rows, error_bar.extrapolated) == (len(same), False)
        assert error_bar.median == statistics.median(sizes)
        assert sum(size <= error_bar.p90 for size in sizes) >= 0.9 * len(sizes)  # at least 90% are within p90
        assert error_bar.bias == statistics.median(same)


def test_too_few_rows_fall_back_to_all_models_on_the_same_accelerators() -> None:
    few = bar("training", "Hopper", "dense", "")
    assert few.of == "Hopper, any model"
    assert few.rows == sum(row[:2] == ["training", "Hopper"] for row in ROWS)
    assert not few.extrapolated


def test_hardware_without_rows_is_marked_as_extrapolated() -> None:
    run = predict("qwen2.5-7b", "1x8xMI300X", "hybrid")
    bars = {error_bar.kind: error_bar for error_bar in error_bars(run)}
    assert bars.keys() == KINDS.keys()
    assert all(error_bar.extrapolated for error_bar in bars.values())
    assert "extrapolated" in str(bars["step"])
    hopper = {error_bar.kind: error_bar for error_bar in error_bars(predict("qwen2.5-7b", "1x8xH100", "hybrid"))}
    assert not hopper["step"].extrapolated
    assert hopper["step"].of == "Hopper, dense"  # only four rows are on shared devices: too few
    # Blackwell has serving and training, and no RL step.
    blackwell = {error_bar.kind: error_bar for error_bar in error_bars(predict("qwen2.5-7b", "1x8xB200", "hybrid"))}
    assert (blackwell["step"].extrapolated, blackwell["generation"].extrapolated) == (True, False)
    mixed = predict("qwen2.5-7b", "1x8xH100", "disaggregated", generation_hardware="1x8xB200")
    assert next(error_bar for error_bar in error_bars(mixed) if error_bar.kind == "step").extrapolated


def test_every_accelerator_has_a_family() -> None:
    known = {"Ampere", "Hopper", "Ada", "Blackwell", "CDNA", "TPU"}
    assert {family(chip) for chip in catalogue().values()} == known
    assert family(accelerator("H20")) == "Hopper"


def test_tables_and_json_show_the_error() -> None:
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
