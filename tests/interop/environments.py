"""Other projects' clients live in environments of their own: a script there talks to the server and prints JSON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"


def run_client(environment: str, script: str, given: dict[str, Any], seconds: float = 120) -> Any:
    """What `clients/<script>.py` printed as its last line, after it read `given` as JSON. Skips where `make interop`
    has not made the environment."""
    return json.loads(_run(environment, [str(CLIENTS / f"{script}.py")], json.dumps(given), seconds).splitlines()[-1])


def run_module(environment: str, *arguments: str, seconds: float = 120) -> str:
    """What `python -m ...` of that environment printed."""
    return _run(environment, ["-m", *arguments], "", seconds)


def run_code(environment: str, code: str, seconds: float = 120) -> str:
    """What this Python printed."""
    return _run(environment, ["-c", code], "", seconds)


def _run(environment: str, arguments: list[str], given: str, seconds: float) -> str:
    if not (ROOT / environment / ".installed").exists():
        pytest.skip(f"{environment} is not there: `make interop` makes it, and runs this")
    command = [str(ROOT / environment / "bin" / "python"), *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=seconds, env=variables, cwd=ROOT
    )
    assert done.returncode == 0, (
        f"{arguments} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout.strip()
