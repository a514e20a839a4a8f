"""The pages' commands that train, search, serve, plan and measure, as short as possible.

A training run takes one step and a search a few questions. Servers with --config use the reader's own models, so
tests/test_docs.py only reads their settings. tests/train/test_ranks.py and similar files test what torchrun starts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.command import plaudit_here
from tests.pages import BLOCKS, Block, commands, furnished
from tests.serve.process import ServerProcess
from tests.test_docs import ADDRESS, parsed

pytestmark = pytest.mark.slow
HEAVY = ("train", "search", "serve", "plan", "bench", "pairs", "steps", "report")
ONE_STEP = ["--set", "train.steps=1"]


def words_of(block: Block) -> list[list[str]]:
    argument_lists = []
    for command in commands(block.text):
        words = [w for w in shlex.split(re.sub(r"\$\w+", "1", command), comments=True) if w != "&"]
        if words[:1] == ["plaudit"] and words[1] in HEAVY and not {"--help", "--dry-run"} & set(words):
            argument_lists.append(words[1:])
    return argument_lists


BLOCKS_RUN = [pytest.param(b, id=str(b)) for b in BLOCKS if b.language == "bash" and not b.not_run and words_of(b)]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnished(tmp_path_factory.mktemp("reader"))


@pytest.mark.parametrize("block", BLOCKS_RUN)
def test_commands_of_a_page_run(block: Block, place: Path, server: ServerProcess) -> None:
    for words in words_of(block):
        if words[0] == "serve":
            serve(words, place)
            continue
        prepare(words, place)
        if "--resume" in words:  # create the run that is to be resumed
            first = ["--fresh" if word == "--resume" else word for word in words]
            assert plaudit_here(*shortened(first, server), cwd=place).returncode == 0
        words = shortened([ADDRESS.sub(server.url, word) for word in words], server)
        result = plaudit_here(*words, cwd=place)
        assert result.returncode == 0, f"plaudit {shlex.join(words)}: {result.stderr}"


def serve(words: list[str], place: Path) -> None:
    options = parsed(words)
    models = [name for name in options["model"] if "/" not in name]
    if options["config"] is not None or len(models) < len(options["model"]):
        return  # the reader's own models
    at = words.index("--port") if "--port" in words else len(words)
    words = [*words[1:at], *words[at + 2 :]]
    if "--api-key-file" in words:  # created by the lines above; the server runs in another directory
        file = words.index("--api-key-file") + 1
        words[file] = str(place / words[file])
        assert plaudit_here("keys", "add", "ann", "--file", words[file], cwd=place).returncode == 0
    with ServerProcess(None, *words) as started:
        assert started.ready()


def prepare(words: list[str], place: Path) -> None:
    """Create the runs that a command expects to exist."""
    for previous, name in pairwise(words):
        if not name.startswith("runs/") or previous == "--out" or (place / name).exists():
            continue
        method = re.fullmatch(r"runs/search-(.*)", name)
        arguments = ["train", "sums-grpo", *ONE_STEP, "--set", "train.dump=true"]
        if method:
            arguments = ["search", "--method", method[1], "--questions", "2", "--width", "4"]
        result = plaudit_here(*arguments, "--out", name, cwd=place)
        assert result.returncode == 0, result.stderr


def shortened(words: list[str], server: ServerProcess) -> list[str]:
    if words[0] == "train" and "--replay" not in words:
        address = ["--set", f"reward.url={server.url}"] if "sums-ppo" in words else []
        again = [] if {"--resume", "--fresh"} & set(words) else ["--fresh"]
        return [*words, *ONE_STEP, *address, *again]
    if words[0] == "search":
        at = words.index("--questions") if "--questions" in words else len(words)
        return [*words[:at], *words[at + 2 :], "--questions", "2", "--fresh"]
    return ["bench", "weights", "--parameters", "1M"] if words[:2] == ["bench", "weights"] else words
