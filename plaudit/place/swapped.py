"""Level 2: as colocated, but each phase keeps only what it needs on the device; the rest is offloaded."""

from __future__ import annotations

import torch

from plaudit.core import Engine
from plaudit.place.colocated import Colocated
from plaudit.place.memory.meter import new_meter
from plaudit.place.memory.owners import reference_module, reward_engines, search_engine
from plaudit.place.memory.residency import Dropped, Parked, Residency, Resident, Sleeping
from plaudit.place.memory.stores import new_store
from plaudit.place.parts import ColocatedParts
from plaudit.place.placement import PlacementContext
from plaudit.place.workers.engine_part import EnginePart
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.critic import LocalCritic


class Swapped(Colocated):
    """On one rank the policy's weights stay: every phase but the scoring ones works with them, and the engine has their
    addresses. Over several ranks the engine has its own weights, and they and the shards alternate."""

    def __init__(self, stage: PlacementContext) -> None:
        super().__init__(stage)
        self.residency = _residency(stage, Sleeping(self.engine), self.engine.decoder.module)
        judge = search_engine(self.player)
        if judge is not None:
            weights, device = list(judge.decoder.module.parameters()), stage.trainee.decoder.device
            model = Parked(lambda: weights, new_store(device, stage.directory), frozen=True)
            self.residency.add({"process model": model, "process model kv": Sleeping(judge)}, "generate")

    def close(self) -> None:
        super().close()
        self.residency.close()


class SwappedParts(ColocatedParts):
    def __init__(self, stage: PlacementContext) -> None:
        super().__init__(stage)
        self.residency = _residency(stage, SleepingPart(self.part), self.part.module)

    def close(self) -> None:
        super().close()
        self.residency.close()


class SleepingPart:
    """The KV cache of an engine of several ranks, which free it together. It is never loaded ahead or kept for the next
    phase: a rank would decide that by its own memory."""

    size = 0

    def __init__(self, part: EnginePart) -> None:
        self.part = part
        self.here = True

    def leave(self) -> None:
        self.part.together(Engine.sleep)
        self.here = False

    def come(self) -> None:
        if not self.here:
            self.part.together(Engine.wake)
        self.here = True

    def come_ahead(self) -> bool:
        return False

    def close(self) -> None: ...


def _residency(stage: PlacementContext, kv: Resident, generating: torch.nn.Module) -> Residency:
    device = stage.trainee.decoder.device
    residents, needs = residents_of(stage, kv), needs_of(stage)
    if stage.trainee.shards is not None:
        residents["engine weights"] = Parked(generating.parameters, new_store(device, stage.directory))
        residents["policy shards"] = Parked(stage.trainee.shards.parameters.values, new_store(device, stage.directory))
    # Loading ahead needs a second copy engine, which the CPU does not have.
    residency = Residency(residents, needs, stage.clock, new_meter(device) if device.type == "cuda" else None)
    stage.clock.watchers.append(residency)
    return residency


def residents_of(stage: PlacementContext, kv: Resident) -> dict[str, Resident]:
    trainee = stage.trainee

    def parked(*parts: torch.nn.Module, frozen: bool = False) -> Parked:
        weights = [weight for part in parts for weight in part.parameters()]
        return Parked(lambda: weights, new_store(weights[0].device, stage.directory), frozen=frozen)

    def learning(optimizer: Optimizer) -> Parked:
        copies = optimizer.copies()
        return Parked(lambda: [*copies, *optimizer.moments()], new_store(trainee.decoder.device, stage.directory))

    residents: dict[str, Resident] = {
        "kv": kv,
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
        # Policy and critic alternate, minibatch by minibatch: moving them each time would cost more than it frees.
        policy = critic = policy | critic
    # With dynamic sampling more may be generated after the rewards, and the cache affects the last bits.
    again = {"kv", "engine weights"} if recipe.algorithm.dynamic is not None else set()
    shards = {"policy shards"}
    needs = {
        "generate": {"kv", "engine weights"},
        "reward": rewards | again,
        "evaluate": {"kv", "engine weights", *rewards},
        "old": shards,
        "reference": {"reference", *shards},
        "teachers": {"teachers", *shards},
        "values": {"critic", *shards},
        "update": policy | shards,
        "critic": critic | shards,
        "checkpoint": {"optimizer", "critic", "critic optimizer", *shards},
    }
    if stage.trainee.shards is not None:
        needs["publish"] = {"engine weights", *shards}
    return needs
