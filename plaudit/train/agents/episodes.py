"""Multi-turn episodes with an environment, token in, token out.

Each sample proceeds at the pace of its own environment: once that has answered, its next turn joins the engine's
running batch, independently of the others. The policy reads the prompt and every token so far exactly as sampled; an
observation is tokenised once. Nothing is tokenised again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from plaudit.config import RlRecipe
from plaudit.config.prompting import SamplingTable
from plaudit.config.rl import EnvironmentTable
from plaudit.errors import PlauditError, one_line
from plaudit.records import FinishReason, ItemError, Prompt, Sample, Turn
from plaudit.train.agents.agent_player import AgentPlayer
from plaudit.train.agents.environment import Environment, load_environment
from plaudit.train.agents.observation import ObservationEncoder, shortened
from plaudit.train.agents.parallel_calls import Overdue, ParallelCalls, close_all
from plaudit.train.agents.turn_driver import PendingTurn, TurnDriver, new_driver
from plaudit.train.rollouts.rollouts import Generator, Player, SingleTurn, sampling_params
from plaudit.train.rollouts.tree_turn import TreeTurn
from plaudit.train.run.clock import Clock

End = Literal["done", "tokens", "turns", "engine", "environment", "time"]
GRACE_SECONDS = 1.0  # after which an engine cancels a turn of an episode that timed out
REASONS: dict[End, FinishReason] = {"done": "stop", "tokens": "length", "turns": "length"}


def new_player(recipe: RlRecipe, engine: Generator, tokenizer: Any, positions: int, clock: Clock) -> Player:
    """`tokenizer` and `positions` are the policy's, wherever the engine runs it."""
    if recipe.agent is not None:
        return AgentPlayer(engine, tokenizer, positions, recipe.sampling, recipe.agent, recipe.seed, clock)
    if recipe.environment is None:
        single = SingleTurn(engine, recipe.sampling, recipe.seed)
        return TreeTurn(single, tokenizer) if recipe.sampling.branch else single
    return Episodes(engine, tokenizer, positions, recipe.sampling, recipe.environment, recipe.seed, clock=clock)


@dataclass
class Episode:
    """One response in progress.

    budget    how many tokens it may have, observations included
    until     on the monotonic clock
    turn      that the policy is writing
    calling   a call of its environment is in progress
    """

    prompt: Prompt
    group: int
    index: int
    budget: int
    environment: Environment | None = None
    until: float = math.inf
    turn: PendingTurn | None = None
    calling: bool = False
    closing: bool = False
    closed: bool = False
    closers: list[Callable[[], Any]] = field(default_factory=list)  # to be called on closing
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    tempered: list[float] | None = None  # of its turns, where a Sample has them
    experts: bytes | None = None
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
        self.experts = sample.experts  # a turn's has those of all that was read before it
        self.rewards += [0.0] * len(sample.token_ids)
        self.turns += 1
        if sample.finish_reason in ("abort", "error"):
            self.finish("engine", sample.finish_reason, sample.error)
        elif sample.finish_reason == "length":
            self.finish("tokens")  # a truncated turn cannot be answered

    def heard(self, tokens: Sequence[int], max_turns: int) -> None:
        """Add the environment's answer, unless the policy could not continue after it."""
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

    def make(self, new: Callable[[], Environment]) -> None:
        """Create the environment, in its own thread: it may take as long as any other call."""
        self.environment = environment = new()
        if callable(close := getattr(environment, "close", None)):
            self.closers.append(close)
        if self.closed:  # it came too late
            self.close()
        else:
            environment.reset(self.prompt)

    def close(self) -> None:
        """Close the environment, once, whichever thread calls."""
        try:
            close = self.closers.pop()
        except IndexError:
            return
        close()

    def failed(self, error: BaseException, doing: str) -> None:
        name = "environment" if self.environment is None else type(self.environment).__name__
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
            tempered_logprobs=None if self.tempered is None else tuple(self.tempered), experts=self.experts,
        )  # fmt: skip


class Episodes:
    """A player whose samples interact with environments, one each."""

    def __init__(
        self, engine: Generator, tokenizer: Any, positions: int, sampling: SamplingTable, table: EnvironmentTable,
        seed: int, make: Callable[[], Environment] | None = None, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """`make` creates an environment; by default the one that the table names. `clock` measures the time of
        environments separately from that of generation."""
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
        with new_driver(self.engine, together=self.table.lockstep) as driver:
            episodes = EpisodeBatch(self, driver, sampling, seed, first).play(prompts, n)
        return [episode.sample(self.tokenizer) for episode in episodes]


class EpisodeBatch:
    """The episodes of one call of `play`. Everything runs in that call's thread, except the environments."""

    def __init__(self, player: Episodes, driver: TurnDriver, sampling: SamplingTable, seed: str, first: int) -> None:
        self.player = player
        self.driver = driver
        self.sampling = sampling
        self.seed = seed
        self.first = first
        self.table = player.table
        self.calls = ParallelCalls(self.table.threads, self.table.timeout, driver.post)
        self.episodes: list[Episode] = []
        self.ready: list[Episode] = []  # for their next turn

    def play(self, prompts: Sequence[Prompt], n: int) -> list[Episode]:
        try:
            for group, prompt in enumerate(prompts):
                for index in range(n):
                    self._begin(prompt, group, index)
            while not all(episode.closed for episode in self.episodes):
                self._advance()
        except BaseException:
            close_all([episode.close for episode in self.episodes], self.table.timeout)
            raise
        finally:
            self.calls.close()
        return self.episodes

    def _begin(self, prompt: Prompt, group: int, index: int) -> None:
        room = self.player.positions - len(prompt.token_ids or ())
        episode = Episode(prompt, group, index, min(self.sampling.max_tokens, room))
        if self.table.episode_timeout is not None:
            episode.until = time.monotonic() + self.table.episode_timeout
        self.episodes.append(episode)
        self._call(episode, "reset", partial(episode.make, self.player.make), lambda _: None)

    def _advance(self) -> None:
        alone = not self.driver.generating  # the engine is idle: time of the environments
        with self.player.clock.part("tools", of="generate") if alone else nullcontext():
            next_end = min(episode.until for episode in self.episodes if not episode.closed)
            self.driver.wait(max(0.0, min(self.calls.left(), next_end - time.monotonic())))
        self.driver.advance()
        self.calls.expire()
        now = time.monotonic()
        for episode in self.episodes:
            if episode.end is None and episode.until <= now:
                self._stop(episode)
            if episode.end is not None and not episode.calling and not episode.closing:
                self._close(episode)
        if not self.table.lockstep or not (self.driver.generating or self.calls.busy):
            ready, self.ready = sorted(self.ready, key=lambda e: (e.group, e.index)), []
            for episode in ready:
                if episode.end is None:
                    self._turn(episode)

    def _turn(self, episode: Episode) -> None:
        # The seed depends only on the sample and the turn, not on other episodes.
        seed = f"{self.player.seed} {self.seed} {self.first + episode.group} {episode.index} {episode.turns}"
        params = sampling_params(self.sampling.model_copy(update={"max_tokens": episode.left}), 1, seed)
        if episode.until < math.inf:  # for an engine that cannot cancel a turn
            params = replace(params, deadline=episode.until - time.monotonic() + GRACE_SECONDS)
        episode.turn = self.driver.submit(episode.context, params, partial(self._wrote, episode))

    def _wrote(self, episode: Episode, sample: Sample | Exception) -> None:
        if isinstance(sample, Exception):
            raise sample
        episode.turn = None
        episode.wrote(sample)
        if episode.end is None and episode.environment is not None:
            text = self.player.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            step = partial(episode.environment.step, text)
            self._call(episode, "step", step, partial(self._answer, episode))

    def _call(self, episode: Episode, name: str, function: Callable[[], Any], take: Callable[[Any], None]) -> None:
        """Call the environment; then it is the policy's turn, unless the episode has ended."""

        def done(result: Any) -> None:
            episode.calling = False
            if episode.end is not None:  # it timed out
                return
            try:
                if isinstance(result, BaseException):
                    episode.failed(result, name)
                else:
                    take(result)
            except (PlauditError, TypeError, ValueError) as error:
                episode.failed(error, name)
            if episode.end is None:
                self.ready.append(episode)

        episode.calling = True
        self.calls.start(function, done)

    def _answer(self, episode: Episode, turn: Any) -> None:
        if not isinstance(turn, Turn):
            raise TypeError(f"gave {type(turn).__name__}, expected a Turn")
        if not isinstance(turn.observation, str):
            raise TypeError(f"the observation is of type {type(turn.observation).__name__}, expected str")
        if not math.isfinite(turn.reward):
            raise ValueError(f"the reward is {turn.reward}, expected a finite number")
        episode.rewards[-1] += turn.reward
        if turn.done:
            return episode.finish("done")
        text = shortened(turn.observation, self.table.max_observation)
        chat = "messages" in episode.prompt.extra
        tokens = self.player.observations.tokens(text, chat=chat, last=episode.tokens[-1], role=turn.role)
        return episode.heard(tokens, self.table.max_turns)

    def _stop(self, episode: Episode) -> None:
        if episode.turn is not None:
            self.driver.cancel(episode.turn)
        limit = f"took longer than environment.episode_timeout = {self.table.episode_timeout:g} s"
        episode.finish("time", "error", ItemError("timeout", f"the response {limit}"))

    def _close(self, episode: Episode) -> None:
        def done(result: Any) -> None:
            episode.closed = True
            if isinstance(result, BaseException) and episode.error is None:
                episode.failed(result, "close")

        episode.closing = True
        if episode.closers:
            self.calls.start(episode.close, done)
        else:
            episode.closed = True
