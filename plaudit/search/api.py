"""Search from Python.

import plaudit

found = plaudit.search(
    ["7+8+4+9+2+6+3+5=", "9+1+7+7+2+8+6+4="],
    engine="sums-policy", prm="sums-steps", rule="ets", width=16, stop=";", answer=r"#(\\d+)$",
)
for outcome in found:
    print(outcome.question.text, outcome.answer.text if outcome.answer else outcome.stopped)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plaudit.config.search import parse_search
from plaudit.errors import ConfigError
from plaudit.search.backends.policy import CorePolicy
from plaudit.search.pilot import Chosen
from plaudit.search.questions.questions import question
from plaudit.search.runner import Outcome
from plaudit.search.search import Search

if TYPE_CHECKING:
    from plaudit.core import Engine

_STEPS = ("stop", "answer", "equivalence", "final", "temperature", "top_p", "max_step_tokens", "max_tokens")
_BUDGET = ("generated", "kv_tokens", "calls", "seconds", "lead")


class Outcomes(list[Outcome]):
    """choice   the method selected by rule="auto\""""

    def __init__(self, outcomes: Iterable[Outcome], choice: Chosen | None) -> None:
        super().__init__(outcomes)
        self.choice = choice


def search(
    questions: Sequence[str | Mapping[str, Any]], *, engine: str | Engine,
    prm: str | Mapping[str, Any] | None = None, orm: str | Mapping[str, Any] | None = None, rule: str = "ets",
    width: int = 16, seed: int = 1, concurrent: int = 64, threads: int | None = None,
    options: Mapping[str, Any] | None = None, **keys: Any,
) -> Outcomes:  # fmt: skip
    """Returns an outcome for every question, in order. One without an answer has the reason in `stopped`.

    questions   texts, or {"prompt" or "messages"[, "answer": the correct one]}
    rule        a method; "auto" selects one, by options["ground"] (its steps, accuracy and auc) or by a pilot on
                questions with an "answer". `choice` of the result has the method, the reason, and the pilot's cost
    engine      a model directory or name, or an Engine with its tokenizer
    prm         a process model's directory or name, the URL of `plaudit serve`, or the keys of a recipe's [prm] table,
                such as {"url": ..., "protocol": "vllm", "path": ...}; with best-of-n also an outcome model
    orm         the same for an outcome model, which weights the answers in the vote
    options     keys of a recipe's [search] table
    keys        of its tables [steps] and [budget]: stop, answer, max_tokens, ..., calls, lead
    """
    for key in keys:
        if key not in (*_STEPS, *_BUDGET):
            raise ConfigError(f"search() has no option {key!r}; expected one of {', '.join((*_STEPS, *_BUDGET))}")
    model = engine if isinstance(engine, str) else "engine"
    tree: dict[str, Any] = {
        "seed": seed,
        "concurrent": concurrent,
        "model": {"path": model},
        "data": {"path": "questions"},
        **{name: _judge(judge) for name, judge in (("prm", prm), ("orm", orm)) if judge is not None},
        "search": {"method": rule, "width": width, **(options or {})},
        "steps": {key: keys[key] for key in _STEPS if key in keys},
        "budget": {key: keys[key] for key in _BUDGET if key in keys},
    }
    if threads is not None:
        tree["threads"] = threads
    recipe = parse_search(tree, "search()")
    policy = None if isinstance(engine, str) else CorePolicy(engine, recipe.steps)
    tokenizer = None if isinstance(engine, str) else engine.tokenizer
    opened = Search(recipe, policy=policy, tokenizer=tokenizer)
    try:
        rows = [{"prompt": entry} if isinstance(entry, str) else entry for entry in questions]
        parsed = [
            question(i, row, recipe.data, opened.tokenizer, f"question {i + 1}") for i, row in enumerate(rows)
        ]  # fmt: skip
        choice = opened.choose_method(parsed) if recipe.search.method == "auto" else None
        kept = [] if choice is None else choice.kept
        over = {outcome.question.index for outcome in kept}
        outcomes = [*kept, *opened.run(each for each in parsed if each.index not in over)]
        return Outcomes(sorted(outcomes, key=lambda outcome: outcome.question.index), choice)
    finally:
        opened.close()


def _judge(judge: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"url" if "://" in judge else "path": judge} if isinstance(judge, str) else dict(judge)
