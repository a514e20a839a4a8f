"""Rules: their scores, and that a failing rule fails only its own item."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from plaudit.config.reward import RuleTable, parse_reward
from plaudit.errors import ConfigError
from plaudit.records import Item, Score
from plaudit.reward import RuleReward

FUNCTIONS = """
import os, subprocess, sys, time

def length(prompt, response, truth):
    return len(response)

def seen(prompt, response, truth):
    return float([prompt, response, truth] == [[{"role": "user", "content": "q"}], "ab", {"x": [1, None]}])

def odd(prompt, response, truth):
    if response == "loop":
        while True: pass
    if response == "sleep":
        time.sleep(1000)
    if response == "raise":
        raise ValueError("cannot open /home/somebody/secret/file.txt\\nor so")
    if response == "exit":
        sys.exit(0)
    if response == "die":
        os._exit(9)
    if response == "deep":
        return odd(prompt, response, truth)
    if response == "print":
        print("x" * 10_000_000)
        os.write(1, b"12345\\n")
    if response == "wide":
        return "w" * 50_000_000
    if response == "memory":
        raise MemoryError
    if response == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        time.sleep(1000)
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "huge": 10**400, "true": True,
            "list": [1.0]}.get(response, 0.25)

not_a_function = 3
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rules") / "my_rules.py"
    file.write_text(FUNCTIONS)
    return file


@contextmanager
def rule(**keys: Any) -> Iterator[RuleReward]:
    table = parse_reward({"kind": "rule", **keys}, "test")
    assert isinstance(table, RuleTable)
    reward = RuleReward(table)
    try:
        yield reward
    finally:
        reward.close()


def scored(reward: RuleReward, *responses: str, truth: Any = None) -> list[Any]:
    """The score of each response, or the type of its error."""
    results = reward.score([Item(prompt="q", response=response, truth=truth) for response in responses])
    assert all(isinstance(result, Score) for result in results)
    return [r.error.type if r.error else r.value for r in results]  # type: ignore[union-attr]


def test_regex() -> None:
    with rule(rule="regex", pattern=r"^#\d+$", right=2.0, wrong=-1.0) as reward:
        assert scored(reward, "#19", "19", "", "#19\n#") == [2.0, -1.0, -1.0, -1.0]
        assert reward.version.startswith("0-")


def test_pathological_regex_times_out() -> None:
    with rule(rule="regex", pattern="(a+)+$", timeout=4.0) as reward:
        # Without the timeout this would take years.
        assert scored(reward, "aaa", "a" * 60 + "b", "b") == [1.0, "timeout", 0.0]


def test_exact() -> None:
    with rule(rule="exact", answer=r"#(\S+)") as reward:
        assert scored(reward, "so #18, no, #19", "#18", "19", truth=19) == [1.0, 0.0, 0.0]
        assert scored(reward, "#19") == ["no_truth"]
    with rule(rule="exact") as reward:
        assert scored(reward, " yes\n", "Yes", truth="yes") == [1.0, 0.0]


def test_mathematics() -> None:
    with rule(rule="math", timeout=6.0) as reward:
        answers = [r"so $\boxed{\frac{1}{2}}$", "the answer is 0.5", r"\boxed{2/4}", "0.6", "no idea", ""]
        assert scored(reward, *answers, truth=r"\frac{1}{2}") == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
        assert scored(reward, r"\boxed{x^2+2x+1}", truth="$(x+1)^2$") == [1.0]
        assert scored(reward, "1", truth="no mathematics at all") == ["rule_failed"]
        # this would run forever: only our timeout stops it, math-verify's own limits are off
        assert scored(reward, r"$9^{9^{9^{9^{9}}}}$", "0.5", truth="0.5")[1] == 1.0


def test_function_from_a_file(functions: Path) -> None:
    with rule(rule="function", function=f"{functions}:length") as reward:
        assert scored(reward, "", "abc") == [0.0, 3.0]
        joined = reward.score([Item(prompt="q", response=("ab", "c"))])
        assert joined[0] == Score(3.0, version=reward.version)


def test_function_gets_messages_and_truth(functions: Path) -> None:
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "ab"})
    with rule(rule="function", function=f"{functions}:seen") as reward:
        items = [
            Item(messages=messages, truth={"x": [1, None]}),
            Item(prompt=messages[:1], response="ab", truth={"x": [1, None]}),
            Item(prompt="q", response="ab", truth=object()),
            Item(text="q ab"),
            Item(tokens=(1, 2)),
            Item(messages=messages[:1]),
            Item(prompt="q", response=("a", 1)),  # type: ignore[arg-type]
        ]
        scores = [r.error.type if r.error else r.value for r in reward.score(items)]  # type: ignore[union-attr]
        assert scores == [1.0, 1.0, "bad_truth", *["unsupported_form"] * 2, "bad_messages", "bad_steps"]


def test_function_from_a_module(functions: Path) -> None:
    code = (
        "from plaudit.config.reward import parse_reward; from plaudit.reward import RuleReward\n"
        "from plaudit.records import Item\n"
        "r = RuleReward(parse_reward({'kind': 'rule', 'rule': 'function', 'function': 'my_rules:length'}, ''))\n"
        "print(r.score([Item(prompt='', response='four')])[0].value); r.close()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=functions.parent, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "4.0\n", result.stderr


def test_failing_function_costs_only_its_own_item(functions: Path) -> None:
    expected = {
        "loop": "timeout", "sleep": "timeout", "child": "timeout", "raise": "rule_failed", "exit": "rule_failed",
        "die": "rule_failed", "deep": "rule_failed", "memory": "rule_failed", "nan": "nonfinite_score",
        "inf": "nonfinite_score", "none": "rule_failed", "text": "rule_failed", "list": "rule_failed",
        "huge": "rule_failed", "wide": "rule_failed", "print": 0.25, "true": 1.0, "": 0.25,
    }  # fmt: skip
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with rule(rule="function", function=f"{functions}:odd", timeout=4.0, processes=2) as reward:
        order = [response for name in expected for response in (name, "fine")]
        scores = scored(reward, *order)
        assert scores[1::2] == [0.25] * len(expected)
        assert dict(zip(expected, scores[::2], strict=True)) == expected
        (failed,) = reward.score([Item(prompt="", response="raise")])
        assert failed.error is not None
        assert failed.error.message == "ValueError: cannot open file.txt or so"
    leftover = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not leftover


def test_many_threads_share_the_processes(functions: Path) -> None:
    with rule(rule="function", function=f"{functions}:length", processes=2) as reward:
        with ThreadPoolExecutor(8) as threads:
            counts = list(threads.map(lambda n: scored(reward, *["x" * i for i in range(n)]), range(20)))
        assert counts == [[float(i) for i in range(n)] for n in range(20)]


def test_close_fails_pending_items(functions: Path) -> None:
    with rule(rule="function", function=f"{functions}:odd", timeout=60.0) as reward:
        threading.Timer(0.3, reward.close).start()
        assert scored(reward, "sleep", "fine", "fine") == ["rule_failed"] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no attribute 'nothing'"),
        ("not_a_function", "is not callable"),
    ],
)
def test_missing_function_is_rejected_when_the_rule_is_created(functions: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message), rule(rule="function", function=f"{functions}:{name}"):
        pass
    with pytest.raises(ConfigError, match="does not exist"), rule(rule="function", function=f"no/such/file.py:{name}"):
        pass
    with pytest.raises(ConfigError, match="No module named"), rule(rule="function", function=f"no_such_module:{name}"):
        pass


def test_version_changes_with_the_functions_source(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    versions = []
    for text in ("def f(p, r, t): return 1", "def f(p, r, t): return 2"):
        file.write_text(text + os.linesep)
        with rule(rule="function", function=f"{file}:f") as reward:
            versions.append(reward.version)
    assert versions[0] != versions[1]
