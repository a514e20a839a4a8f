"""CPU time and rate of a function rule, by the process that its calls share: python benchmarks/function_rules.py

Every setting in turn, three times, so that the load of the machine affects all of them alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import product
from pathlib import Path

import psutil

from plaudit.config.reward import RuleTable
from plaudit.records import Item
from plaudit.reward import RuleReward

FUNCTION = "def length(prompt, response, truth):\n    return len(response)\n"
ITEMS = [Item(prompt="q" * 200, response="x" * (number % 500)) for number in range(2000)]


def cpu_seconds() -> float:
    """Of this process and its children, including those that have ended."""
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (this, *this.children(recursive=True)))


def measure(file: Path, fork: str, sandbox: bool) -> tuple[float, float]:
    """CPU microseconds a response, and responses a second."""
    table = RuleTable(rule="function", function=f"{file}:length", fork=fork, sandbox=sandbox, processes=2)  # type: ignore[arg-type]
    reward = RuleReward(table)
    try:
        reward.score(ITEMS[:64])
        cpu, began = cpu_seconds(), time.perf_counter()
        results = reward.score(ITEMS)
        seconds, used = time.perf_counter() - began, cpu_seconds() - cpu
    finally:
        reward.close()
    assert [result.value for result in results] == [float(number % 500) for number in range(len(ITEMS))]  # type: ignore[union-attr]
    return 1e6 * used / len(ITEMS), len(ITEMS) / seconds


def main() -> None:
    settings = list(product(("response", "batch", "never"), (True, False)))
    figures: dict[tuple[str, bool], list[tuple[float, float]]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rules.py"
        file.write_text(FUNCTION)
        for _ in range(3):
            for fork, sandbox in settings:
                figures[fork, sandbox].append(measure(file, fork, sandbox))
    for (fork, sandbox), found in figures.items():
        cpu, rate = (statistics.median(values) for values in zip(*found, strict=True))
        print(f"{fork:8} {'sandbox' if sandbox else 'no sandbox':10} {cpu:6.0f} µs CPU a response {rate:8.0f} a second")


if __name__ == "__main__":
    main()
