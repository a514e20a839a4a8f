"""Creates the player that generates responses on the placement's engine."""

from __future__ import annotations

from typing import Any

from plaudit.config import RlRecipe
from plaudit.search.rollouts import SearchTurn
from plaudit.train.agents import episodes
from plaudit.train.agents.agent_player import AgentPlayer
from plaudit.train.rollouts.rollouts import Generator, Player, SingleTurn
from plaudit.train.run.clock import Clock


def new_player(recipe: RlRecipe, engine: Generator, tokenizer: Any, positions: int, clock: Clock) -> Player:
    """`tokenizer` and `positions` are the policy's, wherever the engine runs it."""
    if recipe.search is None:
        return episodes.new_player(recipe, engine, tokenizer, positions, clock)
    single = SingleTurn(engine, recipe.sampling, recipe.seed)
    return SearchTurn(single, tokenizer, recipe.search, recipe.train.samples_per_prompt, recipe.train.threads)


def close_player(player: Player | None) -> None:
    if isinstance(player, AgentPlayer | SearchTurn):
        player.close()
