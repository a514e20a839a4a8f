"""Where a leaf leads: a few greedy steps, generated, scored and thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plaudit.search.backends.policy import Ask, Policy
from plaudit.search.backends.scored import Path, Scorer


@dataclass(slots=True)
class Ahead:
    """value      the score of the last step; None if there was none to score
    token_ids  prompt and steps
    read       what the PRM read
    """

    calls: int = 0
    tokens: int = 0
    value: float | None = None
    token_ids: tuple[int, ...] = ()
    read: tuple[int, ...] = ()


def look_ahead(policy: Policy, scorer: Scorer, asks: Sequence[Ask], paths: Sequence[Path], steps: int) -> list[Ahead]:
    """`asks` are for one greedy step of each path."""
    rollouts = [Ahead() for _ in asks]
    now, seen = list(asks), list(paths)
    going = list(range(len(asks)))
    for _ in range(steps):
        made = [steps[0] for steps in policy.extend([now[i] for i in going])]
        on = []
        for i, step in zip(going, made, strict=True):
            rollouts[i].calls += 1
            rollouts[i].tokens += len(step.tokens)
            if step.error is not None or step.ended == "length" or not step.text.strip():
                continue
            now[i] = replace(now[i], response_ids=(*now[i].response_ids, *step.tokens), text=now[i].text + step.text)
            seen[i] = replace(seen[i], steps=(*seen[i].steps, step.text), read=())
            if step.ended == "step":
                on.append(i)
        going = on
    for i, ask in enumerate(now):
        rollouts[i].token_ids = (*ask.prompt, *ask.response_ids)
    longer = [i for i, path in enumerate(paths) if seen[i] != path]
    for i, scored in zip(longer, scorer.score([seen[i] for i in longer]) if longer else [], strict=True):
        rollouts[i].value, rollouts[i].read = scored.value, scored.tokens
    return rollouts
