"""reasoning-gym prompts: generated tasks with verifiers (extra `verify`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from plaudit.config.prompting import AskingTable
from plaudit.config.rl import RlDataTable
from plaudit.errors import ConfigError, DataError, nearest, one_line
from plaudit.records import Prompt, Sample
from plaudit.train.data.encoder import PromptEncoder, RawPrompt

HELDOUT_SEED = 1_000_003  # held-out items have their own seed: training never uses them
TRAINING_ITEMS = 100_000


class GymPrompts:
    def __init__(self, encoder: PromptEncoder, data: RlDataTable, seed: int) -> None:
        self.train_split = GymItems(encoder, data, seed, data.limit or TRAINING_ITEMS)
        self.eval_split = GymItems(encoder, data, seed + HELDOUT_SEED, data.eval_items)

    def items(self) -> list[Prompt]:
        return self.train(range(len(self.train_split)))

    def train(self, indices: Sequence[int]) -> list[Prompt]:
        return self.train_split.prompts([index % len(self.train_split) for index in indices])

    def heldout(self) -> list[Prompt]:
        return self.eval_split.prompts(range(len(self.eval_split)))

    def right(self, prompt: Prompt, sample: Sample) -> bool | None:
        return None


class GymItems:
    """Items of a task; the i-th depends only on the seed and i. Its truth is the input of the task's scorer for
    `rule = "gym"`."""

    def __init__(self, encoder: PromptEncoder, data: AskingTable, seed: int, size: int) -> None:
        assert data.gym is not None
        self.encoder = encoder
        self.task = data.gym
        self.options = dict(data.gym_options)
        self.items = open_task(data.gym, seed, size, self.options)

    def __len__(self) -> int:
        return len(self.items)

    def prompts(self, indices: Sequence[int]) -> list[Prompt]:
        return self.encoder.prompts([self._raw_prompt(index) for index in indices])

    def _raw_prompt(self, index: int) -> RawPrompt:
        try:
            item = self.items[index]
        except Exception as error:  # a task's generator may fail on options that its validation accepts
            raise DataError(
                f"the gym task {self.task!r} cannot make its item {index} with {self.options}: {one_line(error)}"
            ) from error
        truth = {"task": self.task, "options": self.options, "item": without_tuples(item)}
        return RawPrompt(item["question"], truth, f"{self.task}[{index}]")


def open_task(name: str, seed: int, size: int, options: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError("data.gym needs reasoning-gym: pip install 'plaudit[verify]'") from None
    if name not in DATASETS:
        raise ConfigError(f"data.gym = {name!r} is not a reasoning-gym task; {nearest(name, DATASETS)}")
    option_names = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for key in options:
        if key == "seed":
            raise ConfigError("data.gym_options.seed: remove it, and set the recipe's seed")
        if key == "size":
            raise ConfigError("data.gym_options.size: remove it, and set data.limit")
        if key not in option_names:
            raise ConfigError(
                f"data.gym_options.{key} is not an option of the task {name!r}; {nearest(key, option_names)}"
            )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
    except Exception as error:  # a task's validation may raise anything, assertions included
        raise ConfigError(
            f"the gym task {name!r} refuses {dict(options)} for {size} items: {one_line(error)}; "
            "see data.gym_options and data.limit"
        ) from None


def without_tuples(value: Any) -> Any:
    """Convert to JSON types; `rule_worker._with_tuples` restores tuples."""
    if isinstance(value, tuple):
        return {"tuple": [without_tuples(part) for part in value]}
    if isinstance(value, list):
        return [without_tuples(part) for part in value]
    if isinstance(value, Mapping):
        return {key: without_tuples(part) for key, part in value.items()}
    return value
