"""Opens the prompt source of a recipe: a world, a file or a gym, filtered by pass rate, or a mixture."""

from __future__ import annotations

from typing import Any

from plaudit.config.rl import RlDataTable
from plaudit.train.data.encoder import LengthLimits, PromptEncoder
from plaudit.train.data.gym import GymPrompts
from plaudit.train.data.mixed import MixedPrompts
from plaudit.train.data.prompts import FilePrompts, Prompts, WorldPrompts
from plaudit.train.rollouts.measured import MeasuredPrompts
from plaudit.worlds import get_world


def open_prompts(data: RlDataTable, tokenizer: Any, seed: int, room: LengthLimits | None = None) -> Prompts:
    if data.sources:
        parts = {name: open_prompts(table, tokenizer, seed, room) for name, table in data.sources.items()}
        return MixedPrompts(parts, {name: table.weight for name, table in data.sources.items()}, seed)
    source = _one_source(data, PromptEncoder(data, tokenizer, room), seed)
    return source if data.measured is None else MeasuredPrompts(source, data, seed)


def _one_source(data: RlDataTable, encoder: PromptEncoder, seed: int) -> Prompts:
    if data.world is not None:
        return WorldPrompts(get_world(data.world, seed, data.sums), encoder, data)
    return FilePrompts(encoder, data, seed) if data.gym is None else GymPrompts(encoder, data, seed)
