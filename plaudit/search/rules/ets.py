"""ETS (arXiv 2502.13575): REBASE over the leaves selected by an integer program.

A leaf's value is its share of REBASE's counts; a branch needed only by weak leaves costs more than it adds, and every
cluster with a kept leaf adds a bonus. The full width then goes to the kept leaves, so that ETS generates as many steps
as REBASE, from fewer parents: with less KV cache. Differences from the original:

1. Leaves that repeat each other word for word are one leaf of the program, with the sum of their values.
2. `cost = "tokens"` charges a node its tokens, the prompt's once, instead of 1.
3. `kv_budget` sets a limit of tokens instead of a price: `branch_weight` is then ignored.
4. The program is solved exactly as a tree (`tree_programme`); HiGHS solves budgets and cases with too much branching.
5. With branch_weight 0 and no budget every leaf is kept, as in the original, without a solver.
6. If the solver finds no solution in time, the level uses REBASE, which is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plaudit.search.tree.apportion import rebase as counts_by_score
from plaudit.search.tree.frontier import Choice, Frontier
from plaudit.search.tree.programme import Programme, Solution, solve
from plaudit.search.tree.tree_programme import solve_covering, solve_tree


@dataclass(frozen=True, slots=True)
class Ets:
    """branch_weight   the paper's lambda_b, `lambdac` in its published configurations
    cluster_weight  lambda_d, `lambdas`
    time_limit      seconds for one program
    gap             a solution within this fraction of the bound is accepted
    """

    temperature: float = 0.2
    branch_weight: float = 1.0
    cluster_weight: float = 1.5
    cost: Literal["nodes", "tokens"] = "nodes"
    kv_budget: int | None = None
    time_limit: float = 5.0
    gap: float = 0.0

    def __call__(self, frontier: Frontier) -> Choice:
        scores = [leaf.score for leaf in frontier.leaves]
        counts = counts_by_score(scores, frontier.width, self.temperature)
        if len(scores) < 2 or (self.branch_weight == 0 and self.kv_budget is None):
            return Choice(counts)
        programme, groups = self.programme(frontier, counts)
        began = time.perf_counter()
        solution = self.solve(programme)
        details: dict[str, float | str] = {
            "status": solution.status, "gap": solution.gap, "seconds": time.perf_counter() - began,
            "leaves": len(groups), "kept": len(solution.kept),
        }  # fmt: skip
        if not solution.kept:
            return Choice(counts, details)
        kept = [i for place in solution.kept for i in groups[place]]
        again = counts_by_score([scores[i] for i in kept], frontier.width, self.temperature)
        counts = [0] * len(scores)
        for i, count in zip(kept, again, strict=True):
            counts[i] = count
        return Choice(counts, details)

    def solve(self, programme: Programme) -> Solution:
        if programme.budget is not None:
            return solve(programme, self.time_limit, self.gap)
        if not programme.clusters:
            return solve_tree(programme)
        return solve_covering(programme, self.time_limit, self.gap)

    def programme(self, frontier: Frontier, counts: Sequence[int]) -> tuple[Programme, list[list[int]]]:
        """The program of a frontier with these counts, and for each of its leaves the positions that it represents."""
        twins: dict[int, list[int]] = {}
        for i, leaf in enumerate(frontier.leaves):
            twins.setdefault(leaf.twin, []).append(i)
        groups = list(twins.values())
        firsts = [frontier.leaves[group[0]] for group in groups]
        branches = sorted({branch for leaf in firsts for branch in leaf.branches})
        place = {branch: j for j, branch in enumerate(branches)}
        by_tokens = self.cost == "tokens" or self.kv_budget is not None
        leaf_costs = [leaf.tokens if by_tokens else 1 for leaf in firsts]
        branch_costs = [frontier.tokens.get(branch, 1) if by_tokens else 1 for branch in branches]
        above = [[place[branch] for branch in leaf.branches] for leaf in firsts]
        covering = self.cluster_weight > 0 and len(groups) > 1
        budget = self.kv_budget
        if budget is not None:
            # A budget smaller than the cheapest leaf would leave nothing to search.
            cheapest = min(c + sum(branch_costs[j] for j in a) for c, a in zip(leaf_costs, above, strict=True))
            budget = max(budget, cheapest)
        programme = Programme(
            values=[sum(counts[i] for i in group) / frontier.width for group in groups],
            above=above,
            leaf_costs=leaf_costs,
            branch_costs=branch_costs,
            clusters=[leaf.cluster for leaf in firsts] if covering else [],
            branch_weight=0.0 if budget is not None else self.branch_weight,
            cluster_weight=self.cluster_weight,
            budget=budget,
        )
        return programme, groups
