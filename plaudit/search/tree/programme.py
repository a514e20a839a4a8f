"""Selects the leaves to keep: ETS's integer program (arXiv 2502.13575), solved by HiGHS.

    maximise    sum_i value_i x_i  -  branch_weight * kept cost / whole cost  +  cluster_weight * covered / clusters
    subject to  y_j >= x_i for every branch j above leaf i;  c_k <= sum of x_i in cluster k;  sum x_i >= 1
                and, with a budget,  kept cost <= budget

x_i keeps a leaf, y_j a branch, c_k covers a cluster. Differences from the original:

1. `y_j <= sum x_i` is omitted: a branch has a cost, so none is kept that no leaf needs. y and c are then integers
   wherever x is, and only x must be declared as integer.
2. A cost is per node and set by the caller: 1 each as in the paper, or tokens.
3. There is a time limit; status and gap are reported. On timeout the best solution so far is used, and marked as not
   optimal. `tree_programme` solves the same without HiGHS, and mostly faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_STATUS = {0: "optimal", 1: "time limit", 2: "infeasible", 3: "unbounded", 4: "failed"}


@dataclass(frozen=True, slots=True)
class Programme:
    """values    of leaves
    above     per leaf, the branches above it, as indices into `branch_costs`
    clusters  per leaf, its cluster from 0 on
    budget    the maximum total cost of kept leaves and branches; None: no limit
    """

    values: Sequence[float]
    above: Sequence[Sequence[int]]
    leaf_costs: Sequence[float]
    branch_costs: Sequence[float]
    clusters: Sequence[int] = ()
    branch_weight: float = 1.0
    cluster_weight: float = 0.0
    budget: float | None = None

    @property
    def whole_cost(self) -> float:
        return math.fsum([*self.leaf_costs, *self.branch_costs])

    @property
    def cluster_count(self) -> int:
        return len(set(self.clusters))

    def cost(self, kept: Sequence[int]) -> float:
        """The cost of leaves, given by index, and the branches above them."""
        branches = {j for i in kept for j in self.above[i]}
        return math.fsum([*(self.leaf_costs[i] for i in kept), *(self.branch_costs[j] for j in branches)])

    def objective(self, kept: Sequence[int]) -> float:
        covered = len({self.clusters[i] for i in kept}) / self.cluster_count if self.clusters else 0.0
        worth = math.fsum(self.values[i] for i in kept)
        return worth - self.branch_weight * self.cost(kept) / self.whole_cost + self.cluster_weight * covered


@dataclass(frozen=True, slots=True)
class Solution:
    """kept    leaves by index, ascending; empty if no solution was found in time
    gap     relative gap between the objective and its bound; 0 if proven optimal
    """

    kept: tuple[int, ...]
    status: str
    gap: float = 0.0


def solve(programme: Programme, time_limit: float = 5.0, gap: float = 0.0) -> Solution:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    leaves, branches = len(programme.values), len(programme.branch_costs)
    clusters = sorted(set(programme.clusters)) if programme.cluster_weight > 0 else []
    place = {cluster: leaves + branches + k for k, cluster in enumerate(clusters)}
    count = leaves + branches + len(clusters)
    scale = programme.branch_weight / programme.whole_cost

    gain = np.zeros(count)
    gain[:leaves] = np.asarray(programme.values) - scale * np.asarray(programme.leaf_costs)
    gain[leaves : leaves + branches] = -scale * np.asarray(programme.branch_costs)
    gain[leaves + branches :] = programme.cluster_weight / max(1, len(clusters))

    # Row by row: (column, coefficient) with a lower bound of 0 unless set.
    rows: list[list[tuple[int, float]]] = [
        [(leaves + j, 1.0), (i, -1.0)] for i, above in enumerate(programme.above) for j in above
    ]
    for cluster in clusters:
        members = [i for i, c in enumerate(programme.clusters) if c == cluster]
        rows.append([*((i, 1.0) for i in members), (place[cluster], -1.0)])
    low, high = [0.0] * len(rows), [np.inf] * len(rows)
    rows.append([(i, 1.0) for i in range(leaves)])
    low, high = [*low, 1.0], [*high, np.inf]
    if programme.budget is not None:
        costs = [*programme.leaf_costs, *programme.branch_costs]
        rows.append(list(enumerate(costs)))
        low, high = [*low, -np.inf], [*high, programme.budget]
    at = [(row, column, value) for row, entries in enumerate(rows) for column, value in entries]
    row, column, value = (np.array(part) for part in zip(*at, strict=True))
    matrix = coo_array((value, (row, column)), shape=(len(rows), count)).tocsc()
    integral = np.zeros(count)
    integral[:leaves] = 1
    result = milp(
        -gain, integrality=integral, bounds=Bounds(0, 1), constraints=LinearConstraint(matrix, low, high),
        options={"time_limit": time_limit, "mip_rel_gap": gap},
    )  # fmt: skip
    status = _STATUS.get(result.status, "failed")
    if result.x is None:
        return Solution((), status, math.inf)
    kept = tuple(np.flatnonzero(result.x[:leaves] > 0.5).tolist())
    return Solution(kept, status, float(result.mip_gap or 0.0))
