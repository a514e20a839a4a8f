"""Writes docs/accelerators.md: questions of accelerator choice, the commands that answer them, and their output."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "accelerators.md"
HEAD = """# Which accelerators, and how many

Questions of accelerator choice, answered by [the planner](planner.md). Commands and their output are written by
`python docs/accelerators.py`, and `tests/plan/test_answers.py` runs them again and checks what the answers say. They
are predictions: [how far to trust them](planner.md#how-far-to-trust-it). Prices move; give yours with `--price`.
"""
QUESTIONS = (
    (
        "Wider or larger accelerators?",
        "Larger first, as long as the price of a token stays: eight B200 do a step of an 8B model about as "
        "fast as two to three times as many H100, for nearly the same dollars per token. Wider costs more per "
        "token on every accelerator, since tails of generation, the fixed costs of decode and communication "
        "do not shrink with more devices. So take the largest accelerator at a good price, and more nodes "
        "only for the time of a step.",
        "plaudit plan --model llama-3.1-8b --sweep nodes --hardware 3x8xH100 --compare H100,B200",
    ),
    (
        "What does utilisation do?",
        "The price of a token goes with its inverse, in training and in serving: half-used devices double it, "
        "which is more than most differences between accelerators. What partial load gives back in serving is "
        "speed for each user: with fewer sequences together a token comes sooner. At full load the last part "
        "of the rate is bought with much more waiting.",
        "plaudit plan --model llama-3.1-8b --hardware 1x8xH100 --utilisation 0.2..1.0",
    ),
    (
        "Which part of RLHF on which chip?",
        "Generation is bound by memory, training by products. From H100 to H200, which has the same units and "
        "1.4 times the bandwidth with more memory, engines give more tokens for a dollar and training gains "
        "less: an accelerator with much memory and bandwidth is the one to generate on, one with a good price "
        "for its FLOP/s the one to train on. `--generation-hardware 1x8xH200` plans such a pair.",
        "plaudit plan --model llama-3.1-8b --hardware 1x8xH100 --compare H100,H200,B200 --utilisation 1.0 "
        "--price owned",
    ),
    (
        "When are separate pools worth it?",
        "When there are enough nodes that pools of whole nodes can be in balance. For 70B on one, two and "
        "four nodes of H100, taking turns on all devices (`hybrid`) is faster and costs less a token ...",
        "plaudit plan --model llama-3.1-70b --sweep nodes --hardware 8x8xH100 --placement hybrid",
    ),
    (
        "",
        "... and on six and eight, two pools at the same time (`async`) are faster and cheaper; on three, one "
        "that generates and two that train, both are about even. Pools pay with responses that are one update old. "
        "Our own trainer's stages with FSDP inside, on up to three nodes with the optimizer in host memory, are the "
        "fastest of any software's in all rows but one.",
        "plaudit plan --model llama-3.1-70b --sweep nodes --hardware 8x8xH100 --placement async",
    ),
    (
        "And a pool for prefill?",
        "Rarely in RLHF: eight responses share a prompt, so that prefill is a small part of generation, and a pool "
        "of its own saves less than its smallest size costs. With long prompts and one response to each the two "
        "are about even. `--pools 60` sizes every pool for a step of at most 60 s, each on the accelerator that costs "
        "least there, and sets two pools and one kind of accelerator beside it. Pools are planned by the figures of "
        "other software, the one kind also by our own trainer's.",
        "plaudit plan --model llama-3.1-70b --pools 60 --compare H100,H200,B200 --price owned",
    ),
)  # fmt: skip
NOTE = "<!-- not run: tests/plan/test_answers.py runs it and compares what it prints -->"


def run(command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def page(output: Callable[[str], str] = run) -> str:
    parts = [HEAD]
    for title, answer, command in QUESTIONS:
        printed = "\n".join(line.rstrip() for line in output(command).splitlines())
        parts += [f"## {title}\n"] if title else []
        parts += [f"{_wrapped(answer)}\n", f"{NOTE}\n```bash\n{command}\n```\n", f"```text\n{printed}\n```\n"]
    return "\n".join(parts)


def _wrapped(text: str) -> str:
    return re.sub(r"(.{1,120})(?: +|$)", lambda line: line[1] + "\n", text).rstrip()


if __name__ == "__main__":
    PAGE.write_text(page())
