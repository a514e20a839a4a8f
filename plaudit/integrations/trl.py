"""TRL: reward functions for GRPOTrainer, RLOOTrainer and others that take `reward_funcs`.

from plaudit.integrations.trl import RemoteReward
trainer = GRPOTrainer(..., reward_funcs=RemoteReward("http://127.0.0.1:5555", model="sums"))
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from plaudit.client.client import DEFAULT_URL
from plaudit.errors import ConfigError
from plaudit.integrations.connection import Connection, Side, values
from plaudit.records import Item, Score

Message = Mapping[str, Any]
Text = str | Sequence[Message]
Failures = Literal["none", "raise"]
_LOG = logging.getLogger("plaudit")


class RemoteReward:
    """urls      one server, or several of the same model
    model     its name; default: the server's first
    truth     the dataset's column that rules compare with
    truncate  the side to truncate if too long; by default such a completion has no reward
    failures  "none": a completion that cannot be scored gets None, which GRPOTrainer ignores; "raise": an exception,
              for trainers that would count None as 0
    timeout   seconds for the rewards of one step, including retries; then training stops with an exception
    """

    def __init__(
        self, urls: str | Sequence[str] = DEFAULT_URL, *, model: str | None = None, api_key: str | None = None,
        truth: str | None = None, truncate: Side | None = None, failures: Failures = "none",
        timeout: float | None = 300.0,
    ) -> None:  # fmt: skip
        if failures not in ("none", "raise"):
            raise ConfigError(f"failures is {failures!r}; expected 'none' or 'raise'")
        self.__name__ = f"plaudit_{model}" if model else "plaudit"  # used in the names of TRL's metrics
        self.connection = Connection(urls, model, api_key, truncate, timeout)
        self.truth = truth
        self.failures = failures

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any) -> list[float | None]:
        return self._rewards(self.connection.scores(self._items(prompts, completions, columns)))

    def close(self) -> None:
        self.connection.close()

    def _items(self, prompts: Sequence[Text], completions: Sequence[Text], columns: Mapping[str, Any]) -> list[Item]:
        if self.truth is not None and self.truth not in columns:
            raise ConfigError(
                f"truth is {self.truth!r}, which is not a column of the dataset; it has {sorted(columns)}"
            )
        truths = [None] * len(prompts) if self.truth is None else columns[self.truth]
        return [_item(*triple) for triple in zip(prompts, completions, truths, strict=True)]

    def _rewards(self, scores: Sequence[Score]) -> list[float | None]:
        if self.failures == "raise":
            return list(values(scores, "completion"))
        errors = [score.error for score in scores if score.error is not None]
        if errors:
            _LOG.warning(
                "%d of %d completions have no reward; the first: %s: %s",
                len(errors), len(scores), errors[0].type, errors[0].message,
            )  # fmt: skip
        return [score.value for score in scores]


class AsyncRemoteReward(RemoteReward):
    """The same as a coroutine: TRL awaits several such rewards concurrently."""

    async def __call__(  # type: ignore[override]
        self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float | None]:
        return self._rewards(await self.connection.scores_soon(self._items(prompts, completions, columns)))


def _item(prompt: Text, completion: Text, truth: Any) -> Item:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Item(prompt=prompt, response=completion, truth=truth)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ConfigError("prompt and completion must both be text or both be messages")
    if len(completion) == 1 and completion[0].get("role") == "assistant" and _is_text(completion[0]):
        # Separated, so that the completions of one prompt are sent as one group.
        return Item(prompt=tuple(prompt), response=completion[0]["content"], truth=truth)
    return Item(messages=(*prompt, *completion), truth=truth)


def _is_text(message: Message) -> bool:
    return isinstance(message.get("content"), str) and set(message) <= {"role", "content"}
