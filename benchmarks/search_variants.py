"""Rules that were tried in addition to ETS and are not in the package; `benchmarks/search.py --part variants` measures
them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from plaudit.search.backends.cluster import by_key
from plaudit.search.rules.ets import Ets
from plaudit.search.tree.apportion import apportion, rebase
from plaudit.search.tree.frontier import Choice, Frontier


@dataclass(frozen=True, slots=True)
class Joint:
    """Pruning and allocation in one integer program: which leaves are kept, and how many children each cluster of steps
    gets.

    ETS prunes with an integer program, then allocates the width by REBASE, which ignores clusters: near-duplicates of a
    good step are paid for as often as they occur. Here the t-th child of a cluster is worth mass * fade**t, where the
    mass is the cluster's share of REBASE's softmax; kept nodes cost what they cost in ETS.

        maximise    sum_k mass_k sum_t fade**t z_kt  -  branch_weight * kept cost / whole cost
        subject to  z_kt <= 1;  sum_t z_kt <= width * sum of x_i in cluster k;  sum z = width;  y_j >= x_i

    Inside a cluster the kept leaves share its children by REBASE.
    """

    temperature: float = 0.2
    branch_weight: float = 1.0
    fade: float = 0.9
    time_limit: float = 5.0

    def __call__(self, frontier: Frontier) -> Choice:
        scores, width = [leaf.score for leaf in frontier.leaves], frontier.width
        counts = rebase(scores, width, self.temperature)
        if len(scores) < 2:
            return Choice(counts)
        ets = Ets(self.temperature, self.branch_weight, cluster_weight=1.0)
        programme, groups = ets.programme(frontier, counts)
        if len(groups) < 2:
            return Choice(counts)
        began = time.perf_counter()
        top = max(scores)
        weights = [math.exp((score - top) / self.temperature) for score in scores]
        clusters = sorted(set(programme.clusters))
        members = {k: [g for g, c in enumerate(programme.clusters) if c == k] for k in clusters}
        masses = [sum(weights[i] for g in members[k] for i in groups[g]) for k in clusters]
        kept, children = self._solve(programme, members, [m / sum(masses) for m in masses], width)
        solution: dict[str, float | str] = {"status": "optimal", "gap": 0.0, "seconds": time.perf_counter() - began}
        if not kept:
            return Choice(counts, {**solution, "status": "time limit"})
        counts = [0] * len(scores)
        for k, count in zip(clusters, children, strict=True):
            places = [i for g in members[k] if g in kept for i in groups[g]]
            for i, share in zip(places, rebase([scores[i] for i in places], count, self.temperature), strict=True):
                counts[i] = share
        return Choice(counts, solution)

    def _solve(self, programme: Any, members: Any, masses: Any, width: int) -> tuple[list[int], list[int]]:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        n, m, k = len(programme.values), len(programme.branch_costs), len(members)
        scale = self.branch_weight / programme.whole_cost
        gain = np.concatenate(
            [-scale * np.asarray(programme.leaf_costs, float), -scale * np.asarray(programme.branch_costs, float),
             np.outer(masses, self.fade ** np.arange(width) * (1 - self.fade)).ravel()]
        )  # fmt: skip
        rows: list[list[tuple[int, float]]] = []
        rows += [[(n + j, 1.0), (i, -1.0)] for i, a in enumerate(programme.above) for j in a]
        for place, group in enumerate(members.values()):
            first = n + m + place * width
            rows.append([*((i, float(width)) for i in group), *((first + t, -1.0) for t in range(width))])
        low, high = [0.0] * len(rows), [np.inf] * len(rows)
        rows.append([(n + m + t, 1.0) for t in range(k * width)])
        low, high = [*low, float(width)], [*high, float(width)]
        at = [(r, c, v) for r, entries in enumerate(rows) for c, v in entries]
        row, column, value = (np.array(part) for part in zip(*at, strict=True))
        matrix = coo_array((value, (row, column)), shape=(len(rows), len(gain))).tocsc()
        integral = np.zeros(len(gain))
        integral[:n] = 1
        found = milp(-gain, integrality=integral, bounds=Bounds(0, 1), constraints=LinearConstraint(matrix, low, high),
                     options={"time_limit": self.time_limit})  # fmt: skip
        if found.x is None:
            return [], []
        kept = np.flatnonzero(found.x[:n] > 0.5).tolist()
        shares = found.x[n + m :].reshape(k, width).sum(axis=1)
        top = max(shares.max(), 1e-9)
        return kept, apportion([max(0.0, float(s)) / top for s in shares], width)


@dataclass(frozen=True, slots=True)
class Directions:
    """Allocates the width over clusters by a softmax of best scores, then within each (after DORA, 2506.15707)."""

    temperature: float = 0.2
    words: bool = False
    """Clusters are leaves that say the same word for word."""

    def __call__(self, frontier: Frontier) -> Choice:
        leaves = frontier.leaves
        numbers = by_key([leaf.twin if self.words else leaf.cluster for leaf in leaves])
        members: dict[int, list[int]] = {}
        for i, number in enumerate(numbers):
            members.setdefault(number, []).append(i)
        groups = list(members.values())
        shares = rebase([max(leaves[i].score for i in group) for group in groups], frontier.width, self.temperature)
        counts = [0] * len(leaves)
        for group, share in zip(groups, shares, strict=True):
            for i, count in zip(group, rebase([leaves[i].score for i in group], share, self.temperature), strict=True):
                counts[i] = count
        return Choice(counts)
