"""Agents written with OpenAI's SDK train unchanged against the endpoint of the policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.interop.environments import ROOT, run_client

pytestmark = pytest.mark.interop


def test_the_agent_of_the_page_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if "openai" in block]
    found = run_client(".venv-interop", "openai_agent", {"directory": str(tmp_path), "code": code}, 300)
    own = found["recipe"]["samples"]
    assert len(own) == 16
    assert found["page"]["samples"] == found["streamed"]["samples"] == own, "whichever client asks: the same tokens"
    for run in found.values():
        assert run["errors"] == 0
        assert run["turns"] > 4
        assert run["mismatch"] < 1e-4
