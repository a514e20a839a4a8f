"""One readable RLHF system: serves reward models, trains against them, searches with them, plans the hardware."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plaudit.api import TrainedRun, train
    from plaudit.client.client import AsyncRewardClient, RewardClient
    from plaudit.core import Engine, SamplingParams
    from plaudit.search.api import search

__version__ = "0.1.0"
__all__ = [
    "AsyncRewardClient",
    "Engine",
    "RewardClient",
    "SamplingParams",
    "TrainedRun",
    "__version__",
    "search",
    "train",
]

# Some of these import torch, which the planner, the clients and `--help` must not, so they are imported on first use.
_HOMES = {
    "AsyncRewardClient": "plaudit.client.client",
    "Engine": "plaudit.core",
    "RewardClient": "plaudit.client.client",
    "SamplingParams": "plaudit.core",
    "TrainedRun": "plaudit.api",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("search", "train"):  # callable packages
        return import_module(f"plaudit.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'plaudit' has no attribute {name!r}")
