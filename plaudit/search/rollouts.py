"""Rollouts by search: the responses to a prompt in RL training are the finished paths of a search guided by a process
model.

At every level the policy samples `width` children, the process model scores each, and the rule selects those to
continue; the others are discarded. The result is `width` responses to a prompt, which share steps: `extra["branches"]`
has the segments of each, as for any tree of responses (`train.rollouts.tree_turn`), and `extra["search"]` the cost of
all of them together, including discarded branches. Every token has the log-prob with which
the policy sampled it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plaudit.config.prompting import SamplingTable
from plaudit.config.search import BudgetTable, RolloutSearchTable, SearchRecipe
from plaudit.errors import ConfigError
from plaudit.records import ItemError, Prompt, Sample
from plaudit.search.backends.policy import Ended, Step, StepRequest
from plaudit.search.backends.scoring import open_scorer
from plaudit.search.backends.step_text import StepText
from plaudit.search.drivers.methods import new_driver
from plaudit.search.questions.questions import Question
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.runner import Outcome, Runner
from plaudit.search.tree.tree import Node
from plaudit.train.rollouts.rollouts import Generator, SingleTurn, sampling_params
from plaudit.train.rollouts.tree_turn import joined

OVER = ("finished", "cut", "failed")


class SearchTurn:
    """`single` answers held-out prompts, and has the engine and the sampling parameters."""

    def __init__(
        self, single: SingleTurn, tokenizer: Any, table: RolloutSearchTable, width: int, threads: int | None = None
    ) -> None:  # fmt: skip
        self.single = single
        self.tokenizer = tokenizer
        self.scorer = open_scorer(table.prm, threads, table.method)
        if self.scorer.whole:
            raise ConfigError("search.prm is an outcome model, but a search needs step scores: set a process model")
        sampling = single.sampling
        self.recipe = SearchRecipe.model_validate(
            {
                "model": {"path": "policy"}, "data": {"path": "prompts"}, "prm": table.prm, "concurrent": 2**31,
                "lanes": 1,
                "search": {"method": table.method, "temperature": table.temperature, "keep": table.keep,
                           "width": width, "max_depth": sampling.max_tokens},
                "steps": {"stop": sampling.step, "answer": "(.*)", "max_step_tokens": sampling.max_tokens,
                          "max_tokens": sampling.max_tokens},
            }
        )  # fmt: skip
        self.reading = AnswerReading(self.recipe.steps)

    def play(
        self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0, evaluate: bool = False
    ) -> list[Sample]:
        if evaluate:
            return self.single.play(prompts, n, seed, first, evaluate)
        assert n == self.recipe.search.width, "the recipe's"
        number = int.from_bytes(hashlib.sha256(f"{self.single.seed} {seed}".encode()).digest()[:7], "big")
        recipe = self.recipe.model_copy(update={"seed": number})
        writer = Writer(self.single.engine, self.single.sampling, self.tokenizer)
        runner = Runner(
            recipe, writer, self.scorer, self.reading,
            lambda question, tree: new_driver(tree, recipe.search, BudgetTable(), self.reading, str(question.index)),
        )  # fmt: skip
        questions = [_question(first + place, prompt) for place, prompt in enumerate(prompts)]
        outcomes = sorted(runner.run(questions), key=lambda outcome: outcome.question.index)
        return [sample for place, outcome in enumerate(outcomes) for sample in self._samples(place, outcome, writer)]

    def _samples(self, group: int, outcome: Outcome, writer: Writer) -> list[Sample]:
        tree, costs = outcome.tree, outcome.driver.costs
        spent = {"generated": costs.generated, "prm_tokens": costs.prm_tokens}
        leaves = [node for node in tree.nodes if node.state in OVER]
        assert len(leaves) == self.recipe.search.width, "a level must use the whole remaining width"
        samples = []
        for index, leaf in enumerate(leaves):
            steps = tree.steps(leaf.id)
            parts = [writer.parts[tree.path_ids(step.id)] for step in steps]
            # A leaf that repeats another is a separate response; inner steps that repeat one are merged.
            ends, end = [], 0
            for step, part in zip(steps, parts, strict=True):
                end += len(part.token_ids)
                ends.append([step.id, end])
            sample = joined(parts, self.tokenizer, self.single.sampling.stop)
            extra = {**sample.extra, "branches": ends, "search": spent}
            samples.append(replace(_failed(sample, leaf), group=group, index=index, extra=extra))
        return samples

    def close(self) -> None:
        self.scorer.close()
        self.reading.close()


class Writer:
    """The run's engine as a policy of the search. `parts`: every step as sampled, by the tokens of its path."""

    def __init__(self, engine: Generator, table: SamplingTable, tokenizer: Any) -> None:
        self.engine = engine
        self.table = table
        self.stepping = table.model_copy(update={"stop": (*table.stop, table.step)})
        self._text = StepText(tokenizer)
        self.parts: dict[tuple[int, ...], Sample] = {}

    def extend(self, requests: Sequence[StepRequest]) -> list[list[Step]]:
        prompts = [[*request.prompt, *request.response_ids] for request in requests]
        params = [
            replace(sampling_params(self._left(request), request.count, ""), seed=request.seed) for request in requests
        ]
        samples = iter(self.engine.generate(prompts, params))
        return [[self._step(request, next(samples)) for _ in range(request.count)] for request in requests]

    def release(self, places: Sequence[Any]) -> None:
        """Does nothing: the engine may be in another process, and evicts least recently used entries itself."""

    def close(self) -> None:
        """Does nothing: the engine belongs to the run."""

    def _left(self, request: StepRequest) -> SamplingTable:
        return self.stepping.model_copy(update={"max_tokens": self.table.max_tokens - len(request.response_ids)})

    def _step(self, request: StepRequest, sample: Sample) -> Step:
        text = self._text(request.response_ids, request.text, sample.token_ids)
        ended: Ended = "length"
        if sample.finish_reason == "stop" and self.table.step in text:
            # An empty step is the end of a response: it has nothing to score.
            whole = len(request.response_ids) + len(sample.token_ids) < self.table.max_tokens
            ended = "step" if whole and text.replace(self.table.step, "").strip() else "length"
        elif sample.finish_reason == "stop" and (request.text + text).strip():
            ended = "end"
        cut = ended == "length" and sample.finish_reason == "stop" and self.table.step in text
        part = replace(sample, finish_reason="length") if cut else sample
        self.parts.setdefault((*request.prompt, *request.response_ids, *sample.token_ids), part)
        if sample.finish_reason in ("abort", "error"):
            return Step(sample.token_ids, text, error=f"generation ended with finish_reason {sample.finish_reason}")
        return Step(sample.token_ids, text, ended, sum(sample.raw_logprobs) / max(1, len(sample.token_ids)))


def _question(index: int, prompt: Prompt) -> Question:
    messages = prompt.extra.get("messages")
    content = prompt.text if messages is None else tuple(messages)
    return Question(index, content, prompt.text, tuple(prompt.token_ids or ()))


def _failed(sample: Sample, leaf: Node) -> Sample:
    """A path that the process model could not score has no reward but an error."""
    if leaf.state != "failed" or sample.finish_reason in ("abort", "error"):
        return sample
    kind, _, message = (leaf.error or "").partition(": ")
    return replace(sample, finish_reason="error", error=ItemError(kind, message or kind))
