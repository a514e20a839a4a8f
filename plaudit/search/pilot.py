"""`method = "auto"`: a pilot on questions with known answers measures steps, accuracy and AUC, the table selects a
method for them, and the pilot's questions decide between that method and best-of-n.

The table was measured with simulated policies and PRMs (docs/search-when.md): a real PRM may be fooled by paths that a
search selects, whatever its AUC on plain samples. So a tree search is chosen only if it is right on the pilot's
questions as often as best-of-n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plaudit.config.search import GroundTable, SearchRecipe
from plaudit.errors import ConfigError
from plaudit.search.questions.questions import Question
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.runner import Outcome
from plaudit.search.tree.costs import totals
from plaudit.search.when import BEST_OF_N, advise, following

Searched = Callable[[SearchRecipe, Sequence[Question]], list[Outcome]]
"""Searches these questions with this recipe, in order."""


@dataclass(frozen=True)
class Ground:
    """Measurements of a pilot. `pairs`: a correct and a wrong response to one question, used for the AUC."""

    questions: int
    steps: float
    accuracy: float
    auc: float
    pairs: int


@dataclass(frozen=True)
class Chosen:
    """method     the chosen method
    why        the reason in one sentence, with figures
    ground     measured by the pilot; None if set in the recipe
    cell       of the table
    discarded  costs of searches whose results are discarded
    kept       the pilot's questions as searched by the chosen method
    """

    method: str
    why: str
    ground: Ground | None = None
    cell: str | None = None
    discarded: dict[str, float] = field(default_factory=dict)
    kept: list[Outcome] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """All fields except the outcomes, for a file."""
        ground = None if self.ground is None else asdict(self.ground)
        return {"method": self.method, "why": self.why, "ground": ground, "cell": self.cell,
                "discarded": self.discarded}  # fmt: skip


def choose(recipe: SearchRecipe, questions: Sequence[Question], searched: Searched, reading: AnswerReading) -> Chosen:
    table = recipe.search
    if table.ground is not None:
        advice = advise(table.ground, table.width)
        return Chosen(advice.method, advice.why, cell=advice.cell)
    pilot_questions = [question for question in questions if question.truth is not None][: table.pilot]
    if not pilot_questions:
        raise ConfigError(
            'search.method = "auto" needs questions with correct answers, but none has one: set their key '
            "(data.truth), or set search.ground with steps, accuracy and auc, or set a method"
        )
    plain = searched(following(recipe, BEST_OF_N), pilot_questions)
    ground = measured(plain, reading)
    if not ground.pairs:
        why = f"no question of the pilot has both right and wrong responses ({ground.accuracy:.0%} right): no AUC"
        return Chosen(BEST_OF_N, why, ground, kept=plain)
    seen = GroundTable(steps=ground.steps, accuracy=ground.accuracy, auc=ground.auc)
    advice = advise(seen, table.width)
    why = (
        f"{ground.questions} questions of a pilot have {ground.steps:.1f} steps, {ground.accuracy:.0%} of responses "
        f"right, AUC {ground.auc:.2f} over {ground.pairs} pairs; {advice.why}"
    )
    if advice.method == BEST_OF_N:
        return Chosen(BEST_OF_N, why, ground, advice.cell, kept=plain)
    tree = searched(following(recipe, advice.method), pilot_questions)
    ours, theirs = (sum(outcome.right is True for outcome in each) for each in (tree, plain))
    why += f"; on the pilot's questions {advice.method} has {ours} right and best-of-n {theirs}"
    if ours >= theirs:
        return Chosen(advice.method, why, ground, advice.cell, _costs(plain), tree)
    return Chosen(BEST_OF_N, f"{why}, so best-of-n", ground, advice.cell, _costs(tree), plain)


def measured(outcomes: Sequence[Outcome], reading: AnswerReading) -> Ground:
    """Measures searches by best-of-n. A response without an answer is wrong; one without a score is in no pair."""
    right = paths = steps = pairs = 0
    ordered = 0.0
    for outcome in outcomes:
        nodes = outcome.tree.nodes
        good: list[float] = []
        bad: list[float] = []
        for node in nodes:
            if node.state not in ("finished", "cut", "failed"):
                continue
            answer = reading.answer(outcome.tree.response(node.id)) if node.state == "finished" else None
            is_right = outcome.question.right(answer, reading.alike) is True
            paths, steps, right = paths + 1, steps + node.depth, right + is_right
            if node.state == "finished":
                (good if is_right else bad).append(node.value)
        pairs += len(good) * len(bad)
        ordered += math.fsum((a > b) + (a == b) / 2 for a in good for b in bad)
    return Ground(len(outcomes), steps / max(1, paths), right / max(1, paths), ordered / max(1, pairs), pairs)


def _costs(outcomes: Sequence[Outcome]) -> dict[str, float]:
    spent = totals(outcome.driver.costs.figures() for outcome in outcomes)
    return {name: spent[name] for name in ("generated", "kv_tokens", "calls", "prm_tokens") if name in spent}
