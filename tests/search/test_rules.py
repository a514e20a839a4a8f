"""Selection rules against values computed by hand, references and exhaustive search."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from plaudit.errors import RequestError
from plaudit.search.backends.cluster import by_vector
from plaudit.search.questions.answers import Answer, decided, tally, winner
from plaudit.search.questions.equivalence import SameNumber
from plaudit.search.rules.beam import beam
from plaudit.search.rules.best_of_n import best_of_n
from plaudit.search.rules.dvts import dvts
from plaudit.search.rules.ets import Ets
from plaudit.search.rules.particles import odds, resample
from plaudit.search.rules.puct import Visits, puct
from plaudit.search.tree.apportion import apportion, even, rebase
from plaudit.search.tree.frontier import Frontier, Leaf
from plaudit.search.tree.programme import Programme, solve
from plaudit.search.tree.tree import Tree, distinct_tokens
from plaudit.search.tree.tree_programme import solve_covering, solve_tree


def reference_apportionment(weights: list[float], width: int) -> list[int]:
    """The definition, computed with exact fractions."""
    exact = [Fraction(weight) for weight in weights]
    counts = [0] * len(weights)
    remaining, mass = width, sum(exact, Fraction(0))
    for i in sorted(range(len(weights)), key=lambda i: (-exact[i], i)):
        if remaining == 0 or mass == 0:
            break
        counts[i] = math.ceil(remaining * exact[i] / mass)
        remaining -= counts[i]
        mass -= exact[i]
    return counts


@pytest.mark.slow
def test_rebase_equals_the_reference_on_ten_thousand_vectors() -> None:
    rng = random.Random(1)
    for trial in range(10_000):
        scores = [rng.random() for _ in range(rng.randint(1, 20))]
        if trial % 3 == 0:  # ties, as from a cached or rounded PRM
            scores = [round(score, 1) for score in scores]
        if trial % 7 == 0:  # far apart: the weights of most underflow
            scores = [score * 1e4 - 5e3 for score in scores]
        width = rng.randint(0, 70)
        counts = rebase(scores, width)
        top = max(scores)
        assert counts == reference_apportionment([math.exp((s - top) / 0.2) for s in scores], width)
        assert sum(counts) == width
        by_score = [counts[i] for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i))]
        assert by_score == sorted(by_score, reverse=True)


def test_rebase_equals_values_computed_by_hand() -> None:
    # exp(0.9/0.2), exp(0.8/0.2), exp(0.1/0.2) = 90.0, 54.6, 1.65: ceil(16 * .6155) = 10, ceil(6 * .9707) = 6, none left
    assert rebase([0.8, 0.9, 0.1], 16) == [6, 10, 0]
    assert rebase([0.5] * 3, 7) == [3, 2, 2]
    assert rebase([], 4) == []
    assert rebase([0.3], 5) == [5]
    assert apportion([1.0, 5e-324], 4) == [4, 0]


def test_nonfinite_score_is_rejected() -> None:
    with pytest.raises(RequestError, match="leaf 1 is nan"):
        rebase([0.5, float("nan")], 4)
    with pytest.raises(RequestError, match="leaf 0 is inf"):
        beam(Frontier(1, 4, 4, [Leaf(1, float("inf"), (0,))]))


def random_programme(rng: random.Random, leaves: int, weights: tuple[float, float]) -> Programme:
    """A random tree: each leaf ends a chain that branches off an earlier chain."""
    lines: list[list[int]] = [[0]]
    branches = 1
    for _ in range(leaves - 1):
        at = rng.choice(lines)
        line = at[: rng.randint(1, len(at))]
        while rng.random() < 0.4:
            line = [*line, branches]
            branches += 1
        lines.append(line)
    return Programme(
        values=[rng.random() * rng.choice([0.1, 0.3]) for _ in lines],
        above=lines,
        leaf_costs=[rng.randint(1, 9) for _ in lines],
        branch_costs=[rng.randint(1, 9) for _ in range(branches)],
        clusters=[rng.randrange(max(1, leaves // 2)) for _ in lines] if weights[1] else [],
        branch_weight=weights[0],
        cluster_weight=weights[1],
    )


def best_by_enumeration(programme: Programme) -> float:
    indices = range(len(programme.values))
    subsets = itertools.chain.from_iterable(itertools.combinations(indices, n) for n in range(1, len(indices) + 1))
    allowed = (s for s in subsets if programme.budget is None or programme.cost(s) <= programme.budget + 1e-9)
    return max(programme.objective(subset) for subset in allowed)


@pytest.mark.slow
def test_integer_program_is_solved_exactly() -> None:
    rng = random.Random(2)
    for trial in range(500):
        # Enumerating all 4,095 subsets is slow; most instances are smaller, and some have 12 leaves.
        leaves = 12 if trial % 25 == 0 else rng.randint(1, 8)
        programme = random_programme(rng, leaves, (rng.choice([0.5, 1.0, 2.0]), rng.choice([0.3, 1.0, 1.5])))
        best = best_by_enumeration(programme)
        for solution in (solve(programme), solve_covering(programme)):
            assert solution.status == "optimal"
            assert programme.objective(solution.kept) == pytest.approx(best, abs=1e-7)


def test_tree_program_is_exact_and_agrees_with_the_solver() -> None:
    rng = random.Random(3)
    for trial in range(500):
        leaves = 12 if trial % 25 == 0 else rng.randint(1, 8)
        programme = random_programme(rng, leaves, (rng.choice([0.2, 1.0, 3.0]), 0.0))
        best = best_by_enumeration(programme)
        assert programme.objective(solve_tree(programme).kept) == pytest.approx(best, abs=1e-9)
        if trial % 5 == 0:
            assert programme.objective(solve(programme).kept) == pytest.approx(best, abs=1e-7)


def test_tree_and_solver_agree_on_larger_programs() -> None:
    rng = random.Random(11)
    for leaves in (16, 24, 32, 64):
        for _ in range(3):
            programme = random_programme(rng, leaves, (1.0, 1.5))
            by_tree, by_solver = solve_covering(programme), solve(programme, 30.0)
            assert by_tree.status == by_solver.status == "optimal"
            assert programme.objective(by_tree.kept) == pytest.approx(programme.objective(by_solver.kept), abs=1e-6)


@pytest.mark.slow
def test_budgeted_program_is_solved_optimally_within_the_budget() -> None:
    rng = random.Random(4)
    for _ in range(60):
        programme = random_programme(rng, rng.randint(2, 8), (0.0, 1.0))
        cheapest = min(programme.cost([i]) for i in range(len(programme.values)))
        budget = cheapest + rng.random() * (programme.whole_cost - cheapest)
        limited = Programme(*(getattr(programme, name) for name in programme.__slots__[:-1]), budget)
        solution = solve(limited)
        assert limited.cost(solution.kept) <= budget + 1e-6
        assert limited.objective(solution.kept) == pytest.approx(best_by_enumeration(limited), abs=1e-7)


def test_solver_reports_its_time_limit() -> None:
    rng = random.Random(5)
    hard = random_programme(rng, 400, (1.0, 1.5))
    solution = solve(hard, time_limit=1e-6)
    assert solution.status == "time limit"
    leaves = [Leaf(i + 1, rng.random(), (0,), cluster=i) for i in range(200)]
    choice = Ets(time_limit=1e-9, kv_budget=40)(Frontier(1, 64, 64, leaves, {0: 5}))
    assert choice.solver["status"] == "time limit"
    assert sum(choice.counts) == 64


def test_ets_keeps_a_cluster_that_cost_alone_would_drop() -> None:
    # Two good leaves under branch 1, one weak leaf of another cluster alone under branch 2.
    leaves = [Leaf(3, 0.9, (0, 1), cluster=0), Leaf(4, 0.9, (0, 1), cluster=0), Leaf(5, 0.55, (0, 2), cluster=1)]
    frontier = Frontier(2, 8, 8, leaves)
    # REBASE: exp(4.5), exp(4.5), exp(2.75) = 90, 90, 15.6 -> 4, 4, 0. V = 6 nodes.
    assert Ets(cluster_weight=0.0)(frontier).counts == [4, 4, 0]
    # Covering the second cluster is worth 1.5 / 2 and costs two nodes: 2 / 6. So leaf 5 stays a candidate for REBASE.
    programme, groups = Ets().programme(frontier, [4, 4, 0])
    assert solve(programme).kept == (0, 1, 2)
    assert groups == [[0], [1], [2]]
    assert sum(Ets()(frontier).counts) == 8


def test_ets_merges_leaves_that_repeat_each_other() -> None:
    leaves = [Leaf(1, 0.5, (0,)), Leaf(2, 0.5, (0,), twin=1), Leaf(3, 0.4, (0,), cluster=1)]
    programme, groups = Ets().programme(Frontier(1, 4, 4, leaves, {0: 7}), [2, 1, 1])
    assert groups == [[0, 1], [2]]
    assert list(programme.values) == [0.75, 0.25]
    by_tokens, _ = Ets(cost="tokens").programme(Frontier(1, 4, 4, leaves, {0: 7}), [2, 1, 1])
    assert list(by_tokens.branch_costs) == [7]


def test_ets_does_not_depend_on_the_order_of_leaves() -> None:
    rng = random.Random(6)
    for _ in range(30):
        leaves = [Leaf(i + 3, rng.random(), (0, rng.choice([1, 2])), cluster=rng.randrange(3)) for i in range(7)]
        shuffled = rng.sample(leaves, len(leaves))
        first, second = (Ets()(Frontier(2, 16, 16, order)) for order in (leaves, shuffled))
        counts = {leaf.id: count for leaf, count in zip(leaves, first.counts, strict=True)}
        assert counts == {leaf.id: count for leaf, count in zip(shuffled, second.counts, strict=True)}


def test_beam_and_best_of_n() -> None:
    leaves = [Leaf(i + 1, score, (0,)) for i, score in enumerate([0.1, 0.9, 0.5, 0.7])]
    assert beam(Frontier(1, 4, 4, leaves)).counts == [0, 2, 0, 2]
    assert beam(Frontier(1, 5, 5, leaves), keep=2).counts == [0, 3, 0, 2]
    assert beam(Frontier(0, 16, 16, [Leaf(0, 1.0, ())])).counts == [16]
    twins = [Leaf(1, 0.9, (0,)), Leaf(2, 0.9, (0,), twin=1), Leaf(3, 0.4, (0,)), Leaf(4, 0.5, (0,))]
    assert beam(Frontier(1, 4, 4, twins)).counts == [2, 2, 0, 0]
    assert beam(Frontier(1, 4, 4, twins), distinct=True).counts == [2, 0, 0, 2]
    assert best_of_n(Frontier(0, 16, 16, [Leaf(0, 1.0, ())])).counts == [16]
    assert best_of_n(Frontier(1, 4, 4, leaves)).counts == [1, 1, 1, 1]


def test_dvts_keeps_subtrees_apart() -> None:
    firsts = [Leaf(i + 1, score, (0,)) for i, score in enumerate([0.1, 0.9, 0.5, 0.7])]
    assert dvts(Frontier(1, 4, 4, firsts)).counts == [0, 2, 0, 2]
    assert dvts(Frontier(1, 3, 4, firsts[:3])).counts == [0, 2, 1]
    # Subtree 2 has two open leaves, subtree 4 has one: its other leaf has ended.
    seconds = [Leaf(5, 0.2, (0, 2)), Leaf(6, 0.3, (0, 2)), Leaf(7, 0.9, (0, 4))]
    assert dvts(Frontier(2, 3, 4, seconds)).counts == [0, 2, 1]


def test_particles() -> None:
    assert odds(0.75) == pytest.approx(3.0)
    assert math.isfinite(odds(1.0))
    indices = resample([0.75, 0.5], 40_000, random.Random(7))
    assert indices.count(0) / 40_000 == pytest.approx(0.75, abs=0.01)
    assert resample([0.0, 0.0], 3, random.Random(8)) == resample([0.0, 0.0], 3, random.Random(8))


def test_puct_equals_values_computed_by_hand() -> None:
    # Unvisited parent: the square root of 0 visits is 0, so the greater score wins.
    assert puct(0, [Visits(0.2), Visits(0.4)]) == 1
    # One visit of the second child brought 0.1: 0.1 + .5*1.25*1/2 = 0.41 < 0.2 + .5*1.25*1 = 0.83
    assert puct(1, [Visits(0.2), Visits(0.4, count=1, total=0.1)]) == 0


def test_clusters() -> None:
    vectors = np.array([[1.0, 0.0], [0.0, 0.0], [2.0, 0.05], [0.0, 3.0], [0.0, 0.0]])
    assert by_vector(vectors, 0.05) == [0, 1, 0, 2, 1]
    assert by_vector(vectors[:1], 0.05) == [0]
    with pytest.raises(RequestError, match="not finite"):
        by_vector(np.array([[np.nan, 1.0]]), 0.05)


def test_votes() -> None:
    answers = [Answer("7", 0.9, 1), Answer("8", 0.5, 2), Answer(" 8.0", 0.6, 3), Answer("9", 0.1, 4)]
    alike = SameNumber()
    assert tally(answers, "weighted", alike) == {"8": pytest.approx(1.1), "7": 0.9, "9": 0.1}
    best_answer = winner(answers, "weighted", alike)
    assert best_answer is not None
    assert best_answer.node == 3
    assert winner(answers, "best", alike) == answers[0]
    assert next(iter(tally(answers, "majority", alike))) == "8"
    assert winner([], "weighted", alike) is None
    assert alike("1/2", "0.5")
    assert alike("x  + 1", "x + 1")
    assert not alike("1/0", "1")
    assert not decided(answers, "weighted", 1, alike)
    assert decided(answers, "weighted", 0, alike)
    assert decided([Answer("7", 0.9, 1)] * 3, "weighted", 2, alike)
    assert not decided([Answer("7", 0.9, 1)] * 3, "weighted", 3, alike)


def test_vote_is_decided_above_the_probability_threshold() -> None:
    """The remaining votes are Beta-binomial. With 3 votes to 0 the leader's share is Beta(4, 1), and three more votes
    overturn the lead only if all are against it: with B(4, 4) / B(1, 4) = 4 * 3! * 3! / 7! = 1 / 35."""

    def alike(a: str, b: str) -> bool:
        return a == b

    votes = [Answer("7", 1.0, 1)] * 3
    assert decided(votes, "majority", 3, alike, sure=0.97)
    assert not decided(votes, "majority", 3, alike, sure=0.98)
    halves = [Answer("7", 0.5, 1)] * 3  # remaining votes are assumed to weigh as much as earlier ones
    assert decided(halves, "weighted", 3, alike, sure=0.97)
    assert not decided(halves, "weighted", 3, alike, sure=0.98)
    assert not decided([*votes, *[Answer("8", 1.0, 2)] * 2], "majority", 8, alike, sure=0.9)
    assert not decided([Answer("7", 0.0, 1)], "weighted", 3, alike, sure=0.5)
    assert decided([], "majority", 0, alike, sure=0.5)


def test_tree_counts_distinct_tokens() -> None:
    tree = Tree("7+8=", [1, 2, 3])
    a = tree.add(0, [5, 6, 7], "a", "open", 1)
    b = tree.add(0, [5, 6, 8], "b", "open", 1)
    again = tree.add(0, [5, 6, 7], "a", "open", 1)
    assert again.twin == a.id
    assert again.id != a.id
    below = tree.add(a.id, [9], "c", "open", 2)
    assert tree.kv_tokens([0]) == 3
    assert tree.kv_tokens([a.id, again.id]) == 6
    assert tree.kv_tokens([a.id, b.id]) == 7  # 5 6 are shared, 7 and 8 are not
    assert tree.kv_tokens([below.id, b.id]) == 8
    assert tree.path_ids(below.id) == (1, 2, 3, 5, 6, 7, 9)
    assert tree.branches(below.id) == (0, a.id)
    with pytest.raises(ValueError, match="twin"):
        tree.add(again.id, [9], "c", "open", 2)
    assert distinct_tokens([(1, 2), (1, 2, 3), (1, 4)]) == 4
    assert distinct_tokens([(-1, -1), (-1,)]) == 3  # unknown tokens count as different
    assert even(3, 7) == [3, 2, 2]


def test_branch_weight_has_no_effect_under_a_kv_budget() -> None:
    """A budget replaces the price: both together would charge for the same tokens twice."""
    rng = random.Random(9)
    for _ in range(20):
        leaves = [Leaf(i + 3, rng.random(), (0, rng.choice([1, 2])), cluster=i % 3) for i in range(6)]
        frontier = Frontier(2, 16, 16, leaves, {0: 5, 1: 9, 2: 4, **{leaf.id: rng.randint(3, 9) for leaf in leaves}})
        free, priced = (Ets(branch_weight=weight, kv_budget=40)(frontier).counts for weight in (0.0, 50.0))
        assert priced == free
