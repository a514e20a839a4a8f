"""The plots of docs/benchmarks, from small hand-written records."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from plaudit.events import EventLog

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"

PLACED: dict[str, Any] = {
    "placement": "swapped", "error": None, "peak_bytes": 4e9, "peak_phase": "update", "seconds_per_step": 4.0,
    "swap_seconds_per_step": 1.0, "switch_seconds_per_step": 0.0, "publish_seconds_per_step": 0.0,
    "phases": {"evaluate": {"KV": 5e9}, "generate": {"policy weights": 1e9, "KV": 1e9},
               "update": {"policy weights": 1e9, "policy masters": 1e9, "policy optimizer": 1e9, "unaccounted": 1e9}},
    "planned": {"update": {"policy weights": 1e9, "policy optimizer": 1e9}},
}  # fmt: skip
STEPS = {"steps": [{"at": 1.0, "reward": 0.25}, {"at": 2.0, "reward": 0.5}]}
RECORDS: dict[str, dict[str, Any]] = {
    "core_gpu": {
        "date": "2026-11-15T01:02:03", "machine": "<GPU>",
        "results": {"score 1B": {"value": 450, "unit": "samples/s", "transformers": 90},
                    "groups 1B": {"value": 520, "unit": "samples/s"},
                    "generate 1B": {"value": 100_000, "unit": "tokens/s", "transformers": 10_000},
                    "generate 135M": {"value": 180_000, "unit": "tokens/s", "transformers": 18_000}},
    },
    "serving_gpu": {
        "date": "2026-11-15T01:02:03", "machine": "GPU", "rivals": {"fastapi": {}},
        "rows": [{"server": "core", "load": "ragged", "run": 0, "samples/s": 200.0},
                 {"server": "plaudit", "load": "ragged", "run": 0, "samples/s": 150.0, "p50 ms": 9.0, "p99 ms": 1e3},
                 {"server": "plaudit", "load": "ragged", "run": 1, "samples/s": 151.0, "p50 ms": 9.0, "p99 ms": 1e3},
                 {"server": "fastapi", "load": "ragged", "run": 0, "samples/s": 50.0, "p50 ms": 9.0, "p99 ms": 11.0}],
    },
    "smollm2-grpo": {
        "date": "2026-11-15T01:02:03", "machine": "GPU",
        "seeds": {"1": {"heldout": [[0, 0.0, 0.0], [5, 10.0, 1.0]]}, "2": {"heldout": [[0, 0.0, 0.5], [5, 5.0, 0.5]]}},
    },
    "smollm2_vs_trl": {
        "date": "2026-11-15T01:02:03", "machine": "GPU", "target": 0.6, "plaudit": STEPS, "trl": STEPS,
    },
    "memory_gpu": {
        "date": "2026-11-15T01:02:03", "recipe": "recipes/some.toml",
        "placements": [PLACED, {**PLACED, "placement": "async", "error": "no GPU", "phases": {}, "planned": {}}],
    },
    "weights_gpu": {
        "date": "2026-11-15T01:02:03", "device": "GPU", "bytes": 2e9,
        "rows": [{"channel": "disk", "seconds": 2.0, "gb_per_s": 1.0, "limit": "write and read", "limit_seconds": 0.5},
                 {"channel": "shared", "seconds": 0.004, "gb_per_s": None, "limit": "message", "limit_seconds": 0.001}],
    },
}  # fmt: skip


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("plots")


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("smollm2_chain")


def finished_run(directory: Path, truths: list[float]) -> Path:
    """A run whose proxy rises by one at each of its evaluations."""
    directory.mkdir()
    log = EventLog(directory)
    for number, truth in enumerate(truths):
        heldout = {"heldout/reward": 1.0 * number, "heldout/truth": truth, "heldout/truth_se": 0.01}
        log.metric({**heldout, "mismatch/k3": 0.5 * number, "time/step": 2.0, "length/mean": 3.0}, step=10 * number)
    log.close()
    (directory / "summary.json").write_text(json.dumps({"steps": 10 * len(truths), "seconds": 9.0}))
    return directory


def parsed_svg(file: Path) -> tuple[ElementTree.Element, str]:
    root = ElementTree.parse(file).getroot()
    return root, "\n".join(text.text or "" for text in root.iter(f"{SVG}text"))


def test_each_plot_is_drawn_or_reported_as_missing(
    plots: ModuleType, chain: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, record in RECORDS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    plots.draw_all(tmp_path, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    missing = "smollm2-ppo-rm.svg: not drawn, there is no smollm2-ppo-rm.json"
    assert sorted([missing, *(file.name for file in tmp_path.glob("*.svg"))]) == sorted(lines)
    assert len(lines) == len(plots.PICTURES)

    run = chain.distilled(finished_run(tmp_path / "run", [0.1, 0.5, 0.9, 0.5, 0.3, 0.1]))
    (tmp_path / "smollm2-ppo-rm.json").write_text(json.dumps({"runs": {"smollm2-ppo-rm": run}}))
    plots.draw_all(tmp_path, tmp_path)
    assert "not drawn" not in capsys.readouterr().out
    for file in tmp_path.glob("*.svg"):
        root, words = parsed_svg(file)
        assert "2026-11-15" in words or file.stem == "smollm2-ppo-rm"
        width, height = (float(v) for v in root.attrib["viewBox"].split()[2:])
        for text in root.iter(f"{SVG}text"):
            assert 0 <= float(text.attrib["x"]) <= width
            assert 0 <= float(text.attrib["y"]) <= height
        for number in re.findall(r'(?:width|height|x|y)="(-?[\d.]+|nan|inf)"', file.read_text()):
            assert float(number) >= 0


def test_bar_lengths_are_proportional_to_their_values(plots: ModuleType) -> None:
    root = ElementTree.fromstring(plots.core(RECORDS["core_gpu"]))
    widths = {rect.attrib["fill"]: [] for rect in root.iter(f"{SVG}rect")}
    for rect in root.iter(f"{SVG}rect"):
        if rect.attrib["height"] == f"{plots.ROW - 6:.1f}":
            widths[rect.attrib["fill"]].append(float(rect.attrib["width"]))
    ours, others = widths[plots.BLUE], widths[plots.GREY]
    # The targets are to the right of the bars: 450 of 520, 520 of 620, 100 of 130, 180 of 300.
    full = ours[0] * 520 / 450
    assert ours == pytest.approx([full * 450 / 520, full * 520 / 620, full * 100 / 130, full * 180 / 300], abs=0.2)
    assert others[0] == pytest.approx(ours[0] / 5, abs=0.1)  # transformers' score


def test_a_rival_that_was_not_recorded_is_not_drawn(plots: ModuleType) -> None:
    assert "FastAPI" in plots.serving(RECORDS["serving_gpu"])
    assert "FastAPI" not in plots.serving({**RECORDS["serving_gpu"], "rivals": {}})


def test_memory_is_grouped_by_kind_and_evaluation_is_left_out(plots: ModuleType) -> None:
    assert plots.kinds(PLACED["phases"]["update"]) == {
        "other": 1, "weights": 1, "optimizer, masters": 2, "gradients": 0, "KV": 0, "activations": 0,
    }  # fmt: skip
    svg = plots.memory(RECORDS["memory_gpu"])
    assert "evaluate" not in svg
    assert "update" in svg


def test_ticks_are_round_and_cover_all_values(plots: ModuleType) -> None:
    assert plots.ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert plots.ticks(-0.37, 2.1, 5) == [-0.5, 0, 0.5, 1, 1.5, 2, 2.5]
    assert plots.ticks(0, 64.8, 8) == [0, 10, 20, 30, 40, 50, 60, 70]


def test_distilled_run_has_the_curves_means_and_start_of_overoptimisation(chain: ModuleType, tmp_path: Path) -> None:
    summary = chain.distilled(finished_run(tmp_path / "falls", [0.1, 0.5, 0.9, 0.5, 0.3, 0.1]))
    assert summary["over_optimised_from"] == 20  # 0.63, its mean with the points on either side, is the best
    assert summary["heldout/truth"] == [(0, 0.1), (10, 0.5), (20, 0.9), (30, 0.5), (40, 0.3), (50, 0.1)]
    assert summary["mean mismatch/k3"] == pytest.approx(1.25)
    assert summary["mean time/step"] == 2
    assert summary["summary"]["seconds"] == 9
    assert not any("length" in name for name in summary)
    assert chain.distilled(finished_run(tmp_path / "rises", [0.1, 0.2, 0.3, 0.4, 0.5]))["over_optimised_from"] is None
