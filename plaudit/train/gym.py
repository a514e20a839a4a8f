"""Prompts of reasoning-gym: endless tasks with checkers (extra `verify`)."""

from __future__ import annotations

from typing import Any

from plaudit.config.rl import RlDataTable
from plaudit.errors import ConfigError, nearest
from plaudit.records import Prompt, Sample
from plaudit.train.prompts import PromptEncoder

HELDOUT_SEED = 1_000_003  # its own items: training never reaches them
TRAINING_ITEMS = 1_000_000


class GymPrompts:
    """The i-th item of a task is made from its seed and i alone."""

    def __init__(self, encoder: PromptEncoder, data: RlDataTable, seed: int) -> None:
        assert data.gym is not None
        self.encoder = encoder
        self.data = data
        self.items = open_task(data.gym, seed, data.limit or TRAINING_ITEMS, data.gym_options)
        self.held = open_task(data.gym, seed + HELDOUT_SEED, data.eval_items, data.gym_options)

    def train(self, index: int) -> Prompt:
        return self._prompt(self.items[index % len(self.items)])

    def heldout(self) -> list[Prompt]:
        return [self._prompt(self.held[index]) for index in range(len(self.held))]

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return None

    def _prompt(self, entry: dict[str, Any]) -> Prompt:
        return self.encoder.text(entry["question"], entry["answer"])


def open_task(name: str, seed: int, size: int, options: Any) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError("data.gym needs reasoning-gym: pip install 'plaudit[verify]'") from None
    if name not in DATASETS:
        raise ConfigError(f"data.gym = {name!r} is no task of reasoning-gym; {nearest(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"data.gym_options do not fit the task {name!r}: {error}") from None
