"""Level 2: as colocated, and every phase has only what it needs on the device."""

from __future__ import annotations

import torch

from plaudit.core import Engine
from plaudit.place.colocated import Colocated
from plaudit.place.memory.meter import new_meter
from plaudit.place.memory.owners import reference_module, reward_engines, search_engine
from plaudit.place.memory.residency import Dropped, Parked, Residency, Resident, Sleeping
from plaudit.place.memory.stores import new_store
from plaudit.place.placement import PlacementContext
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.critic import LocalCritic


class Swapped(Colocated):
    """The policy's weights stay: every phase but the scoring ones works with them, and the engine has their
    addresses."""

    def __init__(self, stage: PlacementContext) -> None:
        super().__init__(stage)
        device = stage.trainee.decoder.device
        # To bring something ahead of its phase takes a second engine for copies, which the CPU has not.
        meter = new_meter(device) if device.type == "cuda" else None
        judge = search_engine(self.player)
        residents, needs = residents_of(stage, self.engine), needs_of(stage)
        if judge is not None:
            weights = list(judge.decoder.module.parameters())
            residents["process model"] = Parked(lambda: weights, new_store(device, stage.directory), frozen=True)
            residents["process model kv"] = Sleeping(judge)
            needs["generate"] |= {"process model", "process model kv"}
        self.residency = Residency(residents, needs, stage.clock, meter)
        stage.clock.watchers.append(self.residency)

    def close(self) -> None:
        super().close()
        self.residency.close()


def residents_of(stage: PlacementContext, engine: Engine) -> dict[str, Resident]:
    trainee = stage.trainee

    def parked(*parts: torch.nn.Module, frozen: bool = False) -> Parked:
        weights = [weight for part in parts for weight in part.parameters()]
        return Parked(lambda: weights, new_store(weights[0].device, stage.directory), frozen=frozen)

    def learning(optimizer: Optimizer) -> Parked:
        copies = optimizer.copies()
        return Parked(lambda: [*copies, *optimizer.moments()], new_store(trainee.decoder.device, stage.directory))

    residents: dict[str, Resident] = {
        "kv": Sleeping(engine),
        "optimizer": learning(trainee.optimizer),
        "gradients": Dropped(trainee.optimizer),
    }
    if (frozen := reference_module(trainee.reference)) is not None:
        residents["reference"] = parked(frozen, frozen=True)
    if trainee.teachers is not None and trainee.teachers.modules:
        residents["teachers"] = parked(*trainee.teachers.modules, frozen=True)
    if isinstance(trainee.critic, LocalCritic):
        residents["critic"] = parked(trainee.critic.model)
        residents["critic optimizer"] = learning(trainee.critic.optimizer)
        residents["critic gradients"] = Dropped(trainee.critic.optimizer)
    for i, rewarding in enumerate(reward_engines(stage.scorer)):
        residents[f"reward {i}"] = parked(rewarding.decoder.module, frozen=True)
        residents[f"reward kv {i}"] = Sleeping(rewarding)
    return residents


def needs_of(stage: PlacementContext) -> dict[str, set[str]]:
    recipe = stage.recipe
    policy, critic = {"optimizer", "gradients"}, {"critic", "critic optimizer", "critic gradients"}
    rewards = {name for i, _ in enumerate(reward_engines(stage.scorer)) for name in (f"reward {i}", f"reward kv {i}")}
    if recipe.train.epochs * recipe.train.minibatches > 1:
        # Policy and critic take turns, minibatch by minibatch: to move them each time would cost more than it frees.
        policy = critic = policy | critic
    return {
        "generate": {"kv"},
        # With dynamic sampling more may be generated after the rewards, and what is cached decides the last bits.
        "reward": rewards | ({"kv"} if recipe.algorithm.dynamic is not None else set()),
        "evaluate": {"kv", *rewards},
        "old": set(),
        "reference": {"reference"},
        "teachers": {"teachers"},
        "values": {"critic"},
        "update": policy,
        "critic": critic,
        "checkpoint": {"optimizer", "critic", "critic optimizer"},
    }
