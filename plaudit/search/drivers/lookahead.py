"""Where a leaf leads: a few greedy steps, generated, scored and thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plaudit.search.backends.policy import Ask, Policy
from plaudit.search.backends.scoring import Path, Scorer


@dataclass(slots=True)
class Ahead:
    """value   the score of the last step; None if there was none to score
    said    prompt and steps as token ids
    read    what the PRM read
    """

    calls: int = 0
    tokens: int = 0
    value: float | None = None
    said: tuple[int, ...] = ()
    read: tuple[int, ...] = ()


def look_ahead(policy: Policy, scorer: Scorer, asks: Sequence[Ask], paths: Sequence[Path], steps: int) -> list[Ahead]:
    """`asks` are for one greedy step of each path."""
    found = [Ahead() for _ in asks]
    now, seen = list(asks), list(paths)
    going = list(range(len(asks)))
    for _ in range(steps):
        made = [steps[0] for steps in policy.extend([now[i] for i in going])]
        on = []
        for i, step in zip(going, made, strict=True):
            found[i].calls += 1
            found[i].tokens += len(step.tokens)
            if step.error is not None or step.ended == "length" or not step.text.strip():
                continue
            now[i] = replace(now[i], said=(*now[i].said, *step.tokens), text=now[i].text + step.text)
            seen[i] = replace(seen[i], steps=(*seen[i].steps, step.text))
            if step.ended == "step":
                on.append(i)
        going = on
    for i, ask in enumerate(now):
        found[i].said = (*ask.prompt, *ask.said)
    longer = [i for i, path in enumerate(paths) if seen[i] != path]
    for i, scored in zip(longer, scorer.score([seen[i] for i in longer]) if longer else [], strict=True):
        found[i].value, found[i].read = scored.value, scored.tokens
    return found
