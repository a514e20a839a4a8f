"""Runs one rule, a JSON request a line, for `rule.py`. Imports nothing of Plaudit: a rule starts in a moment.

What a user's function prints goes nowhere: the real stdout is the way back to the parent.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

Rule = Callable[[Any, str, Any], Any]  # (prompt, response, truth) -> score
LIMIT = 300  # characters of an error's message
MEMORY = 4 << 30  # of a built-in rule: 9^(9^(9^9)) is a short answer
PATH = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][\w.@+~-]+)+[/\\]")


class NoTruth(Exception):
    """The item has nothing to compare with."""


class RefusedTask(Exception):
    """A task that would run code of the item's."""


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
            return _gym(answer)
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
    from math_verify import parse, verify  # type: ignore[import-untyped]

    logging.disable()  # it warns on every call that its own time limits are off; the parent's is on

    def equal(answer: str, truth: str) -> bool:
        gold = parse(truth, parsing_timeout=None)
        if not gold:
            raise ValueError(f"the truth {truth[:60]!r} cannot be read as mathematics")
        return bool(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))

    equal("$x$", "$x$")  # loads what it loads late, which is not the first response's time
    return equal


def _gym(answer: re.Pattern[str] | None) -> Rule:
    """The truth names the task and its options and holds the item, as `data.gym` gives it."""
    import reasoning_gym

    from plaudit.config.gym import refusal

    @lru_cache(maxsize=8)
    def task(name: str, options: str) -> Any:
        return reasoning_gym.create_dataset(name, size=1, **json.loads(options))

    def score(_: Any, response: str, truth: Any) -> Any:
        if not isinstance(truth, dict) or not {"task", "options", "item"} <= truth.keys():
            raise NoTruth
        if why := refusal(str(truth["task"])):  # whoever sends an item chooses its task
            raise RefusedTask(why)
        dataset = task(truth["task"], json.dumps(truth["options"]))
        return dataset.score_answer(_answer(answer, response), entry=_with_tuples(truth["item"]))

    return score


def _with_tuples(value: Any) -> Any:
    """An item as its task made it: JSON has no tuples, and some tasks compare with theirs."""
    if isinstance(value, list):
        return [_with_tuples(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"}:
        return tuple(_with_tuples(part) for part in value["tuple"])
    return {key: _with_tuples(part) for key, part in value.items()}


def _function(name: str) -> Rule:
    home, _, attribute = name.rpartition(":")
    if not home.endswith(".py"):
        rule: Rule = getattr(importlib.import_module(home), attribute)
        return rule
    spec = importlib.util.spec_from_file_location("plaudit_user_rule", Path(home).resolve())
    if spec is None or spec.loader is None or not Path(home).is_file():
        raise FileNotFoundError(f"no file {home}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    from_file: Rule = getattr(module, attribute)
    return from_file


def _answer(pattern: re.Pattern[str] | None, response: str) -> str | None:
    if pattern is None:
        return response
    answer = None
    for match in pattern.finditer(response):
        answer = match[1]
    return answer


def answer_to(rule: Rule, request: dict[str, Any]) -> dict[str, Any]:
    try:
        value = rule(request["prompt"], request["response"], request["truth"])
        if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            return _error("rule_failed", f"the rule gave {type(value).__name__}, expected a number")
        score = float(value)
    except NoTruth:
        return _error("no_truth", "the rule compares with a truth, and the item has none")
    except RefusedTask as error:
        return _error("refused", str(error))
    except BaseException as error:  # also what a function raises to leave the program
        return _error("rule_failed", described(error))
    if not math.isfinite(score):
        return _error("nonfinite_score", f"the rule gave {score}, which is not a finite number")
    return {"score": score}


def _error(type: str, message: str) -> dict[str, Any]:
    return {"type": type, "message": message}


def described(error: BaseException) -> str:
    """One line, without directories."""
    try:
        text = " ".join(str(error)[: 4 * LIMIT].split())
    except Exception:
        text = ""
    return PATH.sub("", f"{type(error).__name__}: {text}" if text else type(error).__name__)[:LIMIT]


def main() -> None:
    back = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    table = json.loads(sys.stdin.readline())
    if table["rule"] != "function":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        rule = new_rule(table)
        fault = "" if callable(rule) else f"{table['function']} cannot be called"
    except BaseException as error:
        fault = described(error)
    print(json.dumps({"fault": fault}), file=back, flush=True)
    if fault:
        return
    for line in sys.stdin:
        # Should the parent die while a rule loops, the kernel ends this process.
        signal.setitimer(signal.ITIMER_REAL, table["timeout"] + 5)
        reply = json.dumps(answer_to(rule, json.loads(line)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, file=back, flush=True)


if __name__ == "__main__":
    main()
