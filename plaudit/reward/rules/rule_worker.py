"""Runs one rule for `rule.py`, with one JSON request per line. Imports little of Plaudit, so that rules start quickly.

This process loads the rule and forks children, which alone read responses, in the sandbox unless the function is the
user's own. A user's function (unless `fork` says otherwise), and a scorer that executes a response's code, gets a new
child for every call: whatever is changed in a child (modules, builtins, open descriptors, threads) ends with it, and
cannot affect the scores of other responses. Other rules keep their child until it exceeds a limit or its output is not
exactly one reply to a request.

Output of a user's function is discarded: the real stdout is the connection to the parent.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import importlib.util
import json
import math
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from plaudit.process.guard import children
from plaudit.process.lines import Fault, exchange_lines, exchange_untrusted, has_output
from plaudit.process.sandbox import NoSandbox, Sandbox
from plaudit.reward.rules.user_function import UserFunction

Rule = Callable[[Any, str, Any], Any] | UserFunction  # (prompt, response, truth) -> score
LIMIT = 300  # maximum characters of an error message
MEMORY = 2 << 30  # memory limit in addition to what is loaded: 9^(9^(9^9)) is a short answer
LONGEST_REPLY = 1 << 14  # bytes of a reply line from the sandbox
READY = b"ready"
START_SECONDS = 30.0
STRAY_SECONDS = 5.0
PR_SET_CHILD_SUBREAPER = 36
PATH = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][\w.@+~-]+)+[/\\]")


class NoTruth(Exception):
    """The item has no truth to compare with."""


class RefusedTask(Exception):
    """A task that would run code from the item."""


def new_rule(table: dict[str, Any]) -> Rule:
    right, wrong = float(table["right"]), float(table["wrong"])
    answer = None if table["answer"] is None else re.compile(table["answer"])
    check: Callable[[str, str], bool]
    match table["rule"]:
        case "regex":
            pattern = re.compile(table["pattern"])
            return lambda _, response, __: right if pattern.search(response) else wrong
        case "exact":
            check = _exact
        case "math":
            check = _mathematics()
        case "gym":
            return _gym(answer, table["tasks"], table["sandboxed"])
        case _:
            return _function(table["function"])

    def compare(_: Any, response: str, truth: Any) -> float:
        if truth is None:
            raise NoTruth
        extracted = _answer(answer, response)
        return right if extracted is not None and check(extracted, str(truth)) else wrong

    return compare


def _exact(answer: str, truth: str) -> bool:
    return answer.strip() == truth.strip()


def _mathematics() -> Callable[[str, str], bool]:
    import logging

    from math_verify import parse, verify  # type: ignore[import-untyped]

    logging.disable()  # it warns on every call that its own time limits are off; the parent enforces one

    def equal(answer: str, truth: str) -> bool:
        gold = parse(truth, parsing_timeout=None)
        if not gold:
            raise ValueError(f"the truth {truth[:60]!r} cannot be parsed as mathematics")
        return bool(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))

    equal("$x^2+2x+1$", "$(x+1)^2$")  # triggers lazy imports, which should not count as time of the first response
    return equal


def _gym(answer: re.Pattern[str] | None, tasks: list[str] | None, sandboxed: bool) -> Rule:
    """A rule for gym items: the truth has the task's name and options and the item, as `data.gym` provides it."""
    import reasoning_gym

    from plaudit.config.gym import refusal

    @lru_cache(maxsize=8)
    def task(name: str, options: str) -> Any:
        return reasoning_gym.create_dataset(name, size=1, **json.loads(options))

    def score(_: Any, response: str, truth: Any) -> Any:
        if not isinstance(truth, dict) or not {"task", "options", "item"} <= truth.keys():
            raise NoTruth
        name = str(truth["task"])
        if tasks is not None and "*" not in tasks and name not in tasks:
            raise RefusedTask(f"the gym task {name[:60]!r} is not one of the tasks of this rule: {', '.join(tasks)}")
        if not sandboxed and (why := refusal(name)):
            raise RefusedTask(why)
        dataset = task(name, json.dumps(truth["options"]))
        return dataset.score_answer(_answer(answer, response), entry=_with_tuples(truth["item"]))

    return score


def _runs_code(request: bytes) -> bool:
    """Whether the scorer of a gym item's task executes code of an answer."""
    from plaudit.config.gym import EVALUATE

    truth = json.loads(request)["truth"]
    return isinstance(truth, dict) and str(truth.get("task")) in EVALUATE


def _with_tuples(value: Any) -> Any:
    """Restores tuples: JSON has none, and some tasks compare with tuples."""
    if isinstance(value, list):
        return [_with_tuples(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"}:
        return tuple(_with_tuples(part) for part in value["tuple"])
    return {key: _with_tuples(part) for key, part in value.items()}


def _function(name: str) -> UserFunction:
    home, _, attribute = name.rpartition(":")
    function: Any = getattr(_module(home), attribute)
    if not callable(function):
        raise TypeError(f"{name} is not callable")
    return UserFunction(function)


def _module(home: str) -> Any:
    if not home.endswith(".py"):
        return importlib.import_module(home)
    spec = importlib.util.spec_from_file_location("plaudit_user_rule", Path(home).resolve())
    if spec is None or spec.loader is None or not Path(home).is_file():
        raise FileNotFoundError(f"the file {home} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _answer(pattern: re.Pattern[str] | None, response: str) -> str | None:
    if pattern is None:
        return response
    answer = None
    for match in pattern.finditer(response):
        answer = match[1]
    return answer


def answer_to(rule: Rule, request: dict[str, Any]) -> dict[str, Any]:
    """A score or an error; for all responses to a prompt, `scores` with one of these each."""
    try:
        if not isinstance(rule, UserFunction):
            return _score(rule(request["prompt"], request["response"], request["truth"]))
        return called(rule, request)
    except NoTruth:
        return _error("no_truth", "the rule compares with a truth, but the item has no truth")
    except RefusedTask as error:
        return _error("refused", str(error))
    except BaseException as error:  # also SystemExit and KeyboardInterrupt raised by a function
        return _error("rule_failed", described(error))


def called(function: UserFunction, request: dict[str, Any]) -> dict[str, Any]:
    """The result of a user's function, in the form of `answer_to`; exceptions are passed on."""
    value = function(request)
    if not function.batched:
        return _score(value)
    count = len(request["responses"])
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__") or len(value) != count:
        kind = f"{len(value)} in a {type(value).__name__}" if hasattr(value, "__len__") else type(value).__name__
        return _error(
            "rule_failed", f"the rule returned {kind}; expected a list of {count} numbers, one for each response"
        )
    return {"scores": [_score(each) for each in value]}


def _score(value: Any) -> dict[str, Any]:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return _error("rule_failed", f"the rule returned {type(value).__name__}; expected a number")
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return _error("rule_failed", described(error))
    if not math.isfinite(score):
        return _error("nonfinite_score", f"the rule returned {score}; expected a finite number")
    return {"score": score}


def _responses(rule: Rule, request: bytes) -> int:
    """The number of responses in a request."""
    return len(json.loads(request)["responses"]) if isinstance(rule, UserFunction) and rule.batched else 1


def _error(type: str, message: str) -> dict[str, Any]:
    return {"type": type, "message": message}


def described(error: BaseException) -> str:
    """The error in one line, without directories."""
    try:
        text = " ".join(str(error)[: 4 * LIMIT].split())
    except Exception:
        text = ""
    return PATH.sub("", f"{type(error).__name__}: {text}" if text else type(error).__name__)[:LIMIT]


class _Children:
    """Forked processes that compute scores: one for each request of a user's function or of a scorer that executes
    code, otherwise one for a batch or all requests, which is replaced after a reply that is late, missing, too long or
    not alone.

    sandbox  entered by every child; None: a user's own function, whose processes are ended with its child
    private  descriptors of this process that a child must not have
    """

    def __init__(self, rule: Rule, table: dict[str, Any], sandbox: Sandbox | None, private: Sequence[int]) -> None:
        self._rule = rule
        self._table = table
        self._sandbox = sandbox
        self._private = private
        self._pid = self._sink = self._source = 0
        if sandbox is None:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a child leaves behind becomes ours
        self._own = {*children()}  # started when the function was loaded
        gc.collect()
        gc.freeze()  # avoids copy-on-write by the garbage collector in every child
        replies, _ = self._ask_new(b"", START_SECONDS, LONGEST_REPLY)
        if replies != [READY]:
            raise NoSandbox(replies[0].decode() if replies else "a process crashed on entering it")

    def answer(self, request: bytes) -> bytes:
        if not request:  # the end of a batch
            self.close()
            return READY
        count = _responses(self._rule, request)
        seconds, longest = count * self._table["timeout"], count * LONGEST_REPLY
        new = self._table["rule"] == "function" and self._table["fork"] == "response"
        if new or (self._table["rule"] == "gym" and _runs_code(request)):
            replies, fault = self._ask_new(request, seconds, longest)
        else:
            replies, fault = self._ask_kept(request, seconds, longest)
        return replies[0] if replies else json.dumps(_faulty(fault, seconds)).encode()

    def close(self) -> None:
        if self._pid:
            pid, self._pid = self._pid, 0
            self._end(pid, self._sink, self._source)

    def _ask_new(self, request: bytes, seconds: float, longest: int) -> tuple[list[bytes], Fault]:
        """In a new process, with a new pipe: nothing that another process writes gets into it."""
        source, replies = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._run((replies,), (source,), lambda: os.write(replies, self._reply(request) + b"\n"))
        os.close(replies)
        lines, fault = exchange_lines(-1, source, b"", 1, seconds, longest)
        self._end(pid, source)
        return [] if fault else lines, fault

    def _ask_kept(self, request: bytes, seconds: float, longest: int) -> tuple[list[bytes], Fault]:
        if self._pid and has_output(self._source):  # it wrote after its last reply, or exited
            self.close()
        if not self._pid:
            self._start()
        replies, fault = exchange_untrusted(self._sink, self._source, [request], seconds, longest)
        if fault:
            self.close()
        return replies, fault

    def _start(self) -> None:
        requests, self._sink = os.pipe()
        self._source, replies = os.pipe()

        def answer_all() -> None:
            with os.fdopen(requests, "rb") as lines:
                for line in lines:
                    nonce, _, request = line[:-1].partition(b" ")
                    os.write(replies, b"%s %s\n" % (nonce, self._reply(request)))

        self._pid = os.fork()
        if self._pid == 0:
            self._run((requests, replies), (self._sink, self._source), answer_all)
        os.close(requests)
        os.close(replies)

    def _run(self, kept: Sequence[int], others: Sequence[int], answer: Callable[[], object]) -> NoReturn:
        """Runs in the child. `kept`: its ends of its pipes, the last one for replies; `others`: this process's."""
        try:
            if self._sandbox is not None:
                self._sandbox.enter(kept)
            else:
                for descriptor in (*self._private, *others):
                    os.close(descriptor)
            answer()
        except NoSandbox as error:
            os.write(kept[-1], f"{error}\n".encode())
        finally:
            os._exit(1)

    def _reply(self, request: bytes) -> bytes:
        return json.dumps(answer_to(self._rule, json.loads(request))).encode() if request else READY

    def _end(self, pid: int, *pipes: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for pipe in pipes:
            os.close(pipe)
        if self._sandbox is None:
            self._end_strays()

    def _end_strays(self) -> None:
        """Ends the processes that a user's function left behind."""
        deadline = time.monotonic() + STRAY_SECONDS
        while _has_children() and (strays := {*children()} - self._own):
            if time.monotonic() > deadline:  # they multiply: end the whole group; the parent starts another
                os.killpg(0, signal.SIGKILL)
            for pid in strays:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _faulty(fault: Fault, seconds: float) -> dict[str, Any]:
    if fault == "late":
        return _error("timeout", f"the rule did not finish within {seconds:g} s and was killed")
    if fault == "surplus":
        return _error("rule_failed", "the process of the rule wrote more than its reply and was killed")
    return _error("rule_failed", "the process of the rule crashed, or returned an invalid score")


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _in_this_process(rule: Rule, table: dict[str, Any]) -> Callable[[bytes], bytes]:
    if table["rule"] != "function":
        allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = 2 * MEMORY if allowed == resource.RLIM_INFINITY else min(2 * MEMORY, allowed)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def answer(request: bytes) -> bytes:
        # If the parent exits while a rule loops, the kernel ends this process.
        signal.setitimer(signal.ITIMER_REAL, _responses(rule, request) * table["timeout"] + 5)
        reply = json.dumps(answer_to(rule, json.loads(request)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        return reply.encode()

    return answer


def _source_of(rule: Rule) -> str:
    """The SHA-256 of the file with the user's function."""
    written = rule.function if isinstance(rule, UserFunction) else rule
    file = getattr(sys.modules.get(getattr(written, "__module__", "")), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else ""


def main() -> None:
    requests, back = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)
    table = json.loads(requests.readline())
    hello: dict[str, Any] = {
        "fault": "",
        "mechanism": "",
        "source": "",
        "batched": False,
        "columns": [],
        "required": [],
        "forks": False,
    }
    forked: _Children | None = None
    try:
        rule = new_rule(table)
        hello["source"] = _source_of(rule)
        if isinstance(rule, UserFunction):
            hello |= {"batched": rule.batched, "columns": rule.columns, "required": rule.required}
        sandbox: Sandbox | None = None
        if table["sandboxed"]:
            try:
                sandbox = Sandbox(MEMORY)
                forked = _Children(rule, table, sandbox, ())
                hello["mechanism"] = sandbox.mechanism
            except NoSandbox:
                if table["sandbox_required"]:
                    raise
        elif isinstance(rule, UserFunction) and table["fork"] != "never":
            forked = _Children(rule, table, None, (requests.fileno(), back))
        hello["forks"] = forked is not None
        answer = _in_this_process(rule, table) if forked is None else forked.answer
    except NoSandbox as error:
        hello["fault"] = (
            f"this machine has no sandbox ({error}); sandbox = false runs the rule without one, with all permissions "
            "of its process"
        )
    except BaseException as error:
        hello["fault"] = described(error)
    os.write(back, json.dumps(hello).encode() + b"\n")
    if hello["fault"]:
        return
    try:
        for line in requests:
            nonce, _, request = line[:-1].partition(b" ")
            os.write(back, b"%s %s\n" % (nonce, answer(request)))
    finally:
        if forked is not None:
            forked.close()


if __name__ == "__main__":
    main()
