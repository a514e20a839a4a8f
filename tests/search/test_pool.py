"""Best-first search over a persistent pool: the nodes it returns to, their cost and when it ends, computed by hand."""

from __future__ import annotations

import random

from plaudit.config.search import BudgetTable, SearchRuleTable, StepsTable
from plaudit.search.drivers.driver import Driver, Expand
from plaudit.search.drivers.methods import new_driver
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.rules.best_first import best_first
from plaudit.search.tree.apportion import rebase
from plaudit.search.tree.frontier import Frontier, Leaf
from plaudit.search.tree.tree import Tree

READING = AnswerReading(StepsTable(stop=";", answer=r"#(\d+)"))


def test_leaf_behind_the_deepest_pays_for_every_level() -> None:
    leaves = [Leaf(1, 0.9, (0,)), Leaf(9, 0.8, (0, 2, 5))]
    frontier = Frontier(3, 4, 4, leaves)
    # Without a return cost the first leaf is better: exp(0), exp(-0.1 / 0.2) = 1, 0.607. ceil(4 / 1.607) = 3, then 1.
    assert best_first(frontier, 0.2, 0.0).counts == [3, 1]
    # Two levels behind at 0.1 each: 0.7 and 0.8, the same weights with the leaves swapped.
    assert best_first(frontier, 0.2, 0.1).counts == [1, 3]
    assert best_first(frontier, 0.2, 1.0).counts == [0, 4]


def test_node_pays_for_every_earlier_expansion() -> None:
    """0.9 - 2 * 0.1 and 0.7 have equal weights; 0.3 - 4 * 0.1 is below 0 and gets no children."""
    leaves = [Leaf(1, 0.9, (0,), times=1), Leaf(2, 0.3, (0,), times=3), Leaf(9, 0.7, (0, 2))]
    assert best_first(Frontier(2, 4, 4, leaves), 0.2, 0.1).counts == [2, 0, 2]


def test_high_return_cost_gives_rebase_over_the_deepest_leaves() -> None:
    rng = random.Random(1)
    for _ in range(50):
        deep = [Leaf(20 + i, rng.random(), (0, 1, 2)) for i in range(rng.randint(1, 6))]
        behind = [Leaf(10 + i, rng.random(), (0, 1)) for i in range(3)]
        counts = best_first(Frontier(3, 8, 8, [*behind, *deep]), 0.2, 1.0).counts
        assert counts == [0, 0, 0, *rebase([leaf.score for leaf in deep], 8, 0.2)]


def new_search(method: str = "best-first", **keys: float) -> Driver:
    table = SearchRuleTable.model_validate({"method": method, "width": 2, "return_cost": 0.0, **keys})
    return new_driver(Tree("", (1, 1, 1)), table, BudgetTable(), READING, "1")


def grow(driver: Driver, *children: tuple[int, str, float]) -> list[int]:
    """Add children (parent, text, score); the characters of the text are its tokens, and "#" ends a path."""
    ids = []
    for parent, text, score in children:
        state = "finished" if text.startswith("#") else "open"
        node = driver.tree.add(parent, list(map(ord, text)), text, state, driver.costs.rounds)
        node.score = score
        node.value = driver.value(node)
        ids.append(node.id)
    driver.costs.calls += len(children)
    return ids


def test_best_first_returns_to_unexpanded_and_to_expanded_nodes() -> None:
    """With T = 0.05 a score that is lower by d has the weight exp(-20 d).

    1. a 0.95, b 0.9, the prompt 1 - 0.1 * (1 + 1): weights 1, 0.37 and 0.05, and ceil(2 / 1.42) = 2 go to a.
    2. Its children score 0. a has 0.95 - 0.1 * (1 + 1) = 0.75, b 0.9 - 0.1 = 0.8, the prompt 1 - 0.1 * (2 + 1) = 0.7:
       weights 0.37, 1 and 0.14, and ceil(2 / 1.50) = 2 go to b.
    3. Its children score 0 too. a has 0.75, b now 0.7, the prompt 0.7: ceil(2 / 1.74) = 2 more children go to a."""
    driver = new_search(return_cost=0.1, temperature=0.05)
    assert driver.expansions() == [Expand(0, 2)]
    a, b = grow(driver, (0, "a;", 0.95), (0, "bb;", 0.9))
    assert driver.expansions() == [Expand(a, 2)]
    assert driver.tree.nodes[b].state == "open"
    grow(driver, (a, "c;", 0.0), (a, "d;", 0.0))
    assert driver.expansions() == [Expand(b, 2)]
    grow(driver, (b, "e;", 0.0), (b, "f;", 0.0))
    assert driver.expansions() == [Expand(a, 2)]
    assert driver.tree.drawn(a) == 2, "which the next ones are drawn behind"
    # The prompt's 3; then 2 and 3 more; then all of the pool: c and d, e and f, 2 each.
    assert driver.costs.kv == [3, 8, 12, 16]
    grow(driver, (a, "#7", 0.9), (a, "#7", 0.9))
    assert driver.expansions() == []
    assert driver.stopped == "done"
    assert [answer.text for answer in driver.answers()] == ["7", "7"]
    assert all(node.state != "open" for node in driver.tree.nodes), "the width no longer reaches what is left"


def test_rebase_does_not_return_to_earlier_nodes() -> None:
    driver = new_search("rebase")
    driver.expansions()
    a, b = grow(driver, (0, "a;", 0.9), (0, "bb;", 0.8))
    driver.expansions()
    assert driver.tree.nodes[b].state == "pruned"
    c, d = grow(driver, (a, "c;", 0.1), (a, "d;", 0.1))
    assert driver.expansions() == [Expand(c, 1), Expand(d, 1)]


def test_twin_of_an_expanded_node_leaves_the_pool() -> None:
    """A twin has the same children: if it stayed in the pool, the pair would be chosen twice."""
    driver = new_search(return_cost=2)
    driver.expansions()
    a, again = grow(driver, (0, "a;", 0.9), (0, "a;", 0.9))
    assert driver.expansions() == [Expand(a, 2)]
    assert driver.tree.nodes[again].state == "expanded"
    assert again not in driver.live()
    driver = new_search(width=4, return_cost=2)
    driver.expansions()
    a, again, b, _ = grow(driver, (0, "a;", 0.1), (0, "a;", 0.1), (0, "b;", 0.9), (0, "c;", 0.1))
    assert driver.expansions() == [Expand(b, 4)]
    assert [driver.tree.nodes[id].state for id in (a, again)] == ["open", "open"]


def test_best_first_samples_no_more_steps_than_a_level_search() -> None:
    driver = new_search(max_depth=3)
    rounds = 0
    while expansions := driver.expansions():
        rounds += 1
        grow(driver, *((e.node, f"{rounds}{i};", 0.9 - 0.2 * rounds) for e in expansions for i in range(e.count)))
    assert driver.costs.calls == 6
    assert driver.stopped == "done"


def test_lead_takes_remaining_paths_into_account() -> None:
    driver = new_driver(
        Tree("", (1,)), SearchRuleTable(method="best-first", width=3, return_cost=0.0), BudgetTable(lead=True), READING,
        "1",
    )  # fmt: skip
    driver.expansions()
    grow(driver, (0, "#7", 0.9), (0, "#7", 0.9), (0, "a;", 0.5))
    assert driver.expansions() == []
    assert driver.stopped == "lead"


def test_node_too_far_behind_is_pruned() -> None:
    """At a cost of 0.2 per level a score of 0.25 lasts for one level, and the prompt's 1, expanded once, for four."""
    driver = new_search(return_cost=0.2, temperature=0.01)
    driver.expansions()
    at, behind = grow(driver, (0, "a;", 0.9), (0, "b;", 0.25))
    states, prompt = [], []
    for depth in range(6):
        assert driver.expansions() == [Expand(at, 2)]
        states.append(driver.tree.nodes[behind].state)
        prompt.append(0 in driver.live())
        at, _ = grow(driver, (at, f"{depth}a;", 0.9), (at, f"{depth}b;", 0.0))
    # In the six rounds the deepest leaf is at depths 1 to 6.
    assert states == ["open", "open", *["pruned"] * 4]
    assert prompt == [*[True] * 4, False, False]
