"""Every code block of the README is run: what it shows is what a reader gets."""

import json
import os
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from plaudit.config import parse_recipe
from tests.serve.process import ServerProcess

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # `plaudit` is the one of this environment, whether or not the environment is activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=README.parent)


def test_python_blocks_print_what_the_text_block_after_them_says() -> None:
    shown = pairwise(BLOCKS)
    pairs = [(code, text) for (name, code), (after, text) in shown if name == "python" and after == "text"]
    assert len(pairs) == len(blocks("python")) > 0
    for code, expected in pairs:
        done = run([sys.executable, "-c", code])
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


@pytest.mark.parametrize(
    "line", [line for text in blocks("bash") for line in text.splitlines() if not line.startswith("pip install")]
)
def test_bash_lines_run(line: str) -> None:
    done = run(["bash", "-c", line])
    assert done.returncode == 0, done.stderr


def test_the_server_answers_as_shown() -> None:
    (block,) = blocks("sh")
    start, _, ask = block.partition("\n")
    assert start == "plaudit serve &"
    with ServerProcess() as server:
        done = run(["bash", "-c", ask.replace("localhost:5555", f"127.0.0.1:{server.port}")])
    right, wrong = json.loads(done.stdout)["items"][0]["scores"]
    assert right > wrong


def test_the_recipe_is_one() -> None:
    for text in blocks("toml"):
        parse_recipe(tomllib.loads(text), "README.md")


def test_the_tree_is_the_tree() -> None:
    (tree,) = [text for name, text in BLOCKS if not name and "plaudit/\n" in text]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ")}
    there = {
        p.name for p in (README.parent / "plaudit").iterdir() if not p.name.startswith("_") and p.name != "py.typed"
    }
    assert named == there


def test_links_lead_somewhere() -> None:
    for page in (README, *README.parent.glob("*.md"), *README.parent.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
