"""Records how a result file was made: script, date, commit, machine, and version and settings of each rival that the
script ran. Pages show no rival's figure without it (benchmarks/rival_tables.py)."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def stamp(script: str, machine: str, rivals: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """script: a file name in benchmarks/. rivals: version and settings by name; for a package in this interpreter,
    `version("transformers")` is its version."""
    return {
        "script": f"benchmarks/{Path(script).name}", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(), "machine": machine, "python": platform.python_version(), "torch": version("torch"),
        "rivals": {name: {"version": number, "settings": how} for name, (number, how) in rivals.items()},
    }  # fmt: skip


def commit() -> str:
    """Commit of the working tree; the variable COMMIT gives it if the tree was copied without its history, or with
    another's."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    number = os.environ.get("COMMIT") or done.stdout.strip()
    if not number:
        raise SystemExit("this copy of the tree has no git history: set COMMIT to the commit that it was copied from")
    return number


def processor() -> str:
    """The CPU model and its number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores"


def versions(python: str | Path, packages: Iterable[str]) -> dict[str, str]:
    """Versions of these packages in another environment."""
    code = (
        "import json, platform, sys\nfrom importlib.metadata import version, PackageNotFoundError\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n    try: found[name] = version(name)\n    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([str(python), "-c", code, *packages], capture_output=True, check=True)
    installed: dict[str, str] = json.loads(done.stdout)
    return installed
