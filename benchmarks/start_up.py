"""Start-up cost of a command that computes nothing: CPU seconds of its process, user and system.

    python benchmarks/start_up.py [--quick]

CPU seconds, because other load on the machine changes them little; the minimum of the repeats is closest to an idle
core, the median is typical of this machine. Writes benchmarks/results/start_up.json, unless --quick.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from stamp import processor, stamp

RESULTS = Path(__file__).resolve().parent / "results" / "start_up.json"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "plaudit --help": ["-m", "plaudit", "--help"],
    "plaudit plan --help": ["-m", "plaudit", "plan", "--help"],
    "plaudit recipes": ["-m", "plaudit", "recipes"],
    "plaudit plan": ["-m", "plaudit", "plan", "--model", "llama-3.1-8b", "--hardware", "1x8xH100"],
    "plaudit train sums-grpo --dry-run": ["-m", "plaudit", "train", "sums-grpo", "--dry-run"],
}
AIM = 0.3


def seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rows = []
    for name, arguments in COMMANDS.items():
        seconds(arguments)  # compiles missing bytecode first
        every = sorted(seconds(arguments) for _ in range(3 if args.quick else 15))
        rows.append({"command": name, "least": every[0], "median": statistics.median(every), "most": every[-1]})
        print(f"{name:36} {every[0]:.3f} s of CPU, median {rows[-1]['median']:.3f}, most {every[-1]:.3f}")
    if not args.quick:
        RESULTS.write_text(json.dumps({**stamp(__file__, processor(), {}), "aim": AIM, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
