"""Calibration of this machine: a file that the planner reads, with plausible figures."""

from pathlib import Path

import pytest

from plaudit.plan import Constants, cluster
from plaudit.plan.shape.hardware import Overrides


@pytest.mark.slow
def test_what_is_measured_on_a_cpu_is_a_machine_to_plan_with(tmp_path: Path) -> None:
    from plaudit.calibrate import measure

    (tmp_path / "machine.toml").write_text(measure("cpu"))
    found = Overrides.read(tmp_path / "machine.toml")
    chip, fixed = cluster("1x1xthis-machine", found).accelerator, Constants().changed(found.constants)
    assert chip.bf16 > 1e9
    assert chip.bandwidth > 1e8
    assert 1.0 <= fixed.heap_factor < 3.0
    assert fixed.reserve_bytes > 5e7
    assert 0 < fixed.layer_seconds < 1
    assert 1.0 <= fixed.activation_passes < 100
