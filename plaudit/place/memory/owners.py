"""Memory owners: the models of a run, their gradients and optimizers, the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from plaudit.core import Engine
from plaudit.place.workers.engine_part import EnginePart
from plaudit.reward.blend import BlendReward
from plaudit.reward.judges.backends import EngineAsk
from plaudit.reward.judges.judge import JudgeReward
from plaudit.reward.model import ModelReward
from plaudit.search.backends.scoring import LocalScorer
from plaudit.search.rollouts import SearchTurn
from plaudit.train.optim.optimizer import Optimizer, local
from plaudit.train.policy.critic import LocalCritic
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.trainee import Trainee
from plaudit.train.rollouts.scorer import Scorer
from plaudit.train.rollouts.sharing import SharedScorer

Tensors = Callable[[], Iterable[Tensor]]
Count = Callable[[], int]


class Holdings:
    """Functions without arguments by owner, which return its current bytes. The bytes change, the owners stay."""

    def __init__(self) -> None:
        self.counts: dict[str, Count] = {}

    def add(self, owner: str, tensors: Tensors) -> None:
        self.counts[owner] = lambda: sum(size_of(local(tensor)) for tensor in tensors())

    def add_module(self, owner: str, *modules: nn.Module) -> None:
        tensors = [tensor for module in modules for tensor in weights_of(module)]
        self.add(owner, lambda: tensors)

    def add_optimizer(self, model: str, optimizer: Optimizer) -> None:
        """Its float32 copies and moments, and the gradients that it applies."""
        self.add(f"{model} gradients", optimizer.gradients)
        if copies := optimizer.copies():
            self.add(f"{model} masters", lambda: copies)
        self.add(f"{model} optimizer", optimizer.moments)

    def add_kv(self, owner: str, engines: Sequence[Engine]) -> None:
        self.counts[owner] = lambda: sum(engine.kv_held() for engine in engines)

    def now(self) -> dict[str, int]:
        return {owner: size for owner, count in self.counts.items() if (size := count())}


def size_of(tensor: Tensor) -> int:
    """0 for a tensor whose memory is offloaded (residency.py)."""
    return tensor.nbytes if tensor.untyped_storage().nbytes() else 0


def weights_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers that have memory, each once."""
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]


def _generating(trainee: Trainee, engine: object) -> nn.Module:
    """The model that an engine of this process runs, or that is sent to one elsewhere."""
    if isinstance(engine, EnginePart):
        return engine.module
    return engine.decoder.module if isinstance(engine, Engine) else trainee.loaded.module


def reward_engines(scorer: object) -> list[Engine]:
    """The models that a scorer runs in this process."""
    if isinstance(scorer, SharedScorer):
        return reward_engines(scorer.scorer)
    if isinstance(scorer, Scorer):
        return reward_engines(scorer.source)
    if isinstance(scorer, BlendReward):
        return [engine for member in scorer.members.values() for engine in reward_engines(member)]
    if isinstance(scorer, ModelReward):
        return [scorer.engine]
    if isinstance(scorer, JudgeReward) and isinstance(scorer.ask, EngineAsk):
        return [scorer.ask.engine]
    return []


def search_engine(player: object) -> Engine | None:
    """The process reward model of rollouts by search, where this process runs it."""
    scorer = player.scorer if isinstance(player, SearchTurn) else None
    return scorer.engine if isinstance(scorer, LocalScorer) else None


def reference_module(reference: object) -> nn.Module | None:
    """The module of a reference with its own weights; without an adapter the reference uses the policy's."""
    return reference.module if isinstance(reference, Policy) else None


def holdings_of(trainee: Trainee, engine: object, scorer: object) -> Holdings:
    """Of the learner's process. An engine or a reward elsewhere uses no memory here."""
    holdings = Holdings()
    holdings.add_module("policy weights", _generating(trainee, engine))
    if trainee.shards is not None:
        holdings.add_module("policy shards", trainee.shards.module)
    holdings.add_optimizer("policy", trainee.optimizer)
    if (frozen := reference_module(trainee.reference)) is not None:
        holdings.add_module("reference weights", frozen)
    if trainee.teachers is not None and trainee.teachers.modules:
        holdings.add_module("teacher weights", *trainee.teachers.modules)
    if isinstance(trainee.critic, LocalCritic):
        holdings.add_module("critic weights", trainee.critic.model)
        holdings.add_optimizer("critic", trainee.critic.optimizer)
    rewards = reward_engines(scorer)
    if rewards:
        holdings.add_module("reward weights", *(each.decoder.module for each in rewards))
    holdings.add_kv("KV", [each for each in (engine, *rewards) if isinstance(each, Engine)])
    return holdings
