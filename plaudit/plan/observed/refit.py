"""Fit constants so that the plan takes as long as the measured run.

A phase is a single number, so all constants of its group are scaled alike: rates down, seconds up. One run cannot show
which of them is the cause. Link constants are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.shape.constants import Constants

RATES = {"generation": ("bandwidth_share",), "training": ("gemm_share", "narrow_gemm_share", "attention_share")}
SECONDS = {
    "generation": ("layer_seconds", "expert_layer_seconds", "step_seconds", "sequence_seconds"),
    "training": ("launch_seconds", "expert_launch_seconds", "activation_passes"),
    "weights": ("channel_factor",),
}
ADDED = {"scoring": "response_seconds", "transitions": "switch_seconds"}
"""Phases with a fixed cost in addition to the other constants."""
ROUNDS, CLOSE, MOST, LEAST_SECONDS = 100, 0.002, 20.0, 1e-6


def refit(
    start: Constants, predicted: Callable[[Constants], Prediction], measured: Mapping[str, float], batch: int
) -> Constants:
    """Fitted constants. `measured`: seconds by phase; phases that are missing leave their constants unchanged."""
    constants, scales = start, dict.fromkeys(("generation", "training", "weights"), 1.0)
    for _ in range(ROUNDS):
        plan = predicted(constants)
        planned = {phase.name: phase.seconds.value for phase in plan.phases}
        wanted = {name: seconds for name, seconds in measured.items() if seconds > 0 and planned.get(name)}
        if all(abs(planned[name] / seconds - 1) < CLOSE for name, seconds in wanted.items()):
            break
        for name in scales.keys() & wanted.keys():
            scales[name] = min(MOST, max(1 / MOST, scales[name] * wanted[name] / planned[name]))
        changes = _scaled(start, scales)
        for name, constant in ADDED.items():
            if name in wanted:
                each = (wanted[name] - planned[name]) / (batch if name == "scoring" else 1)
                changes[constant] = max(LEAST_SECONDS, getattr(constants, constant) + each)
        constants = replace(constants, **changes)
    return constants


def _scaled(start: Constants, scales: Mapping[str, float]) -> dict[str, float]:
    changes: dict[str, float] = {}
    for phase, scale in scales.items():
        if scale != 1:
            changes |= {name: getattr(start, name) / scale for name in RATES.get(phase, ())}
            changes |= {name: getattr(start, name) * scale for name in SECONDS[phase]}
    return changes
