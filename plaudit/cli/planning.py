"""`plaudit plan`."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from plaudit.cli.app import app, resolve_model
from plaudit.plan.options import PlanOptions


def plan(**options: Any) -> None:
    """What fits, how long a step takes, what it costs; which placement, parallelism and accelerator to choose."""
    from plaudit.plan.show.command import run_plan

    run_plan(PlanOptions(**options), resolve=resolve_model, measure=_measure_machine)


def _parameters() -> list[inspect.Parameter]:
    """Those of the command: the fields of PlanOptions."""
    hints = get_type_hints(PlanOptions, include_extras=True)
    return [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[option.name],
            default=option.default if option.default_factory is MISSING else option.default_factory(),
        )
        for option in fields(PlanOptions)
    ]  # fmt: skip


plan.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
plan.__annotations__ = get_type_hints(PlanOptions, include_extras=True)
app.command()(plan)


def _measure_machine() -> str:
    from plaudit.calibrate import measure

    return measure()
