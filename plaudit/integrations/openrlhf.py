"""OpenRLHF: `--reward.remote_url path/to/plaudit/integrations/openrlhf.py` (older: `--remote_rm_url`).

Settings are environment variables; see `connection.py`. The route `/get_reward` needs neither a file nor an
environment; this adds an API key, several servers, retries and a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plaudit.integrations.connection import from_environment, values
from plaudit.records import Item


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
    """Queries are rendered: control strings in them are control tokens. Raises if one cannot be scored."""
    import torch

    items = [Item(text=query, truth=label) for query, label in zip(queries, labels, strict=True)]
    rewards = torch.tensor(values(from_environment().scores(items), "query"))
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
