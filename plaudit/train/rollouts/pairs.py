"""Preference pairs from rollouts: the better over the worse response to the same prompt. `plaudit pairs`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.errors import DataError
from plaudit.output import check_writable, written
from plaudit.records import Batch, Sample
from plaudit.train.data.answered import prompt_of
from plaudit.train.rollouts.dump import Dump


@dataclass(slots=True)
class PairTally:
    prompts: int = 0
    equal: int = 0
    """Prompts whose responses all have the same reward, so that they give no pair."""
    pairs: int = 0

    def __str__(self) -> str:
        return f"{self.pairs} pairs of {self.prompts} prompts; {self.equal} prompts have responses of equal reward only"


def write_pairs(run: Path, out: Path, most: int) -> PairTally:
    """Write at most `most` pairs per prompt of a run's rollouts, as rows for `task = "reward"`."""
    check_writable(out)
    dump, tally = Dump.find(run), PairTally()
    rows: list[dict[str, Any]] = []
    for group in _groups(dump):
        pairs = pairs_of(group, most)
        tally.prompts += 1
        tally.equal += not pairs
        rows += pairs
    tally.pairs = len(rows)
    if not rows:
        raise DataError(f"{dump.directory}: {tally}; use prompts that the policy answers correctly only sometimes")
    with written(out) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return tally


def pairs_of(group: Sequence[Sample], most: int) -> list[dict[str, Any]]:
    """Pair the best with the worst, the second best with the second worst, and so on while their rewards differ."""
    by_text = {sample.text: sample for sample in group if sample.reward is not None and sample.text}
    ranked = sorted(by_text.values(), key=_reward, reverse=True)
    pairs: list[dict[str, Any]] = []
    for better, worse in zip(ranked, reversed(ranked), strict=True):
        margin = _reward(better) - _reward(worse)
        if margin <= 0 or len(pairs) == most:
            break
        pairs.append({**question_of(better), "chosen": better.text, "rejected": worse.text, "margin": margin})
    return pairs


def question_of(sample: Sample) -> dict[str, Any]:
    """Return the prompt in the format of data files."""
    prompt = prompt_of(sample)
    return {"messages": prompt.extra["messages"]} if "messages" in prompt.extra else {"prompt": prompt.text}


def _groups(dump: Dump) -> Iterator[list[Sample]]:
    for step in dump.steps():
        yield from Batch(dump.read(step)[0]).groups().values()


def _reward(sample: Sample) -> float:
    assert sample.total_reward is not None
    return sample.total_reward
