"""plaudit-client installs beside what other projects pin: a resolver finds versions of all, from wheels only.

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
EVERY = sorted((Path(__file__).parent / "pins").glob("*.txt"))
PINS = [file for number, file in enumerate(EVERY) if in_turn(number, len(EVERY))]
NO_NETWORK = ("Failed to establish a new connection", "Connection refused", "Name or service not known", "timed out")


@pytest.mark.parametrize("pins", PINS, ids=lambda file: file.stem)
def test_it_resolves_beside_the_pins_of(pins: Path, wheel: Path, tmp_path: Path) -> None:  # noqa: F811
    words = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--quiet",
        "--disable-pip-version-check", "--target", str(tmp_path), "--report", str(tmp_path / "report.json"),
        "-r", str(pins), str(wheel),
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    if any(sign in done.stderr for sign in NO_NETWORK):
        pytest.skip(f"NO NETWORK: whether plaudit-client resolves beside {pins.stem} was not tested")
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"name": "plaudit-client"' in (tmp_path / "report.json").read_text()
