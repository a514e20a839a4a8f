"""A newcomer's path: the wheel in an empty environment, one's own files, the quickstart's commands unchanged.

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
    """Sums of three numbers. Of the demonstrations four in ten end with a wrong number."""
    draw = random.Random(0)
    numbers = draw.sample([(a, b, c) for a in range(1, 10) for b in range(1, 10) for c in range(1, 10)], ROWS)
    rows: dict[str, list[dict[str, object]]] = {"answers": [], "prompts": [], "pairs": [], "rows": []}
    for a, b, c in numbers:
        prompt, right, wrong = f"{a}+{b}+{c}=", a + b + c, a + b + c + draw.choice((-2, -1, 1, 2))
        good, bad = (f"{a}+{b}={a + b};{a + b}+{c}={end};#{end}" for end in (right, wrong))
        rows["answers"].append({"prompt": prompt, "response": good if draw.random() < 0.6 else bad})
        rows["prompts"].append({"prompt": prompt, "answer": str(right)})
        rows["pairs"].append({"prompt": prompt, "chosen": good, "rejected": bad})
        rows["rows"].append({"prompt": prompt, "responses": [good, bad]})
    for name, lines in rows.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Shell:
    """Runs a page's commands one by one. Those that end with & are ended when all is done."""

    def __init__(self, wheel: Installed) -> None:
        self.directory = wheel.directory
        binaries = wheel.python.parent
        self.environment = {**environment(), "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
        self.servers: list[subprocess.Popen[bytes]] = []
        self.ports = {"5555": str(free_port()), "5556": str(free_port())}

    def run(self, command: str) -> str:
        words = self._words(command)
        if words[-1] == "&":
            with (self.directory / "serve.log").open("ab") as log:
                self.servers.append(
                    subprocess.Popen(words[:-1], cwd=self.directory, env=self.environment, stdout=log, stderr=log)
                )
            return ""
        done = subprocess.run(
            words, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
        log = self.directory / "serve.log"
        said = done.stdout + done.stderr + (log.read_text() if log.exists() else "")
        assert done.returncode == 0, f"{shlex.join(words)}: {said}"
        return done.stdout

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait(60)

    def _words(self, command: str) -> list[str]:
        """The page's command, at ports that are free here; a training is short unless all is to be run in full."""
        for shown, free in self.ports.items():
            command = re.sub(rf"\b{shown}\b", free, command)
        words = shlex.split(command, comments=True)
        if words[:2] == ["plaudit", "serve"] and "--port" not in words:
            words[2:2] = ["--port", self.ports["5555"]]
        training = words[:2] == ["plaudit", "train"] and "--dry-run" not in words
        return words if FULL or not training else [*words, *STEPS]


@contextmanager
def shell(wheel: Installed) -> Iterator[Shell]:
    started = Shell(wheel)
    try:
        yield started
    finally:
        started.close()


def run_page(blocks: list[Block], wheel: Installed) -> dict[str, str]:
    """What each command printed."""
    with shell(wheel) as running:
        return {command: running.run(command) for block in blocks for command in commands(block.text)}


def printed(said: dict[str, str], start: str) -> str:
    (found,) = [output for command, output in said.items() if command.startswith(start)]
    return found


def test_own_data_from_json_lines_to_a_search(installed: Installed) -> None:  # noqa: F811
    (block,) = OWN_DATA
    write_data(installed.directory)
    began = time.monotonic()
    others = [each for each in QUICKSTART if "pip install" not in each.text and not each.not_run]
    said = run_page([*(others if FULL else []), block], installed)
    assert "[data.sums]" not in printed(said, "plaudit train my-sft.toml --dry-run")
    assert "model in runs/my-sft/final" in printed(said, "plaudit train my-sft.toml --set")
    assert "model in runs/my-rl/final" in printed(said, "plaudit train my-rl.toml")
    assert re.fullmatch(r"[0-9+=;#]+\n", printed(said, "plaudit generate --model runs/my-rl"))
    scored = [json.loads(line) for line in printed(said, "plaudit score").splitlines()]
    assert len(scored) == ROWS
    assert "best-of-n, width 8: 8 questions" in printed(said, "plaudit search my-search.toml")
    if FULL:
        check_what_was_learned(installed.directory, scored)
        print(f"the whole page in {time.monotonic() - began:.0f} s")


def check_what_was_learned(directory: Path, scored: list[dict[str, list[float]]]) -> None:
    """The policy learned from rewards what its demonstrations did not show it; the reward model tells the two apart."""
    rl = json.loads((directory / "runs" / "my-rl" / "summary.json").read_text())
    assert rl["reward_after"] >= 0.9 > rl["reward_before"]
    assert sum(right > wrong for right, wrong in (row["scores"] for row in scored)) >= 0.9 * len(scored)
    search = json.loads((directory / "runs" / "my-search" / "summary.json").read_text())
    assert search["accuracy"] >= 0.85
