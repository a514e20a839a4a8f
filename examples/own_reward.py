"""RL with a custom reward: the share of correct steps of a sum, plus a bonus for the right answer."""

from __future__ import annotations

import re
import sys

from plaudit import train


def reward(prompt: str, response: str, truth: str) -> float:
    steps = re.findall(r"(\d+)\+(\d+)=(\d+)", response)
    right = sum(int(a) + int(b) == int(c) for a, b, c in steps)
    return right / max(1, len(steps)) + float(response.endswith(f"#{truth}"))


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    run = train("sums-grpo", steps=steps, reward=reward, out="runs/own-reward", fresh=True)
    print(f"right answers: {run.summary['accuracy_before']:.0%} -> {run.summary['accuracy_after']:.0%}")
    print(run.engine().generate("8+7+6=")[0].text)
    print(f"plaudit report {run.directory} shows the whole run")
