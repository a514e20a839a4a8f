"""Fits the planner's constants to rows: stage by stage, inside physical bounds, from round starting values.

Training first, then decode together with the constants both share, then the few constants of RL steps. The loss is the
mean absolute log ratio, clipped at 1 so that no single row dominates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.row import Row, Unplannable
from planner.rows import answer

from plaudit.plan import Constants

BOUNDS: dict[str, tuple[float, float, float]] = {
    # name: (start, minimum, maximum)
    "bandwidth_share": (0.85, 0.75, 0.95),
    "gemm_share": (0.70, 0.55, 0.80),
    "narrow_gemm_share": (0.60, 0.45, 0.75),
    "unpack_share": (0.45, 0.30, 0.70),
    "attention_share": (0.50, 0.35, 0.65),
    "layer_seconds": (50e-6, 20e-6, 120e-6),
    "expert_layer_seconds": (50e-6, 20e-6, 200e-6),
    "step_seconds": (0.5e-3, 0.1e-3, 3e-3),
    "sequence_seconds": (5e-6, 1e-6, 20e-6),
    "link_share": (0.30, 0.10, 0.60),
    "activation_passes": (4.0, 2.0, 6.0),
    "bulk_link_share": (0.65, 0.40, 0.85),
    "launch_seconds": (1e-3, 0.3e-3, 3e-3),
    "expert_launch_seconds": (0.5e-3, 0.1e-3, 2e-3),
    "hop_seconds": (30e-6, 10e-6, 100e-6),
    "switch_seconds": (5.0, 1.0, 15.0),
    "packing_share": (0.85, 0.65, 1.0),
    "response_seconds": (3e-3, 0.5e-3, 10e-3),
    "length_spread": (0.7, 0.3, 1.2),
}
STAGES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("gemm_share", "narrow_gemm_share", "activation_passes", "attention_share", "bulk_link_share", "launch_seconds",
         "expert_launch_seconds"),
        ("train_throughput", "step_time:training"),
    ),
    (
        ("bandwidth_share", "layer_seconds", "expert_layer_seconds", "step_seconds", "sequence_seconds", "link_share",
         "gemm_share", "narrow_gemm_share", "activation_passes", "unpack_share"),
        ("tpot", "itl", "generation_throughput", "train_throughput", "step_time:training"),
    ),
    (("hop_seconds", "packing_share", "response_seconds", "switch_seconds", "length_spread"), ("step_time:step time",)),
)  # fmt: skip


def loss(rows: Sequence[Row], metrics: Sequence[str], constants: Constants) -> float:
    by_metric: dict[str, list[float]] = {}
    for row in rows:
        wanted = [metric for metric in metrics if metric.split(":")[0] == row["metric"]]
        if not wanted:
            continue
        try:
            found = answer(row, constants)
        except Unplannable:
            continue
        if ":" in wanted[0] and found.target != wanted[0].split(":")[1]:
            continue
        error = min(1.0, abs(math.log(max(found.predicted, 1e-12) / found.measured)))
        by_metric.setdefault(wanted[0], []).append(error)
    # Metrics have equal weight, TPOT double: it is the cleanest measurement of the set.
    weights = {name: 2.0 if name == "tpot" else 1.0 for name in by_metric}
    total = sum(weights.values())
    return sum(weights[name] * sum(errors) / len(errors) for name, errors in by_metric.items()) / max(1.0, total)


def fit(rows: Sequence[Row], rounds: int = 5) -> Constants:
    constants = Constants().changed({name: start for name, (start, _, _) in BOUNDS.items()})
    for names, metrics in STAGES:
        mine = [row for row in rows if any(metric.split(":")[0] == row["metric"] for metric in metrics)]
        best = loss(mine, metrics, constants)
        stride = 1.30
        for _ in range(rounds):
            for name in names:
                for factor in (stride, 1 / stride):
                    _, least, most = BOUNDS[name]
                    value = min(most, max(least, getattr(constants, name) * factor))
                    tried = constants.changed({name: value})
                    found = loss(mine, metrics, tried)
                    if found < best - 1e-6:
                        best, constants = found, tried
                        break
            stride = 1 + (stride - 1) * 0.65
    return constants
