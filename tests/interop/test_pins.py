"""plaudit-client installs together with what other projects pin: pip resolves versions of all, from wheels only.

A resolution takes two minutes: one project per day (tests/rotation.py), all of them in `make soak`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rotation import in_turn
from tests.test_client_package import wheel  # noqa: F401 - the fixture

pytestmark = pytest.mark.interop
ALL_PINS = sorted((Path(__file__).parent / "pins").glob("*.txt"))
PINS = [file for number, file in enumerate(ALL_PINS) if in_turn(number, len(ALL_PINS))]
NO_NETWORK = ("Failed to establish a new connection", "Connection refused", "Name or service not known", "timed out")


@pytest.mark.parametrize("pins", PINS, ids=lambda file: file.stem)
def test_client_resolves_together_with_the_pins_of_a_project(pins: Path, wheel: Path, tmp_path: Path) -> None:  # noqa: F811
    command = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--quiet",
        "--disable-pip-version-check", "--target", str(tmp_path), "--report", str(tmp_path / "report.json"),
        "-r", str(pins), str(wheel),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if any(message in result.stderr for message in NO_NETWORK):
        pytest.skip(f"NO NETWORK: whether plaudit-client resolves beside {pins.stem} was not tested")
    assert result.returncode == 0, result.stderr[-2000:]
    assert '"name": "plaudit-client"' in (tmp_path / "report.json").read_text()
