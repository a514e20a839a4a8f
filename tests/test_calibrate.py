"""Calibration of this machine: a file that the planner reads, with plausible figures."""

from pathlib import Path

import pytest

from plaudit.plan import Constants, cluster
from plaudit.plan.shape.hardware import Overrides


@pytest.mark.slow
def test_cpu_calibration_gives_plausible_planner_constants(tmp_path: Path) -> None:
    from plaudit.calibrate import measure

    (tmp_path / "machine.toml").write_text(measure("cpu"))
    overrides = Overrides.read(tmp_path / "machine.toml")
    chip, constants = cluster("1x1xthis-machine", overrides).accelerator, Constants().changed(overrides.constants)
    assert chip.bf16 > 1e9
    assert chip.bandwidth > 1e8
    assert 1.0 <= constants.heap_factor < 3.0
    assert constants.reserve_bytes > 5e7
    assert 0 < constants.layer_seconds < 1
    assert 1.0 <= constants.activation_passes < 100
