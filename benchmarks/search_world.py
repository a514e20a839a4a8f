"""A task whose steps and mistakes are known exactly: a policy that is a table, and a process model of a given quality.

A question needs `depth` steps, and every step has its own probability of being right: a few carry most of the risk, as
in real questions. A mistake makes the path and its answer wrong. The text of a step is one of a few, so that siblings
repeat each other as those of a language model do; a detour has a text but makes no progress, so paths differ in length.
A question's probabilities are drawn so that one sample is right with the ground's `accuracy` on average, over questions
that range from easy to nearly hopeless.

The process model knows whether a path is still right and observes it through noise: its score is the posterior of a
normal variable whose mean differs between right and wrong paths by the amount that gives the AUC. Half of the noise is
inherited from the previous step: a path that fools the model keeps fooling it.

All draws are keyed by (question, path): every method searches the same trees, with the same scores. The drivers, rules
and votes are those of `plaudit search`; only a model's outputs are drawn here.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

from plaudit.config.search import BudgetTable, SearchRuleTable, StepsTable
from plaudit.search.backends.cluster import by_key
from plaudit.search.drivers.driver import Driver
from plaudit.search.drivers.methods import new_driver
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.tree.costs import Costs
from plaudit.search.tree.tree import Node, Tree

STEP_TOKENS, PROMPT_TOKENS = 8, 24
WORDINGS = (("a", 0.6), ("b", 0.3), ("c", 0.1))
MISTAKES = (("w", 0.5), ("x", 0.25), ("y", 0.15), ("z", 0.1))
DETOUR = "d"
DETOURS = 0.15  # of all steps
TOKENS = {text: (code, *[0] * (STEP_TOKENS - 1)) for code, text in enumerate("abcwxyzd", start=10)}
PROMPT = (1,) * PROMPT_TOKENS
WRONG_ANSWERS = 8
SPREAD = 2.0  # of questions' accuracies: Beta(accuracy * SPREAD, (1 - accuracy) * SPREAD)
RISK_SHAPE = 0.3  # shape of the gamma variables that split a question's risk over its steps
INHERITED = math.sqrt(0.5)
READING = AnswerReading(StepsTable(stop=";", answer=r"#(\d+)"))


@dataclass(frozen=True, slots=True)
class Ground:
    depth: int
    accuracy: float

    @property
    def name(self) -> str:
        return f"{self.depth} steps, {self.accuracy:.0%} right"


@dataclass(frozen=True, slots=True)
class State:
    """State of a path: steps towards the answer, its mistake (0: none), the noise of its last score, and the key of its
    draws."""

    done: int
    mistake: int
    noise: float
    key: bytes


class World:
    """A question of a ground, and a process model with this AUC."""

    def __init__(self, ground: Ground, auc: float, question: int, seed: int = 1) -> None:
        self.depth = ground.depth
        self.apart = math.inf if auc >= 1 else math.sqrt(2) * NormalDist().inv_cdf(auc)
        rng = random.Random(f"{seed} {ground.depth} {ground.accuracy} {question}")
        whole = rng.betavariate(ground.accuracy * SPREAD, (1 - ground.accuracy) * SPREAD)
        risks = [rng.gammavariate(RISK_SHAPE, 1.0) + 1e-12 for _ in range(ground.depth)]
        self.chances = [max(whole, 1e-9) ** (risk / sum(risks)) for risk in risks]
        self.root = State(0, 0, 0.0, f"{seed} {ground} {question}".encode())

    def step(self, state: State, place: int) -> tuple[str, State]:
        """The text of child number `place` of a path, and the resulting state. Children with the same text are one."""
        leads, right, which = _draws(state.key, place)
        if leads < DETOURS:
            text, done, mistake = DETOUR, state.done, state.mistake
        else:
            done, mistake = state.done + 1, state.mistake
            if mistake == 0 and right >= self.chances[state.done]:
                text = _pick(MISTAKES, which)
                mistake = 1 + state.done * len(MISTAKES) + ord(text) - ord("w")
            else:
                text = _pick(WORDINGS, which)
        key = hashlib.blake2b(state.key + text.encode(), digest_size=16).digest()
        noise = _normal(key)
        if state.done or state.noise:
            noise = INHERITED * state.noise + math.sqrt(1 - INHERITED**2) * noise
        return text, State(done, mistake, noise, key)

    def answer(self, state: State) -> str:
        return "" if state.done < self.depth else f"#{0 if state.mistake == 0 else 1 + state.mistake % WRONG_ANSWERS}"

    def score(self, state: State) -> float:
        right = state.mistake == 0
        if self.apart == math.inf:
            return float(right)
        seen = (0.5 if right else -0.5) * self.apart + state.noise
        return 1 / (1 + math.exp(-self.apart * seen))


def search(
    world: World, table: SearchRuleTable, budget: BudgetTable | None = None, rule: Callable[..., Any] | None = None,
    clock: Callable[[Costs], float] | None = None, on_round: Callable[[Driver], None] = lambda _: None,
) -> Driver:  # fmt: skip
    """Searches one question to its end, as `Runner` does. The right answer is 0. `clock` converts its cost to seconds;
    `on_round` is called before every round and at the end."""
    driver = new_driver(Tree("", PROMPT), table, budget or BudgetTable(), READING, "1")
    if rule is not None:
        driver.rule = rule  # type: ignore[attr-defined]
    if clock is not None:
        driver.clock = partial(clock, driver.costs)
    tree, states = driver.tree, [world.root]
    while True:
        expansions = driver.expansions()
        on_round(driver)
        if not expansions:
            return driver
        nodes: list[Node] = []
        for expand in expansions:
            before = tree.drawn(expand.node)
            for place in range(before, before + expand.count):
                text, state = world.step(states[expand.node], place)
                answer = world.answer(state)
                kind = "finished" if answer else "open"
                node = tree.add(expand.node, TOKENS[text], f"{text}{answer};", kind, driver.costs.rounds)
                node.score = world.score(state)
                node.value = driver.value(node)
                states.append(state)
                nodes.append(node)
        driver.costs.calls += len(nodes)
        driver.costs.generated += STEP_TOKENS * len(nodes)
        driver.costs.scored += sum(node.twin == node.id for node in nodes)
        if table.clustered:
            for node, number in zip(nodes, by_key([node.text for node in nodes]), strict=True):
                node.cluster = number
        driver.take(nodes)


def _draws(key: bytes, place: int) -> tuple[float, float, float]:
    digest = hashlib.blake2b(key + place.to_bytes(4, "big"), digest_size=24).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "big") / 2**64 for at in (0, 8, 16))  # type: ignore[return-value]


def _normal(key: bytes) -> float:
    """A standard normal number from 16 random bytes (Box-Muller)."""
    first, second = (int.from_bytes(key[at : at + 8], "big") / 2**64 for at in (0, 8))
    return math.sqrt(-2 * math.log(max(first, 1e-300))) * math.cos(2 * math.pi * second)


def _pick(texts: Sequence[tuple[str, float]], at: float) -> str:
    for text, weight in texts:
        at -= weight
        if at < 0:
            return text
    return texts[-1][0]
