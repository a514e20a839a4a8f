"""`plaudit plan`."""

import inspect
from dataclasses import MISSING, fields
from typing import Any

from plaudit.cli.app import app, resolve_model
from plaudit.plan.options import PlanOptions


def plan(**options: Any) -> None:
    """What fits, how long a step takes, what it costs; which placement, parallelism and accelerator to choose."""
    from plaudit.plan.show.command import run_plan

    run_plan(PlanOptions(**options), resolve=resolve_model, measure=_measure_machine)


def _parameters() -> list[inspect.Parameter]:
    """The parameters of the command: the fields of PlanOptions."""
    return [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, annotation=option.type,
            default=option.default if option.default_factory is MISSING else option.default_factory(),
        )
        for option in fields(PlanOptions)
    ]  # fmt: skip


plan.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
plan.__annotations__ = {option.name: option.type for option in fields(PlanOptions)}
app.command()(plan)


def _measure_machine() -> str:
    from plaudit.calibrate import measure

    return measure()
