"""OpenRLHF's reward models: a trunk and a linear head of any name, saved as the architecture RewardModel.

Their config says whether rewards are normalised, and by which mean and deviation. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from plaudit.errors import ModelError

ARCHITECTURE = "RewardModel"
HEAD = "score"  # as transformers' sequence classifiers have it
T = TypeVar("T")


def stored_head(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the head's name in the file: the only matrix with one row outside the trunk."""
    heads = [name for name, shape in shapes.items() if name.count(".") == 1 and len(shape) == 2 and shape[0] == 1]
    if len(heads) != 1:
        names = ", ".join(sorted(heads)) or "none"
        raise ModelError(f"an OpenRLHF RewardModel has one head NAME.weight of shape (1, hidden); got {names}")
    return heads[0].removesuffix(".weight")


def renamed_head(stored: Mapping[str, T], head: str) -> dict[str, T]:
    return {name.replace(f"{head}.", f"{HEAD}.", 1) if name.startswith(f"{head}.") else name: at
            for name, at in stored.items()}  # fmt: skip


def standardisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reward table keys for the normalisation in the config."""
    if not config.get("normalize_reward"):
        return {}
    return {"standardise": {"mean": float(config.get("mean", 0.0)), "std": float(config.get("std", 1.0))}}
