"""Training in packaged environments of other projects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.environments import ROOT, run_client

pytestmark = pytest.mark.interop


def test_policy_trains_in_an_openenv_environment(tmp_path: Path) -> None:
    if not (ROOT / ".venv-interop" / ".openenv").exists():
        pytest.skip("OpenEnv is not there: `make interop` installs it, and runs this")
    result = run_client(".venv-interop", "openenv_environment", {"directory": str(tmp_path)}, 600)
    assert result["reward/errors"] == [0.0] * 4
    rewards = result["turns/reward"]
    assert rewards[-1] > rewards[0], "longer messages are worth more there, and the policy learns it"
    sample = result["sample"]
    first, question = sample["mask"].index(0), sample["text"].split("=")[0] + "="
    assert sample["token_rewards"][first - 1] == pytest.approx(min(0.1 * len(question), 1.0)), "its own rule"
    assert sample["text"].startswith(question + question), "it echoes"
    assert "the observation has no field 'said', it has ['echoed_message'" in result["failed"]
