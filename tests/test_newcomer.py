"""A new user's path: the wheel in an empty environment, the user's own files, the quickstart's commands unchanged.

From JSON lines to SFT, GRPO, a reward model, a server, scores and a search. Training takes a few steps here; with
PLAUDIT_SOAK (`make soak`) the whole page is run in full, and the result of training is checked.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.pages import BLOCKS, Block, commands
from tests.serve.process import free_port
from tests.test_wheel import Installed, environment, installed  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

FULL = bool(os.environ.get("PLAUDIT_SOAK"))
QUICKSTART = [block for block in BLOCKS if block.page == "docs/quickstart.md" and block.language == "bash"]
OWN_DATA = [block for block in QUICKSTART if "test_newcomer.py" in block.notes.get("not run", "")]
ROWS = 400 if FULL else 60
STEPS = ["--set", "train.steps=3", "--set", "data.eval_items=8", "--set", "train.warmup=1"]
COMMAND_SECONDS = 900.0


def write_data(directory: Path) -> None:
    """Sums of three numbers. Four in ten demonstrations end with a wrong number."""
    rng = random.Random(0)
    numbers = rng.sample([(a, b, c) for a in range(1, 10) for b in range(1, 10) for c in range(1, 10)], ROWS)
    rows: dict[str, list[dict[str, object]]] = {"answers": [], "prompts": [], "pairs": [], "rows": []}
    for a, b, c in numbers:
        prompt, right, wrong = f"{a}+{b}+{c}=", a + b + c, a + b + c + rng.choice((-2, -1, 1, 2))
        good, bad = (f"{a}+{b}={a + b};{a + b}+{c}={end};#{end}" for end in (right, wrong))
        rows["answers"].append({"prompt": prompt, "response": good if rng.random() < 0.6 else bad})
        rows["prompts"].append({"prompt": prompt, "answer": str(right)})
        rows["pairs"].append({"prompt": prompt, "chosen": good, "rejected": bad})
        rows["rows"].append({"prompt": prompt, "responses": [good, bad]})
    for name, lines in rows.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Shell:
    """Runs a page's commands one by one. Background commands (&) are terminated at the end."""

    def __init__(self, wheel: Installed) -> None:
        self.directory = wheel.directory
        binaries = wheel.python.parent
        self.environment = {**environment(), "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
        self.servers: list[subprocess.Popen[bytes]] = []
        self.ports = {"5555": str(free_port()), "5556": str(free_port())}

    def run(self, command: str) -> str:
        arguments = self._words(command)
        if arguments[-1] == "&":
            with (self.directory / "serve.log").open("ab") as log:
                self.servers.append(
                    subprocess.Popen(arguments[:-1], cwd=self.directory, env=self.environment, stdout=log, stderr=log)
                )
            return ""
        result = subprocess.run(
            arguments, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
        log = self.directory / "serve.log"
        output = result.stdout + result.stderr + (log.read_text() if log.exists() else "")
        assert result.returncode == 0, f"{shlex.join(arguments)}: {output}"
        return result.stdout

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait(60)

    def _words(self, command: str) -> list[str]:
        """The page's command with free ports; training is shortened unless PLAUDIT_SOAK is set."""
        for shown, replacement in self.ports.items():
            command = re.sub(rf"\b{shown}\b", replacement, command)
        arguments = shlex.split(command, comments=True)
        if arguments[:2] == ["plaudit", "serve"] and "--port" not in arguments:
            arguments[2:2] = ["--port", self.ports["5555"]]
        training = arguments[:2] == ["plaudit", "train"] and "--dry-run" not in arguments
        return arguments if FULL or not training else [*arguments, *STEPS]


@contextmanager
def shell(wheel: Installed) -> Iterator[Shell]:
    running_shell = Shell(wheel)
    try:
        yield running_shell
    finally:
        running_shell.close()


def run_page(blocks: list[Block], wheel: Installed) -> dict[str, str]:
    """The output of each command."""
    with shell(wheel) as running:
        return {command: running.run(command) for block in blocks for command in commands(block.text)}


def output_of(outputs: dict[str, str], start: str) -> str:
    (match,) = [output for command, output in outputs.items() if command.startswith(start)]
    return match


def test_quickstart_with_own_data_from_json_lines_to_a_search(installed: Installed) -> None:  # noqa: F811
    (block,) = OWN_DATA
    write_data(installed.directory)
    start = time.monotonic()
    others = [each for each in QUICKSTART if "pip install" not in each.text and not each.not_run]
    outputs = run_page([*(others if FULL else []), block], installed)
    assert "[data.sums]" not in output_of(outputs, "plaudit train my-sft.toml --dry-run")
    assert "model in runs/my-sft/final" in output_of(outputs, "plaudit train my-sft.toml --set")
    assert "model in runs/my-rl/final" in output_of(outputs, "plaudit train my-rl.toml")
    assert re.fullmatch(r"[0-9+=;#]+\n", output_of(outputs, "plaudit generate --model runs/my-rl"))
    scored = [json.loads(line) for line in output_of(outputs, "plaudit score").splitlines()]
    assert len(scored) == ROWS
    assert "best-of-n, width 8: 8 questions" in output_of(outputs, "plaudit search my-search.toml")
    if FULL:
        check_what_was_learned(installed.directory, scored)
        print(f"the whole page in {time.monotonic() - start:.0f} s")


def check_what_was_learned(directory: Path, scored: list[dict[str, list[float]]]) -> None:
    """The policy learned to be better than its demonstrations; the reward model ranks right above wrong."""
    rl = json.loads((directory / "runs" / "my-rl" / "summary.json").read_text())
    assert rl["reward_after"] >= 0.9 > rl["reward_before"]
    assert sum(right > wrong for right, wrong in (row["scores"] for row in scored)) >= 0.9 * len(scored)
    search = json.loads((directory / "runs" / "my-search" / "summary.json").read_text())
    assert search["accuracy"] >= 0.85
