"""Every number with its formula, as an indented tree."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit.errors import ConfigError, nearest
from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.cost.term import Term


def amount(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / 1e9:,.2f} GB"
    if unit == "s":
        return f"{value:,.2f} s" if value >= 0.1 else f"{value * 1e3:,.2f} ms"
    if unit == "$":
        return f"${value:,.3f}" if value < 100 else f"${value:,.0f}"
    return f"{value:,.4g}"


def explain(prediction: Prediction, wanted: str = "step") -> str:
    """The tree of one number: step, memory, host, cost, all, or the name of a phase or of a part of one."""
    trees = list(_trees(prediction, wanted))
    if not trees:
        names = {"step", "memory", "host", "cost", "all", *(t.name for t in _all(prediction))}
        raise ConfigError(f"unknown term {wanted!r}; {nearest(wanted, names)}")
    return "\n".join(line for tree in trees for line in _lines(tree, 0))


def _trees(prediction: Prediction, wanted: str) -> Iterator[Term]:
    everything = wanted == "all"
    if everything or wanted == "step":
        yield prediction.step
    if everything or wanted == "memory":
        seen: set[str] = set()
        for phase in prediction.phases:
            if phase.memory.name not in seen:
                seen.add(phase.memory.name)
                yield phase.memory
    if (everything or wanted == "host") and prediction.host.value:
        yield prediction.host
    if everything or wanted == "cost":
        yield from (
            *prediction.cost.step.values(),
            *prediction.cost.million_tokens.values(),
            *prediction.cost.run.values(),
        )
    if wanted not in ("step", "memory", "host", "cost", "all"):
        yield from (term for term in _all(prediction) if term.name == wanted)


def _all(prediction: Prediction) -> Iterator[Term]:
    roots = [prediction.step, prediction.host, *(phase.memory for phase in prediction.phases)]
    for root in roots:
        yield from _walk(root)


def _walk(term: Term) -> Iterator[Term]:
    yield term
    for part in term.parts:
        yield from _walk(part)


def _lines(term: Term, depth: int) -> Iterator[str]:
    inputs = ", ".join(f"{name} = {value:,.6g}" for name, value in term.inputs)
    how = f"  = {term.formula}" if term.formula and term.formula != "sum of the parts" else ""
    yield f"{'  ' * depth}{term.name}: {amount(term.value, term.unit)}{how}{f'  [{inputs}]' if inputs else ''}"
    for part in term.parts:
        yield from _lines(part, depth + 1)
