"""The shipped constants against the published measurements that come with the repository: no change may lose them."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_shipped_constants_reach_the_targets() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks/planner_validation.py", "--shipped"], capture_output=True, text=True, cwd=ROOT,
        timeout=240, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    table = run.stdout.split("\nmetric")[0]
    for target in ("step time", "TPOT, dense", "training", "weight sync", "memory", "order"):
        assert re.search(rf"^{target} .*%", table, re.MULTILINE), table
    assert "MISSED" not in table, table
    assert "could not be planned" in run.stdout


def test_a_file_of_other_rows_is_read(tmp_path: Path) -> None:
    whole = (ROOT / "benchmarks/data/validation.csv").read_text().splitlines()
    own = tmp_path / "own.csv"
    own.write_text("\n".join([whole[0], *[line for line in whole if ",tpot," in line][:20]]) + "\n")
    run = subprocess.run(
        [sys.executable, "benchmarks/planner_validation.py", "--shipped", "--csv", str(own)], capture_output=True,
        text=True, cwd=ROOT, timeout=120, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "20 rows" in run.stdout
