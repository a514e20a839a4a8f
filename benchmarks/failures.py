"""Failures under 64 clients: which process is killed, and the time until everything is ready again.

    python benchmarks/failures.py [test_ranks.py test_replicas.py test_ray.py]

Runs the tests that kill (SIGKILL) and stop (SIGSTOP) ranks, pipeline stages, replicas, Ray Serve's replicas and its
controller under load, and that swap versions meanwhile. Every reply is compared with the right scores of the version it
names: a lost, duplicated or wrong item fails the test. Writes benchmarks/results/failures.json; entries for files that
are not named are kept.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "failures.json"
FILES = ("test_ranks.py", "test_replicas.py", "test_ray.py")
LOADED = "under_load or killed_or_stopped"


def run(name: str) -> list[dict[str, Any]]:
    """Runs the tests of a file and returns what each reported and whether it passed."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "tests.xml"
        options = ("-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={file}", "-k", LOADED)
        environment = {**os.environ, "PLAUDIT_SOAK": "1", "OMP_NUM_THREADS": "1"}
        path = str(ROOT / "tests" / "serve" / name)
        subprocess.run([sys.executable, "-m", "pytest", *options, path], cwd=ROOT, env=environment, check=False)
        cases = list(ElementTree.parse(file).iter("testcase"))
    results = []
    for case in cases:
        numbers = {each.attrib["name"]: json.loads(each.attrib["value"]) for each in case.iter("property")}
        passed = not any(child.tag in ("failure", "error", "skipped") for child in case)
        results.append({"test": f"{Path(name).stem}.{case.attrib['name']}", "passed": passed, **numbers})
    return results


def main() -> None:
    named = sys.argv[1:] or FILES
    tests: list[dict[str, Any]] = json.loads(RESULTS.read_text())["tests"] if RESULTS.exists() else []
    for name in named:
        tests = [test for test in tests if not test["test"].startswith(f"{Path(name).stem}.")] + run(name)
        result = {
            "tests": tests, "answered": sum(test.get("answered", 0) for test in tests),
            "failed": sum(not test["passed"] for test in tests), "cores": os.cpu_count(),
            "machine": platform.processor() or platform.machine(), "date": datetime.now(UTC).date().isoformat(),
        }  # fmt: skip
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    sys.exit(result["failed"] > 0)


if __name__ == "__main__":
    main()
