"""Responses as a tree: those to one prompt share their first steps, which are sampled once.

`sampling.branch = [2, 2, 2]` samples two first steps, two second ones behind each, and two ends of the response behind
each of these. Every response has the distribution that it would have alone; those that share steps are alike. One that
is over before the last branching stands for all that would have gone on from it: so the mean over the responses of a
node stays that of the policy. `extra["branches"]` has [node, end] of each part of a response, nodes numbered in the
prompt's tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

from plaudit.config.prompting import SamplingTable
from plaudit.records import Prompt, Sample
from plaudit.train.rollouts.rollouts import SingleTurn, sampling_params


@dataclass(frozen=True, slots=True)
class _Branch:
    """A path so far. `place`: which child it is at each level. `ended`: nothing goes on from it."""

    prompt: int
    place: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    parts: tuple[Sample, ...] = ()
    ended: bool = False

    @property
    def tokens(self) -> list[int]:
        return list(chain.from_iterable(part.token_ids for part in self.parts))


class TreeTurn:
    """`single` answers held-out prompts, and has engine and sampling."""

    def __init__(self, single: SingleTurn, tokenizer: Any) -> None:
        self.single = single
        self.tokenizer = tokenizer
        self.table: SamplingTable = single.sampling

    def play(
        self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0, evaluate: bool = False
    ) -> list[Sample]:
        if evaluate:
            return self.single.play(prompts, n, seed, first, evaluate)
        counts = self.table.branch
        assert math.prod(counts) == n, "the recipe is refused otherwise"
        ids = [tuple(prompt.token_ids or ()) for prompt in prompts]
        paths = [_Branch(index) for index in range(len(prompts))]
        for level, count in enumerate(counts):
            paths = self._grown(paths, ids, count, f"{self.single.seed} {seed}", first, level == len(counts) - 1)
        samples: list[Sample] = []
        for group in range(len(prompts)):
            leaves = [path for path in paths if path.prompt == group]
            copies = [path for path in leaves for _ in range(math.prod(counts[len(path.parts) :]))]
            samples += [replace(self._joined(path), group=group, index=i) for i, path in enumerate(copies)]
        return samples

    def _grown(
        self, paths: Sequence[_Branch], ids: Sequence[tuple[int, ...]], count: int, seed: str, first: int, last: bool
    ) -> list[_Branch]:
        """Each open path with `count` further steps, or in the `last` level with its ends."""
        table = self.table if last else self.table.model_copy(update={"stop": (*self.table.stop, self.table.step)})
        growing = [path for path in paths if not path.ended]
        prompts, params = [], []
        for path in growing:
            # At the root the seed of a single response: a tree of one level is a group, token for token.
            named = " ".join(map(str, (f"{seed} {first + path.prompt}", *path.place)))
            left = self.table.max_tokens - len(path.tokens)
            prompts.append([*ids[path.prompt], *path.tokens])
            params.append(sampling_params(table.model_copy(update={"max_tokens": left}), count, named))
        parts = iter(self.single.engine.generate(prompts, params) if growing else ())
        numbers = [0] * len(ids)
        for path in paths:
            numbers[path.prompt] = max((numbers[path.prompt], *(node + 1 for node in path.nodes)))
        grown: list[_Branch] = []
        for path in paths:
            if path.ended:
                grown.append(path)
                continue
            for child in range(count):
                part, node = next(parts), numbers[path.prompt]
                numbers[path.prompt] += 1
                longer = _Branch(path.prompt, (*path.place, child), (*path.nodes, node), (*path.parts, part))
                grown.append(replace(longer, ended=last or self._over(longer)))
        return grown

    def _over(self, path: _Branch) -> bool:
        part = path.parts[-1]
        stepped = part.finish_reason == "stop" and self.table.step in self._text(part.token_ids)
        return not stepped or len(path.tokens) >= self.table.max_tokens

    def _joined(self, path: _Branch) -> Sample:
        ends = accumulate(len(part.token_ids) for part in path.parts)
        branches = [[node, end] for node, end in zip(path.nodes, ends, strict=True)]
        extra = {**path.parts[-1].extra, "branches": branches}
        if len(path.parts) == 1 and not self._cut(path):
            return replace(path.parts[0], extra=extra)
        whole = joined(path.parts, self.tokenizer, self.table.stop)
        return replace(whole, finish_reason="length" if self._cut(path) else whole.finish_reason, extra=extra)

    def _cut(self, path: _Branch) -> bool:
        """Whether it had a step behind which there was no token left."""
        stepped = len(path.parts) < len(self.table.branch) and self.table.step in self._text(path.parts[-1].token_ids)
        return stepped and path.parts[-1].finish_reason == "stop"

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def joined(parts: Sequence[Sample], tokenizer: Any, stops: Sequence[str]) -> Sample:
    """Parts of a response, each sampled behind the one before, as one sample; `stops` end a response."""

    def chained(name: str) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(getattr(part, name) for part in parts))

    tokens = chained("token_ids")
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    for stop in stops:
        if parts[-1].finish_reason == "stop" and (at := text.find(stop)) >= 0:
            text = text[:at]
    tempered = None if parts[0].tempered_logprobs is None else chained("tempered_logprobs")
    return replace(
        parts[-1], prompt_ids=parts[0].prompt_ids, token_ids=tokens, text=text, logprobs=chained("logprobs"),
        raw_logprobs=chained("raw_logprobs"), versions=chained("versions"), mask=chained("mask"),
        tempered_logprobs=tempered,
    )  # fmt: skip
