"""OpenRLHF's reward models: a trunk and a linear head under a name of its own, saved as the architecture RewardModel.

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
    """The head's name in the file: the one matrix of a single row outside the trunk."""
    heads = [name for name, shape in shapes.items() if name.count(".") == 1 and len(shape) == 2 and shape[0] == 1]
    if len(heads) != 1:
        found = ", ".join(sorted(heads)) or "none"
        raise ModelError(f"a RewardModel of OpenRLHF has one head NAME.weight of shape (1, hidden); found {found}")
    return heads[0].removesuffix(".weight")


def renamed_head(stored: Mapping[str, T], head: str) -> dict[str, T]:
    return {name.replace(f"{head}.", f"{HEAD}.", 1) if name.startswith(f"{head}.") else name: at
            for name, at in stored.items()}  # fmt: skip


def standardisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward table says of the normalisation that the config asks for."""
    if not config.get("normalize_reward"):
        return {}
    return {"standardise": {"mean": float(config.get("mean", 0.0)), "std": float(config.get("std", 1.0))}}
