"""Every code block of README, CONTRIBUTING and docs/ is run, or the page states why not: see tests/pages.py.

Here: Python and curl against one server; commands in this process, with --dry-run for training and search, and only up
to the settings for serving; TOML and JSON by the parsers that read them. Training, serving and measuring are run in
full by tests/test_docs_slow.py.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from plaudit.cli import app
from plaudit.config import parse_recipe
from plaudit.config.keys import parse_keys
from plaudit.config.reward import parse_comparison, parse_reward
from plaudit.config.serve import parse_serve
from plaudit.config.shipped.catalog import recipe_text
from plaudit.plan.shape.hardware import Overrides
from tests.command import plaudit_here
from tests.pages import BLOCKS, ROOT, Block, blocks_of, commands, furnished
from tests.serve.process import ServerProcess

LANGUAGES = ("python", "bash", "toml", "json", "text", "")
COMMAND = re.compile(r"(plaudit [a-z]+( |$)|make |curl |pip |torchrun |python |from \w+ import |import )")
ADDRESS = re.compile(r"(?:http://)?(?:localhost|127\.0\.0\.1|node1|node2):5555")
IN_PROCESS = ("generate", "score", "deploy", "keys", "recipes", "init", "launch")


def of(language: str, *, run: bool = True) -> list[Any]:
    blocks = [block for block in BLOCKS if block.language == language and block.not_run is not run]
    return [pytest.param(b, id=str(b), marks=[pytest.mark.slow] if "slow" in b.notes else []) for b in blocks]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(None, *(f"--model={name}" for name in ("sums", "sums-steps", "sums-policy"))) as server:
        yield server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnished(tmp_path_factory.mktemp("reader"))


# The pages themselves


def test_every_block_has_a_known_language() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block}: nobody knows how to run {block.language!r}"
        if block.language in ("text", ""):
            command_lines = [line for line in block.text.splitlines() if COMMAND.match(line)]
            assert not command_lines, (
                f"{block}: {command_lines[0]!r} is a command or code; say bash or python behind the fence"
            )


def test_invalid_comment_before_a_block_is_rejected() -> None:
    (block,) = blocks_of("<!-- not run: needs a GPU -->\n\n```bash\nnvidia-smi\n```\n", "page.md")
    assert (block.notes, block.not_run, str(block)) == ({"not run": "needs a GPU"}, True, "page.md:3")
    for comment in ("not run:", "never run: because", "to do"):
        with pytest.raises(ValueError, match=r"page\.md:1: expected <!-- not run or slow or added to: "):
            blocks_of(f"<!-- {comment} -->\n```bash\nls\n```\n", "page.md")


def test_commands_can_span_lines() -> None:
    text = "curl x -d '{\n  \"a\": 1}'  # why\n# nothing\nplaudit plan \\\n  --model y\n"
    assert list(commands(text)) == ["curl x -d '{\n  \"a\": 1}'  # why", "plaudit plan \n  --model y"]


# Python


@pytest.mark.parametrize("block", of("python"))
def test_python_blocks_run(
    block: Block,
    server: ServerProcess,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    code = ADDRESS.sub(server.url, block.text).replace("RewardClient(model=", f'RewardClient("{server.url}", model=')
    exec(compile(code, str(block), "exec"), {"__name__": "page"})
    if block.after is not None:
        check_output(capsys.readouterr().out, block.after)


@pytest.mark.parametrize("block", of("python", run=False))
def test_python_blocks_that_are_not_run_are_valid(block: Block) -> None:
    ast.parse(block.text)


# Commands


@pytest.mark.parametrize("block", of("bash"))
def test_shell_commands_run(block: Block, server: ServerProcess, place: Path) -> None:
    for config in (b.text for b in BLOCKS if b.page == block.page and b.text.startswith("# serve.toml")):
        (place / "serve.toml").write_text(config)
    environment = {"KEY": "a-key-of-mine-1234", "ADMIN_KEY": "an-admin-key-1234", "SEED": "1", "S": "1"}
    output = "".join(run_command(command, server, place, environment) for command in commands(block.text))
    if block.after is not None and "curl " in block.text:
        check_output(output, block.after)


@pytest.mark.parametrize("block", of("bash", run=False))
def test_shell_commands_that_are_not_run_are_valid(block: Block) -> None:
    for command in commands(block.text):
        words = [word for word in shlex.split(re.sub(r"\$\w+", "1", command), comments=True) if word != "&"]
        if words[0] == "plaudit":
            parsed(words[1 : words.index(">") if ">" in words else None])


def run_command(command: str, server: ServerProcess, place: Path, environment: dict[str, str]) -> str:
    """Run a command of a page and return its output; fails if the command cannot work."""
    for name, value in environment.items():
        command = command.replace(f"${name}", value)
    words = [word for word in shlex.split(command, comments=True) if word != "&"]
    match words[0]:
        case "plaudit":
            return run_plaudit([ADDRESS.sub(server.url, word) for word in words[1:]], place)
        case "torchrun":
            parsed(words[words.index("plaudit") + 1 :])
            return ""
        case "pip":
            check_extras(words)
            return ""
        case ".ci/run":
            assert (ROOT / ".ci" / "run").is_file()
            return ""
        case "make":
            result = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
        case "curl":
            curl = ADDRESS.sub(server.url, command.replace("\n", " "))
            if " -sf " not in curl:  # exactly one of -f and --fail-with-body
                curl = curl.replace("curl ", "curl --fail-with-body ", 1)
            result = subprocess.run(
                ["bash", "-c", curl], capture_output=True, text=True, timeout=120
            )  # fmt: skip
        case _:
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
            result = subprocess.run(
                ["bash", "-c", command], cwd=place, env=env, capture_output=True, text=True, timeout=120
            )
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return f"{result.stdout.rstrip()}\n"


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a command, as the command line parses them."""
    group: Any = typer.main.get_command(app)
    name, command, rest = group.resolve_command(typer.Context(group), words)
    if hasattr(command, "commands"):
        name, command, rest = command.resolve_command(typer.Context(command), rest)
    with command.make_context(name, list(rest), resilient_parsing="--help" in rest) as context:
        return dict(context.params)


def run_plaudit(words: list[str], place: Path) -> str:
    from plaudit.critic.server import critic_table
    from plaudit.serve.options import serve_table

    words = words[: words.index(">")] if ">" in words else words
    options = parsed(words)
    if words[0] in ("serve", "critic") and "--help" not in words:
        os.chdir(place)
        if words[0] == "serve":
            options.pop("check")
            renamed = {"model": "models", "api_key": "api_keys", "alias": "aliases"}
            serve_table(**{renamed.get(name, name): value for name, value in options.items()})
        else:
            critic_table(options.pop("config"), options.pop("api_key"), options.pop("allow_open"), **options)
        return ""
    if words[0] in ("train", "search") and options["recipe"] is not None:
        words = [*words, *(["--dry-run"] if "--dry-run" not in words and "--help" not in words else [])]
    elif words[0] == "search":
        words = [*words, "--dry-run"]
    elif words[0] not in IN_PROCESS:
        return ""
    result = plaudit_here(*words, cwd=place)
    assert result.returncode == 0, f"plaudit {shlex.join(words)}: {result.stderr}"
    return result.stdout


def check_extras(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert extra in known, f"pip install names the extra {extra!r}; there are {sorted(known)}"


NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
IDENTITY = re.compile(r"[0-9a-f]{8}-\d+(?:-\d+)?|0-[0-9a-f]{12}|(?<=\"created\":)\d+|127\.0\.0\.1:\d+")


def check_output(output: str, shown: str) -> None:
    """Check that the output equals the page: `...` matches anything, ids match ids, and numbers agree to 1 %."""

    def normalised(text: str) -> str:
        return re.sub(r"\s+", "", IDENTITY.sub("ID", text))

    pattern, numbers = "", []
    for piece in re.split(r"(\.\.\.|-?\d+\.\d+(?:e-?\d+)?)", normalised(shown)):
        if piece == "...":
            pattern += ".*?"
        elif NUMBER.fullmatch(piece):
            pattern += r"(-?\d+\.?\d*(?:e-?\d+)?)"
            numbers.append(float(piece))
        else:
            pattern += re.escape(piece)
    match = re.fullmatch(pattern, normalised(output))
    assert match is not None, f"shown: {shown}\nprinted: {output}"
    for expected, printed in zip(numbers, match.groups(), strict=True):
        assert math.isclose(expected, float(printed), rel_tol=0.01, abs_tol=0.01), f"shown: {shown}\nprinted: {output}"


# Data


@pytest.mark.parametrize("block", of("toml"))
def test_toml_blocks_are_valid_for_their_purpose(block: Block, tmp_path: Path) -> None:
    tree = tomllib.loads(block.text)
    if "added to" in block.notes:
        parse_recipe({**tomllib.loads(recipe_text(block.notes["added to"])), **tree}, str(block))
    elif "task" in tree:
        parse_recipe(tree, str(block))
    elif tree.get("kind") == "comparison":
        parse_comparison(tree, str(block))
    elif "kind" in tree:
        parse_reward(tree, str(block))
    elif "models" in tree:
        parse_serve(tree, str(block))
    elif all(isinstance(entry, dict) and "sha256" in entry for entry in tree.values()):
        parse_keys(tree, str(block))
    elif "accelerator" in tree:
        (tmp_path / "own.toml").write_text(block.text)
        Overrides.read(tmp_path / "own.toml")
    else:
        raise AssertionError(f"{block} is no recipe, reward, server, keys or hardware; say <!-- added to: RECIPE -->")


@pytest.mark.parametrize("block", of("json"))
def test_json_blocks_are_valid(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)
