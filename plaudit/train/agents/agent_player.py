"""A player whose samples are made by somebody's agent, which talks with the policy over HTTP.

The agent is a function, or a coroutine function, of (prompt, base_url, api_key). What it returns is the reward; None
leaves that to the recipe's [reward].
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from plaudit.config.prompting import SamplingTable
from plaudit.config.rl import AgentTable
from plaudit.errors import ConfigError, one_line
from plaudit.records import ItemError, Prompt, Sample
from plaudit.train.agents.agent_episode import AgentEpisode
from plaudit.train.agents.environment import load_named
from plaudit.train.agents.parallel_calls import Overdue, ParallelCalls
from plaudit.train.agents.policy_endpoint import Playing, PolicyEndpoint
from plaudit.train.agents.turn_driver import new_driver
from plaudit.train.rollouts.rollouts import Generator
from plaudit.train.run.clock import Clock

Agent = Callable[..., Any]


class AgentPlayer:
    def __init__(
        self, engine: Generator, tokenizer: Any, positions: int, sampling: SamplingTable, table: AgentTable, seed: int,
        clock: Clock | None = None, agent: Agent | None = None,
    ) -> None:  # fmt: skip
        """`agent`: in place of the one that the table names."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.table = table
        self.seed = seed
        self.clock = clock or Clock()
        self.agent = agent or load_agent(table)
        self.endpoint = PolicyEndpoint(table, sampling, tokenizer, positions)

    def play(
        self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0, evaluate: bool = False
    ) -> list[Sample]:
        sampling, most = self.sampling.evaluating() if evaluate else self.sampling, self.table.conversations
        episodes = [
            AgentEpisode(prompt, group, i, self.endpoint.new_key(), most)
            for group, prompt in enumerate(prompts)
            for i in range(n)
        ]
        results: dict[AgentEpisode, Any] = {}

        def turn_seed(episode: AgentEpisode, conversation: int, turn: int) -> str:
            return f"{self.seed} {seed} {first + episode.group} {episode.index} {conversation} {turn}"

        def ended(episode: AgentEpisode, result: Any) -> None:
            self.endpoint.end(episode)
            results[episode] = result

        with new_driver(self.engine) as driver:
            calls = ParallelCalls(self.table.concurrency, self.table.timeout, driver.post)
            with self.endpoint.playing(Playing(driver, sampling, episodes, turn_seed)):
                for episode in episodes:
                    calls.start(partial(self._call, episode), partial(ended, episode))
                while len(results) < len(episodes):
                    alone = not driver.generating  # the engine has nothing to do: time of the agents
                    with self.clock.part("tools", of="generate") if alone else nullcontext():
                        driver.wait(calls.left())
                    driver.advance()
                    calls.expire()
        return [sample for episode in episodes for sample in self._samples(episode, results[episode])]

    def close(self) -> None:
        self.endpoint.close()

    def _call(self, episode: AgentEpisode) -> Any:
        """In a thread of its own."""
        result = self.agent(episode.prompt, self.endpoint.url, episode.key, **self.table.options)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

    def _samples(self, episode: AgentEpisode, result: Any) -> list[Sample]:
        """One of each conversation, all with the agent's reward or its error."""
        found = [t.sample(self.tokenizer, episode.group, episode.index) for t in episode.transcripts]
        if isinstance(error := _checked(result, len(found)), ItemError):
            found = found or [_silent(episode)]
            return [replace(sample, finish_reason="error", error=error) for sample in found]
        return [replace(sample, reward=error) for sample in found]


def load_agent(table: AgentTable) -> Agent:
    """What cannot be called is told now, not in the middle of a rollout."""
    agent = load_named(table.function, "agent.function", "file.py:function or package.module:function")
    if not callable(agent):
        raise ConfigError(f"agent.function = {table.function!r} is a {type(agent).__name__}, and not a function")
    try:
        inspect.signature(agent).bind(None, "", "", **table.options)
    except TypeError as error:
        raise ConfigError(
            f"agent.function = {table.function!r} cannot be called as (prompt, base_url, api_key, **options) with "
            f"agent.options = {dict(table.options)}: {error}"
        ) from None
    return agent  # type: ignore[no-any-return]


async def _awaited(result: Any) -> Any:
    return await result


def _checked(result: Any, conversations: int) -> float | ItemError | None:
    if isinstance(result, Overdue):
        return ItemError("timeout", f"the agent: {result} (agent.timeout)")
    if isinstance(result, BaseException):
        return ItemError("agent_failed", f"{type(result).__name__}: {one_line(result)}")
    if not conversations:
        return ItemError("agent_failed", "the agent returned without an answer of the policy")
    if result is None:
        return None
    if not isinstance(result, int | float) or not math.isfinite(result):
        return ItemError("agent_failed", f"the agent returned {result!r:.60}, expected a finite number or None")
    return float(result)


def _silent(episode: AgentEpisode) -> Sample:
    """Of an agent that has said nothing."""
    return Sample(
        tuple(episode.prompt.token_ids or ()), (), "", (), (), (), (), "error", episode.group, episode.index,
        extra={"turns": 0},
    )  # fmt: skip
