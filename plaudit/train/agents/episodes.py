"""Turns with an environment, token in, token out.

Each sample goes at the pace of its own environment: once that has answered, its next turn joins the engine's running
batch, whatever the others do. What the policy reads is the prompt and every token so far exactly as it was sampled; an
observation is tokenised once. Nothing is ever tokenised again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from plaudit.config import RlRecipe
from plaudit.config.rl import EnvironmentTable, SamplingTable
from plaudit.errors import PlauditError, one_line
from plaudit.records import FinishReason, ItemError, Prompt, Sample, Turn
from plaudit.train.agents.agent_player import AgentPlayer
from plaudit.train.agents.environment import Environment, load_environment
from plaudit.train.agents.observation import ObservationEncoder
from plaudit.train.agents.parallel_calls import Overdue, ParallelCalls
from plaudit.train.agents.turn_driver import TurnDriver, new_driver
from plaudit.train.rollouts.rollouts import Generator, Player, SingleTurn, sampling_params
from plaudit.train.run.clock import Clock

End = Literal["done", "tokens", "turns", "engine", "environment"]
REASONS: dict[End, FinishReason] = {"done": "stop", "tokens": "length", "turns": "length", "environment": "error"}


def new_player(recipe: RlRecipe, engine: Generator, tokenizer: Any, positions: int, clock: Clock) -> Player:
    """`tokenizer` and `positions` are the policy's, wherever the engine runs it."""
    if recipe.agent is not None:
        return AgentPlayer(engine, tokenizer, positions, recipe.sampling, recipe.agent, recipe.seed, clock)
    if recipe.environment is None:
        return SingleTurn(engine, recipe.sampling, recipe.seed)
    return Episodes(engine, tokenizer, positions, recipe.sampling, recipe.environment, recipe.seed, clock=clock)


@dataclass
class Episode:
    """One response as it grows. `budget` is how many tokens it may have, observations included."""

    prompt: Prompt
    group: int
    index: int
    environment: Environment
    budget: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    tempered: list[float] | None = None  # of its turns, where a Sample has them
    versions: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    end: End | None = None
    reason: FinishReason = "stop"
    error: ItemError | None = None

    @property
    def context(self) -> list[int]:
        return [*(self.prompt.token_ids or ()), *self.tokens]

    @property
    def left(self) -> int:
        return self.budget - len(self.tokens)

    def wrote(self, sample: Sample) -> None:
        """The policy's turn."""
        self.tokens += sample.token_ids
        self.logprobs += sample.logprobs
        self.raw_logprobs += sample.raw_logprobs
        if sample.tempered_logprobs is not None:
            self.tempered = [*(self.tempered or ()), *sample.tempered_logprobs]
        self.versions += sample.versions
        self.mask += sample.mask
        self.rewards += [0.0] * len(sample.token_ids)
        self.turns += 1
        if sample.finish_reason in ("abort", "error"):
            self.finish("engine", sample.finish_reason, sample.error)
        elif sample.finish_reason == "length":
            self.finish("tokens")  # a turn that was cut off is nothing to answer

    def heard(self, tokens: Sequence[int], max_turns: int) -> None:
        """The environment's answer; left out where the policy could not go on after it."""
        if self.turns >= max_turns:
            self.finish("turns")
        elif len(tokens) >= self.left:
            self.finish("tokens")
        else:
            self.tokens += tokens
            self.versions += [self.versions[-1]] * len(tokens)
            for numbers in (self.logprobs, self.raw_logprobs, self.tempered, self.rewards):
                if numbers is not None:
                    numbers += [0.0] * len(tokens)
            self.mask += [0] * len(tokens)

    def failed(self, error: BaseException, doing: str) -> None:
        name = type(self.environment).__name__
        if isinstance(error, Overdue):
            failure = ItemError("timeout", f"{name}.{doing}: {error}")
        else:
            failure = ItemError("environment_failed", f"{name}.{doing}: {type(error).__name__}: {one_line(error)}")
        self.finish("environment", "error", failure)

    def finish(self, end: End, reason: FinishReason | None = None, error: ItemError | None = None) -> None:
        self.end, self.reason, self.error = end, reason or REASONS[end], error

    def sample(self, tokenizer: Any) -> Sample:
        return Sample(
            prompt_ids=tuple(self.prompt.token_ids or ()), token_ids=tuple(self.tokens),
            text=tokenizer.decode(self.tokens, skip_special_tokens=True), logprobs=tuple(self.logprobs),
            raw_logprobs=tuple(self.raw_logprobs), versions=tuple(self.versions), mask=tuple(self.mask),
            finish_reason=self.reason, group=self.group, index=self.index, error=self.error,
            token_rewards=tuple(self.rewards), extra={"turns": self.turns, "end": self.end},
            tempered_logprobs=None if self.tempered is None else tuple(self.tempered),
        )  # fmt: skip


class Episodes:
    """A player whose samples talk with environments, one each."""

    def __init__(
        self, engine: Generator, tokenizer: Any, positions: int, sampling: SamplingTable, table: EnvironmentTable,
        seed: int, make: Callable[[], Environment] | None = None, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """`make` gives a new environment; by default the one that the table names. `clock` tells the time of
        environments from that of generation."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.positions = positions
        self.sampling = sampling
        self.table = table
        self.seed = seed
        self.make = make or load_environment(table)
        self.observations = ObservationEncoder(tokenizer)
        self.clock = clock or Clock()

    def play(
        self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0, evaluate: bool = False
    ) -> list[Sample]:
        sampling = self.sampling.evaluating() if evaluate else self.sampling
        episodes = [
            self._begin(prompt, group, i, sampling.max_tokens) for group, prompt in enumerate(prompts) for i in range(n)
        ]
        with new_driver(self.engine, together=self.table.lockstep) as driver:
            batch = EpisodeBatch(self, driver, sampling, seed, first)
            try:
                batch.play(episodes)
            finally:
                batch.calls.close()
        return [episode.sample(self.tokenizer) for episode in episodes]

    def _begin(self, prompt: Prompt, group: int, index: int, most: int) -> Episode:
        room = self.positions - len(prompt.token_ids or ())
        return Episode(prompt, group, index, self.make(), min(most, room))


class EpisodeBatch:
    """The episodes of one call of `play`. All of it happens in that call's thread, except what environments compute."""

    def __init__(self, player: Episodes, driver: TurnDriver, sampling: SamplingTable, seed: str, first: int) -> None:
        self.player = player
        self.driver = driver
        self.sampling = sampling
        self.seed = seed
        self.first = first
        self.table = player.table
        self.calls = ParallelCalls(self.table.threads, self.table.timeout, driver.post)
        self.ready: list[Episode] = []  # for their next turn

    def play(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            self._call(episode, "reset", partial(episode.environment.reset, episode.prompt), lambda _: None)
        while any(episode.end is None for episode in episodes):
            alone = not self.driver.generating  # the engine has nothing to do: time of the environments
            with self.player.clock.part("tools", of="generate") if alone else nullcontext():
                self.driver.wait(self.calls.left())
            self.driver.advance()
            self.calls.expire()
            if not self.table.lockstep or not (self.driver.generating or self.calls.busy):
                ready, self.ready = sorted(self.ready, key=lambda e: (e.group, e.index)), []
                for episode in ready:
                    self._turn(episode)

    def _turn(self, episode: Episode) -> None:
        # The seed is the sample's own and the turn's: who else is playing changes nothing.
        seed = f"{self.player.seed} {self.seed} {self.first + episode.group} {episode.index} {episode.turns}"
        table = self.sampling.model_copy(update={"max_tokens": episode.left})
        self.driver.submit(episode.context, sampling_params(table, 1, seed), partial(self._wrote, episode))

    def _wrote(self, episode: Episode, sample: Sample | Exception) -> None:
        if isinstance(sample, Exception):
            raise sample
        episode.wrote(sample)
        if episode.end is None:
            text = self.player.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            step = partial(episode.environment.step, text)
            self._call(episode, "step", step, partial(self._answer, episode))

    def _call(
        self, episode: Episode, name: str, function: Callable[[], Any], take: Callable[[Any], None]
    ) -> None:  # fmt: skip
        """Have the environment do this; then it is the policy's turn, unless that was the end."""

        def done(result: Any) -> None:
            try:
                if isinstance(result, BaseException):
                    episode.failed(result, name)
                else:
                    take(result)
            except (PlauditError, TypeError, ValueError) as error:
                episode.failed(error, name)
            if episode.end is None:
                self.ready.append(episode)

        self.calls.start(function, done)

    def _answer(self, episode: Episode, turn: Any) -> None:
        if not isinstance(turn, Turn):
            raise TypeError(f"gave {type(turn).__name__}, expected a Turn")
        if not math.isfinite(turn.reward):
            raise ValueError(f"the reward is {turn.reward}, expected a finite number")
        episode.rewards[-1] += turn.reward
        if turn.done:
            return episode.finish("done")
        chat = "messages" in episode.prompt.extra
        tokens = self.player.observations.tokens(turn.observation, chat=chat, last=episode.tokens[-1])
        return episode.heard(tokens, self.table.max_turns)
