"""Look-ahead: a few greedy steps from a leaf, generated, scored and discarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from plaudit.search.backends.policy import Policy, StepRequest
from plaudit.search.backends.scored import Path, Scorer

if TYPE_CHECKING:
    from plaudit.core.kv.prefix import Place


@dataclass(slots=True)
class Ahead:
    """value      the score of the last step; None if none was scored
    steps      the engine's handle of their end
    read       the scorer's handle of their end
    """

    calls: int = 0
    tokens: int = 0
    value: float | None = None
    steps: list[Place] = field(default_factory=list)
    read: list[Place] = field(default_factory=list)


def look_ahead(
    policy: Policy, scorer: Scorer, requests: Sequence[StepRequest], paths: Sequence[Path], steps: int
) -> list[Ahead]:
    """`requests` are for one greedy step of each path."""
    rollouts = [Ahead() for _ in requests]
    now, seen = list(requests), list(paths)
    going = list(range(len(requests)))
    for _ in range(steps):
        made = [steps[0] for steps in policy.extend([now[i] for i in going])]
        on = []
        for i, step in zip(going, made, strict=True):
            rollouts[i].calls += 1
            rollouts[i].tokens += len(step.tokens)
            rollouts[i].steps += [step.place] if step.place is not None else []
            if step.error is not None or step.ended == "length" or not step.text.strip():
                continue
            ids, text = (*now[i].response_ids, *step.tokens), now[i].text + step.text
            now[i] = replace(now[i], response_ids=ids, text=text, place=step.place)
            seen[i] = replace(seen[i], steps=(*seen[i].steps, step.text), read=(), place=None)
            if step.ended == "step":
                on.append(i)
        going = on
    longer = [i for i, path in enumerate(paths) if seen[i] != path]
    for i, scored in zip(longer, scorer.score([seen[i] for i in longer]) if longer else [], strict=True):
        rollouts[i].value = scored.value
        rollouts[i].read += [scored.place] if scored.place is not None else []
    return rollouts
