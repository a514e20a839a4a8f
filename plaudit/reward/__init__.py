"""Rewards: outcome and process models, rules, judges, blends. Names are imported on first use: most need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plaudit.reward.blend import BlendReward as BlendReward
    from plaudit.reward.blend import combine as combine
    from plaudit.reward.directory import complete as complete
    from plaudit.reward.judges.backends import EngineAsk as EngineAsk
    from plaudit.reward.judges.backends import HttpAsk as HttpAsk
    from plaudit.reward.judges.judge import Judge as Judge
    from plaudit.reward.judges.judge import JudgeReward as JudgeReward
    from plaudit.reward.load import load_reward as load_reward
    from plaudit.reward.load import load_worker as load_worker
    from plaudit.reward.model import ModelReward as ModelReward
    from plaudit.reward.process import ProcessReading as ProcessReading
    from plaudit.reward.reading import OutcomeReading as OutcomeReading
    from plaudit.reward.reward import Reward as Reward
    from plaudit.reward.rules.rule import RuleReward as RuleReward
    from plaudit.reward.work import ModelInfo as ModelInfo
    from plaudit.reward.work import Work as Work

_HOMES = {
    "BlendReward": "blend",
    "EngineAsk": "judges.backends",
    "HttpAsk": "judges.backends",
    "Judge": "judges.judge",
    "JudgeReward": "judges.judge",
    "ModelInfo": "work",
    "ModelReward": "model",
    "OutcomeReading": "reading",
    "ProcessReading": "process",
    "Reward": "reward",
    "RuleReward": "rules.rule",
    "Work": "work",
    "combine": "blend",
    "complete": "directory",
    "load_reward": "load",
    "load_worker": "load",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
