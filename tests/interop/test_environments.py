"""Packaged environments of other projects, used in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.environments import ROOT, run_client

pytestmark = pytest.mark.interop


def test_an_environment_of_openenv_trains(tmp_path: Path) -> None:
    if not (ROOT / ".venv-interop" / ".openenv").exists():
        pytest.skip("OpenEnv is not there: `make interop` installs it, and runs this")
    found = run_client(".venv-interop", "openenv_environment", {"directory": str(tmp_path)}, 600)
    assert found["reward/errors"] == [0.0] * 4
    rewards = found["turns/reward"]
    assert rewards[-1] > rewards[0], "longer messages are worth more there, and the policy learns it"
    sample = found["sample"]
    first, own = sample["mask"].index(0), sample["text"].split("=")[0] + "="
    assert sample["token_rewards"][first - 1] == pytest.approx(min(0.1 * len(own), 1.0)), "its own rule"
    assert sample["text"].startswith(own + own), "it echoes"
    assert "the observation has no field 'said', it has ['echoed_message'" in found["failed"]
