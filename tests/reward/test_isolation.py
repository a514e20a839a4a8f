"""A response that a rule executes as code sets no score but its own, whatever it changes or writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from plaudit.config.reward import RuleTable, parse_reward
from plaudit.errors import ConfigError
from plaudit.records import Item
from plaudit.reward import RuleReward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")

RUNS = """
import builtins, json, os, signal, subprocess, sys, threading, time
import __main__

LINE = b'{"score": 777}\\n'
LATER = "import os, time\\nwhile True:\\n  time.sleep(0.001)\\n  [write(fd) for fd in range(3, 40)]"
calls = 0

def run(prompt, response, truth):
    global calls
    calls += 1
    if response.startswith("code: "):
        exec(response[6:], globals())
    return calls if response == "count" else float(len(response))

def runs(prompt, responses, truth):
    return [run(prompt, response, truth) for response in responses]

def write(fd, line=LINE):
    try:
        os.write(fd, line)
    except OSError:
        pass

def everywhere(line=LINE, times=1):
    for fd in range(1, 40):
        write(fd, line * times)

def forever(act):
    while True:
        time.sleep(0.0005)
        act()
"""
PATCHED = "lambda *_, **__: {'score': 777.0}"
ATTACKS = {
    "one more line": "everywhere()",
    "many more lines": "everywhere(times=100)",
    "lines, then the end": "everywhere(times=100); os._exit(0)",
    "half a line": "everywhere(b'{\"score\":')",
    "the program": f"__main__.answer_to = __main__._score = __main__.called = {PATCHED}",
    "the program's class": "__main__._Children.answer = __main__._Children._reply = lambda *_: LINE[:-1]",
    "json": "json.dumps = lambda *_, **__: LINE.decode().strip()",
    "what json reads": "loads = json.loads; json.loads = lambda text: {**loads(text), 'response': 'x' * 777}",
    "builtins": "builtins.float = lambda *_: 777.0; builtins.len = lambda *_: 777",
    "the function": "def run(prompt, response, truth): return 777.0\nsys.modules['plaudit_user_rule'].run = run",
    "system calls": "def write_always(fd, data, write=os.write): return write(fd, LINE)\nos.write = write_always",
    "exit": "os._exit(0)",
    "a signal to itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "a profiler": "sys.setprofile(lambda *_: everywhere())",
    "a thread": "threading.Thread(target=forever, args=(everywhere,), daemon=True).start()",
    "closed descriptors": "os.closerange(0, 100)",
    "an alarm": "signal.signal(14, lambda *_: everywhere()); signal.setitimer(signal.ITIMER_REAL, .001, .001)",
}  # fmt: skip
WITH_PROCESSES = {  # which the sandbox does not let it have
    "a process": "os.fork() or forever(everywhere)",
    "a process of its own session": "os.fork() or (os.setsid(), os.fork() and os._exit(0), forever(everywhere))",
    "a program": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])",
    "two replies": "os.fork()",
    "many processes": "[os.fork() or time.sleep(1000) for _ in range(30)]",
    "a process that multiplies": "os.fork() or [os.fork() for _ in range(5)] and time.sleep(1000)",
    "the parent's end": "os.kill(os.getppid(), signal.SIGKILL)",
}
FINE = ("fine", "is fine")


@contextmanager
def rule(tmp_path: Path, function: str = "run", **keys: Any) -> Iterator[RuleReward]:
    file = tmp_path / "runs.py"
    file.write_text(RUNS)
    table = parse_reward({"kind": "rule", "rule": "function", "function": f"{file}:{function}", **keys}, "test")
    assert isinstance(table, RuleTable)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    reward = RuleReward(table)
    try:
        yield reward
    finally:
        reward.close()
        assert not {child.pid for child in psutil.Process().children(recursive=True)} - before


def scores(reward: RuleReward, *responses: str, group: int | None = None) -> list[float | str]:
    results = reward.score([Item(prompt="q", response=response, group=group) for response in responses])
    return [result.error.type if result.error else result.value for result in results]  # type: ignore[union-attr]


def check(reward: RuleReward, code: str) -> None:
    for _ in range(2):
        found = scores(reward, "fine", f"code: {code}", "is fine", *FINE * 3)
        assert [found[0], *found[2:]] == [4.0, 7.0, *(4.0, 7.0) * 3]
        assert found[1] in (float(len(f"code: {code}")), 777.0, "rule_failed")


@pytest.mark.parametrize("sandbox", [True, False])
def test_code_of_a_response_changes_no_other_score(tmp_path: Path, sandbox: bool) -> None:
    attacks = ATTACKS if sandbox else {**ATTACKS, **WITH_PROCESSES}
    with rule(tmp_path, sandbox=sandbox, timeout=20.0) as reward:
        for name, code in attacks.items():
            try:
                check(reward, code)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def test_surplus_output_is_an_error_even_of_the_last_response(tmp_path: Path) -> None:
    with rule(tmp_path, sandbox=True) as reward:
        results = reward.score([Item(prompt="q", response="code: everywhere(times=2)")])
        assert results[0].error is not None
        assert results[0].error.message == "the process of the rule wrote more than its reply and was killed"


def test_a_group_functions_calls_are_isolated_from_each_other(tmp_path: Path) -> None:
    code = f"code: {ATTACKS['the program']}; {ATTACKS['builtins']}"
    with rule(tmp_path, "runs") as reward:
        items = [Item(prompt="q", response=each, group=group) for group in range(3) for each in ("fine", code)]
        assert {items[at].group for at, each in enumerate(reward.score(items)) if each.error is None} <= {0, 1, 2}
        assert scores(reward, *FINE, group=0) == [4.0, 7.0]


@pytest.mark.parametrize("name", ["the program", "builtins", "the function", "what json reads", "a thread"])
@pytest.mark.parametrize("sandbox", [True, False])
def test_a_batch_is_isolated_from_the_next(tmp_path: Path, name: str, sandbox: bool) -> None:
    with rule(tmp_path, sandbox=sandbox, fork="batch") as reward:
        for _ in range(2):
            scores(reward, "fine", f"code: {ATTACKS[name]}")
            assert scores(reward, *FINE * 3) == [4.0, 7.0] * 3


@pytest.mark.parametrize("name", [name for name in ATTACKS if "line" in name])
@pytest.mark.parametrize("fork", ["batch", "never"])
@pytest.mark.parametrize("sandbox", [True, False])
def test_lines_are_no_replies_to_other_requests(tmp_path: Path, name: str, fork: str, sandbox: bool) -> None:
    with rule(tmp_path, sandbox=sandbox, fork=fork, timeout=20.0) as reward:
        for _ in range(2):
            found = scores(reward, "fine", f"code: {ATTACKS[name]}", *FINE * 3)
            # A shared process may fail others together with the response that wrote, but score none of them wrongly.
            assert all(each in (right, "rule_failed") for each, right in zip(found[2:], [4.0, 7.0] * 3, strict=True))
            assert found[0] == 4.0
        assert scores(reward, *FINE) == [4.0, 7.0]


def test_fork_says_how_long_a_functions_state_is_kept(tmp_path: Path) -> None:
    counted = {}
    for fork in ("response", "batch", "never"):
        with rule(tmp_path, fork=fork) as reward:
            counted[fork] = [scores(reward, *["count"] * 3) for _ in range(2)]
    assert counted == {
        "response": [[1.0] * 3] * 2,
        "batch": [[1.0, 2.0, 3.0]] * 2,
        "never": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
    }
    with pytest.raises(ConfigError, match='rule = "exact" does not take fork'):
        parse_reward({"kind": "rule", "rule": "exact", "fork": "never"}, "test")


def test_a_server_warns_of_a_function_without_forks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.py"
    file.write_text(RUNS)
    RuleReward(RuleTable(rule="function", function=f"{file}:run", fork="never"), exposed=True).close()
    assert 'WARNING: fork = "never": a response that the function' in capfd.readouterr().err
