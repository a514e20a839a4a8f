"""Agents written with OpenAI's SDK train unchanged against the endpoint of the policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.interop.environments import ROOT, run_client

pytestmark = pytest.mark.interop


def test_documented_agent_trains_the_policy(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if "openai" in block]
    runs = run_client(".venv-interop", "openai_agent", {"directory": str(tmp_path), "code": code}, 300)
    samples = runs["recipe"]["samples"]
    assert len(samples) == 16
    assert runs["page"]["samples"] == runs["streamed"]["samples"] == samples, "whichever client asks: the same tokens"
    for run in runs.values():
        assert run["errors"] == 0
        assert run["turns"] > 4
        assert run["mismatch"] < 1e-4
