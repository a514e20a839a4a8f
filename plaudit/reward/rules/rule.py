"""Rules: rewards computed by programs.

Every rule, including a regular expression, runs in a separate process with a time limit for each response. A process
that exceeds it is killed and restarted; only its item fails. All rules run in the sandbox (`process/sandbox.py`) except
a user's own function where nobody else is served.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from plaudit.config.reward import RuleTable
from plaudit.errors import ConfigError
from plaudit.models.chat.renderer import KEPT_ENVIRONMENT, pipes
from plaudit.process.lines import Fault, exchange_lines, exchange_untrusted, has_output
from plaudit.records import Item, ItemError, Score
from plaudit.reward.reward import Result
from plaudit.reward.version import digest

WORKER = Path(__file__).with_name("rule_worker.py")
START_SECONDS = 60.0
GRACE_SECONDS = 10.0  # added to the time limit, for a rule whose process enforces the limit itself
LIBRARIES = {"math": ("math-verify", "latex2sympy2_extended", "sympy"), "gym": ("reasoning-gym", "sympy")}
LONGEST_MESSAGE = 300
COMPARES = ("exact", "regex")  # rules that neither run nor parse a response as code
TOGETHER = 64  # items sent to a process at once: few, so that a slow one delays few others


class RuleReward:
    """A reward computed by a rule. Thread-safe.

    exposed    whether the items come from others: all rules of a server run in the sandbox
    mechanism  the sandbox's mechanism; "" without one
    """

    def __init__(self, table: RuleTable, exposed: bool = False) -> None:
        self.table = table
        if exposed and table.rule == "gym" and table.tasks is None:
            raise ConfigError(
                'rule = "gym" on a server needs tasks = ["chain_sum", ...], the tasks whose items it scores; with '
                '["*"] the client chooses the task'
            )
        sandboxed = table.sandbox if table.sandbox is not None else exposed or table.rule != "function"
        if not sandboxed and (exposed or table.rule != "function"):
            print(
                f"plaudit: WARNING: sandbox = false: the rule {table.function or table.rule!r} reads untrusted text "
                "with all permissions of this user", file=sys.stderr,
            )  # fmt: skip
        if exposed and table.fork == "never":
            print(
                f'plaudit: WARNING: fork = "never": a response that the function {table.function!r} executes as code '
                "can set the scores of other requests", file=sys.stderr,
            )  # fmt: skip
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        # Rules that only compare texts also run without a sandbox (for example on a Mac) if nobody else is served.
        required = exposed or table.sandbox is True or table.rule not in COMPARES
        self._workers = [_Worker(table, sandboxed, required) for _ in range(table.processes)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(table.processes, thread_name_prefix="rule")
        try:
            hello = self._workers[0].start()  # reports a missing function at once, not with the first item
        except BaseException:
            self.close()
            raise
        self.mechanism = hello["mechanism"]
        self.batched: bool = hello["batched"]
        self._columns: list[str] | None = hello["columns"]
        self._required: list[str] = hello["required"]
        if exposed and (self.batched or self._required):
            reads = "all responses to a prompt" if self.batched else f"the columns {', '.join(self._required)}"
            self.close()
            raise ConfigError(
                f"the function {table.function!r} reads {reads}, which a server does not receive; set it in the "
                "recipe of the run "
                'itself: [reward] rule = "function"'
            )
        self.version = f"0-{digest(table, hello['source'], libraries=LIBRARIES.get(table.rule, ()))}"

    def score(self, items: Sequence[Item]) -> list[Result]:
        if self.batched:
            parts: list[Sequence[Item]] = by_prompt(items)
        else:
            size = min(TOGETHER, max(1, -(-len(items) // self.table.processes)))
            parts = [items[start : start + size] for start in range(0, len(items), size)]
        return [result for part in self._threads.map(self._score, parts) for result in part]

    def close(self) -> None:
        """Pending scores become errors."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=False)

    def _score(self, items: Sequence[Item]) -> list[Result]:
        requests = [self._request(item) for item in items]
        sendable = [request for request in requests if isinstance(request, _Request)]
        lines, together = [request.line for request in sendable], 1
        if self.batched and sendable:
            lines, together = [sendable[0].of_all([request.response for request in sendable])], len(sendable)
        worker = self._idle.get()
        try:
            replies = iter(worker.call(lines, together))
        finally:
            self._idle.put(worker)
        answers = (next(replies) if isinstance(request, _Request) else request for request in requests)
        return [
            Score(error=reply, version=self.version)
            if isinstance(reply, ItemError)
            else Score(reply, version=self.version)
            for reply in answers
        ]

    def _request(self, item: Item) -> _Request | ItemError:
        """The request to a worker, or an error."""
        turn = prompt_and_response(item)
        if isinstance(turn, ItemError):
            return turn
        columns = columns_read(item, self._columns, self._required)
        if isinstance(columns, ItemError):
            return columns
        try:
            return _Request(*turn, item.truth, columns)
        except (TypeError, ValueError) as error:
            return _bad_column(columns) or ItemError("bad_truth", f"prompt and truth must be JSON: {error}")


def by_prompt(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Groups consecutive items of the same group; an item without a group is alone."""
    keys = (-1 - place if item.group is None else item.group for place, item in enumerate(items))
    groups = groupby(zip(keys, items, strict=True), lambda pair: pair[0])
    return [[item for _, item in group] for _, group in groups]


def columns_read(item: Item, names: Sequence[str] | None, required: Sequence[str]) -> dict[str, Any] | ItemError:
    """The columns of an item that a function reads (`names`; None for all), or an error for a missing one."""
    columns = {name: item.columns[name] for name in (item.columns if names is None else names) if name in item.columns}
    if missing := [name for name in required if name not in columns]:
        there = ", ".join(sorted(map(str, item.columns))) or "none"
        return ItemError(
            "no_column", f"the rule reads the column {missing[0]!r}, which is missing; the row's columns are: {there}"
        )
    return columns


def _bad_column(columns: Mapping[str, Any]) -> ItemError | None:
    """An error for the first column that is not JSON."""
    for name, value in columns.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            return ItemError("bad_column", f"the rule reads the column {name!r}, which must be JSON: {error}")
    return None


class _Request:
    def __init__(self, prompt: Any, response: str, truth: Any, columns: Mapping[str, Any]) -> None:
        self.response = response
        self._about = {"prompt": prompt, "truth": truth, "columns": columns}
        self.line = self._line(response=response)

    def of_all(self, responses: Sequence[str]) -> bytes:
        return self._line(responses=responses)

    def _line(self, **answers: Any) -> bytes:
        return json.dumps({**self._about, **answers}).encode()


def prompt_and_response(item: Item) -> tuple[Any, str] | ItemError:
    """The prompt, as text or messages, and the response of an item; an error if they are not known."""
    if item.messages is not None:
        last = item.messages[-1] if item.messages else None
        if not isinstance(last, Mapping) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            return ItemError("bad_messages", "messages must end with the assistant's answer, whose content is text")
        return [dict(message) for message in item.messages[:-1]], str(last["content"])
    if item.prompt is None or item.response is None:
        return ItemError(
            "unsupported_form", "a rule or a judge needs prompt and response or messages, not text or tokens"
        )
    prompt = item.prompt if isinstance(item.prompt, str) else [dict(message) for message in item.prompt]
    steps = (item.response,) if isinstance(item.response, str) else item.response
    if not all(isinstance(step, str) for step in steps):
        return ItemError("bad_steps", "each step must be text")
    return prompt, "".join(steps)


class _Worker:
    """One worker process, used by one thread at a time."""

    def __init__(self, table: RuleTable, sandboxed: bool, required: bool) -> None:
        self.table = table
        self._sandboxed = sandboxed
        self._required = required
        self._forks = False  # it computes in processes of its own and enforces the time limit itself
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> dict[str, Any]:
        """Starts the process and returns its hello message."""
        # Modules are resolved as in this process; -P keeps this folder's names out of the search path.
        search_path = os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": search_path}
        if self._sandboxed:
            kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
            # threads cannot be started in the sandbox
            environment = {**kept, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
        settings = {**self.table.model_dump(), "sandboxed": self._sandboxed, "sandbox_required": self._required}
        line = json.dumps(settings).encode() + b"\n"
        replies, _ = exchange_lines(*pipes(self._process), line, 1, START_SECONDS)
        hello: dict[str, Any] = json.loads(replies[0]) if replies else {"fault": "its process crashed or timed out"}
        if fault := hello["fault"]:
            self._end()
            wanting = "math_verify" in fault or "reasoning_gym" in fault
            cure = "; pip install 'plaudit[verify]'" if wanting else ""
            raise ConfigError(f"the rule {self.table.function or self.table.rule!r} cannot start: {fault}{cure}")
        self._sandboxed, self._forks = bool(hello["mechanism"]), hello["forks"]
        return hello

    def call(self, lines: Sequence[bytes], together: int = 1) -> list[float | ItemError]:
        """Answers in order, `together` for each line. A line that crashes the process becomes an error; the lines
        after it are sent to a new process."""
        with self._lock:
            answers: list[float | ItemError] = []
            while (done := len(answers) // together) < len(lines):
                answers += self._call(lines[done:], together)
            return answers

    def _call(self, lines: Sequence[bytes], together: int) -> list[float | ItemError]:
        """Answers to all lines, or up to the first that the process did not answer; at least one."""
        if self._closed:
            return [ItemError("rule_failed", "the rule was closed") for _ in range(len(lines) * together)]
        if self._process is not None and has_output(pipes(self._process)[1]):  # it exited, or wrote unasked
            self._end()
        if self._process is None:
            try:
                self.start()
            except ConfigError as error:
                return [ItemError("rule_failed", str(error)) for _ in range(len(lines) * together)]
        assert self._process is not None
        limit = together * self.table.timeout
        seconds = limit + (GRACE_SECONDS if self._forks else 0.0)
        ending = [b""] if self.table.fork == "batch" else []  # an empty request ends the process of a batch
        replies, fault = exchange_untrusted(*pipes(self._process), [*lines, *ending], seconds)
        answers = [answer for reply in replies[: len(lines)] for answer in _read(reply, together)]
        if fault:
            self._end()
        if len(replies) < len(lines):
            answers += [_fault(fault, limit)] * together
        return answers

    def stop(self) -> None:
        self._closed = True
        if (process := self._process) is not None:
            _kill(process)  # unblocks the thread that waits for its answer
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _fault(fault: Fault, limit: float) -> ItemError:
    if fault == "late":
        return ItemError("timeout", f"the rule did not finish within {limit:g} s and was killed")
    wrote = "wrote more than one reply and was killed" if fault == "surplus" else "crashed"
    return ItemError("rule_failed", f"the process of the rule {wrote}")


def _read(reply: bytes, together: int) -> list[float | ItemError]:
    """Parses a reply of the process, which is untrusted because the process may have run any code."""
    answers: list[Any] = []
    with suppress(ValueError, TypeError, RecursionError):
        answer = json.loads(reply)
        scores = answer.get("scores") if isinstance(answer, dict) else None
        answers = scores if isinstance(scores, list) and len(scores) == together else [answer] * together
    return [score_or_error(answer) for answer in answers or [None] * together]


def score_or_error(answer: Any) -> float | ItemError:
    try:
        if "score" not in answer:
            return ItemError(str(answer["type"])[:40], str(answer["message"])[:LONGEST_MESSAGE])
        if math.isfinite(score := float(answer["score"])):
            return score
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        pass
    return ItemError("rule_failed", "the process of the rule returned an invalid score")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its child processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
