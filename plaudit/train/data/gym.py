"""Prompts of reasoning-gym: endless tasks with checkers (extra `verify`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from plaudit.config.prompting import AskingTable
from plaudit.config.rl import RlDataTable
from plaudit.errors import ConfigError, DataError, nearest, one_line
from plaudit.records import Prompt, Sample
from plaudit.train.data.encoder import PromptEncoder, RawPrompt

HELDOUT_SEED = 1_000_003  # its own items: training never reaches them
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
    """The i-th item of a task is made from its seed and i alone. Its truth is what `rule = "gym"` needs to ask the
    task's own scorer."""

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
        except Exception as error:  # a task's generator may fail on options that its check let through
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
        raise ConfigError(f"data.gym = {name!r} is no task of reasoning-gym; {nearest(name, DATASETS)}")
    option_names = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for key in options:
        if key == "seed":
            raise ConfigError("data.gym_options.seed: the recipe's own seed decides; set seed")
        if key == "size":
            raise ConfigError("data.gym_options.size: data.limit says how many items there are; set that")
        if key not in option_names:
            raise ConfigError(f"data.gym_options.{key} is no option of the task {name!r}; {nearest(key, option_names)}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
    except Exception as error:  # what a task's own check raises is its own affair, assertions included
        raise ConfigError(
            f"the gym task {name!r} refuses {dict(options)} for {size} items: {one_line(error)}; "
            "see data.gym_options and data.limit"
        ) from None


def without_tuples(value: Any) -> Any:
    """As JSON can carry it; `rule_worker._with_tuples` turns it back."""
    if isinstance(value, tuple):
        return {"tuple": [without_tuples(part) for part in value]}
    if isinstance(value, list):
        return [without_tuples(part) for part in value]
    if isinstance(value, Mapping):
        return {key: without_tuples(part) for key, part in value.items()}
    return value
