"""Runs clients of other projects in separate virtual environments: a script talks to the server and prints JSON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"


def run_client(environment: str, script: str, inputs: dict[str, Any], seconds: float = 120) -> Any:
    """Run `clients/<script>.py` with `inputs` as JSON on standard input and return its last line, parsed as JSON. Skips
    the test if `make interop` has not created the environment."""
    return json.loads(_run(environment, [str(CLIENTS / f"{script}.py")], json.dumps(inputs), seconds).splitlines()[-1])


def run_module(environment: str, *arguments: str, seconds: float = 120) -> str:
    """The output of `python -m ...` in that environment."""
    return _run(environment, ["-m", *arguments], "", seconds)


def run_code(environment: str, code: str, seconds: float = 120) -> str:
    """The output of this Python code in that environment."""
    return _run(environment, ["-c", code], "", seconds)


def _run(environment: str, arguments: list[str], stdin: str, seconds: float) -> str:
    if not (ROOT / environment / ".installed").exists():
        pytest.skip(f"{environment} is not there: `make interop` makes it, and runs this")
    command = [str(ROOT / environment / "bin" / "python"), *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=seconds, env=variables, cwd=ROOT
    )
    assert done.returncode == 0, (
        f"{arguments} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout.strip()
