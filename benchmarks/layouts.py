"""How far ten steps over ranks of every layout differ from those of one rank, on a CPU with gloo.

    python benchmarks/layouts.py

Runs tests/train/test_layouts.py in full: each kind of parallelism of the learner alone, colocated and with separate
engines, each pair as 2 x 2, each placement with an engine of two ranks; tiny Llama, Qwen3 and Qwen3-MoE; GRPO and PPO.
In two of the runs each kind of process is killed and stopped. Fails if samples differ from those of one rank, or a loss
differs by more than 1e-5. Writes benchmarks/results/layouts.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from stamp import processor, stamp

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "layouts.json"


def main() -> None:
    made = stamp(__file__, processor(), {})  # taken from the tree as it is now, not after all runs
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "rows.json"
        environment = {**os.environ, "PLAUDIT_SOAK": "1", "PLAUDIT_LAYOUTS": str(file), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "pytest", "-q", "tests/train/test_layouts.py", "--timeout", "3600"]
        code = subprocess.run(words, cwd=ROOT, env=environment).returncode
        rows = json.loads(file.read_text())
    table = Table("layout", "ranks", "largest difference of a loss", "of a weight", "resumed", "of a loss", "struck")
    for row in rows:
        again = row.get("resumed")
        after = (again["ranks"], f"{again['loss']:.1e}") if again else ("", "")
        struck = f"{len(row['strikes'])} times" if "strikes" in row else ""
        table.add_row(row["layout"], f"{row['ranks']}", f"{row['loss']:.1e}", f"{row['weight']:.1e}", *after, struck)
    Console(width=160).print(table)
    if code:
        raise SystemExit(code)
    RESULTS.write_text(json.dumps({**made, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
