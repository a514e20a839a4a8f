"""verl: `reward.custom_reward_function.path=.../plaudit/integrations/verl.py`, `....name=compute_score`, or
`compute_score_sync` for managers that do not await.

    reward.custom_reward_function.reward_kwargs.url=http://127.0.0.1:5555
    reward.custom_reward_function.reward_kwargs.model=sums

Settings not given there are taken from the environment; see `connection.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit.errors import ConfigError
from plaudit.integrations.connection import from_environment, values
from plaudit.records import Item


async def compute_score(
    data_source: str, solution_str: str, ground_truth: Any = None, extra_info: Mapping[str, Any] | None = None, *,
    url: str | None = None, model: str | None = None, prompt_key: str = "prompt", **_: Any,
) -> float:  # fmt: skip
    """verl does not pass on its prompt: `prompt_key` is its key in extra_info, as text or as messages. Raises if there
    is no score, because verl would train on any number."""
    item = _item(solution_str, ground_truth, extra_info, prompt_key)
    return values(await from_environment(url, model).scores_soon([item]), f"solution of {data_source}")[0]


def compute_score_sync(
    data_source: str, solution_str: str, ground_truth: Any = None, extra_info: Mapping[str, Any] | None = None, *,
    url: str | None = None, model: str | None = None, prompt_key: str = "prompt", **_: Any,
) -> float:  # fmt: skip
    """The same for reward managers that do not await."""
    item = _item(solution_str, ground_truth, extra_info, prompt_key)
    return values(from_environment(url, model).scores([item]), f"solution of {data_source}")[0]


def _item(solution: str, truth: Any, extra_info: Mapping[str, Any] | None, prompt_key: str) -> Item:
    prompt = (extra_info or {}).get(prompt_key)
    if prompt is None:
        raise ConfigError(
            f"extra_info has no {prompt_key!r}, but a reward needs its prompt; add it when creating the data, or "
            f"set reward_kwargs.prompt_key to one of {sorted(extra_info or {})}"
        )
    given = prompt if isinstance(prompt, str) else tuple(dict(message) for message in prompt)
    return Item(prompt=given, response=solution, truth=truth)
