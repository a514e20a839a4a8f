"""Two servers restart one after the other behind the real nginx and HAProxy, with the files of deploy/."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import rolling_restart

pytestmark = pytest.mark.slow
REQUESTS = 1000


@pytest.mark.parametrize("proxy", rolling_restart.PROXIES)
def test_no_request_is_lost(proxy: str) -> None:
    program = rolling_restart.PROXIES[proxy][0]
    if program in rolling_restart.missing():
        warnings.warn(f"{program} is not installed: rolling restarts behind it are not tested", stacklevel=1)
        pytest.skip(f"{program} is not installed: apt-get install {program}")
    result = rolling_restart.rolling_restart(proxy, REQUESTS)
    assert result["requests"] >= REQUESTS
    assert result["lost"] == 0, result
