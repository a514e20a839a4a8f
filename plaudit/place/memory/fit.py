"""Checks by arithmetic whether a recipe's models fit the device, before anything is loaded.

It counts the minimum: weights, gradients, optimizers, a KV pool of a given size. Activations come on top, so a run
that passes may still be too large; one that is refused certainly does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from plaudit.config import RlRecipe
from plaudit.config.reward import JudgeTable, ReadByEngine, RewardTable
from plaudit.errors import ConfigError, PlauditError
from plaudit.models import choose_device, resolve
from plaudit.models.dtypes import DTYPES
from plaudit.models.formats.quantised import read_model
from plaudit.models.gpu import SMALLEST, check_device
from plaudit.models.memory import free_memory
from plaudit.train.optim.host_memory import CURE, gib, shortage
from plaudit.train.run.ranks import ONE, Group

BytesByOwner = dict[str, int]


def check_fit(recipe: RlRecipe, everyone: Group = ONE) -> None:
    """Raise if the learner's device has too little memory for the recipe, or a host for what its ranks offload. Skips
    what it cannot know: devices of several ranks, and missing models, whose loading reports the error. All ranks take
    part."""
    device = choose_device(recipe.model.device)
    _check_host(recipe, device, everyone)
    free = available(device)
    if recipe.resources.ranks > 1 or free is None:
        return
    try:
        sizes = owners(recipe, device)
    except PlauditError:
        return
    phase, needed = fullest(recipe, sizes)
    if sum(needed.values()) <= free:
        return
    parts = " + ".join(f"{owner} {gib(size)}" for owner, size in needed.items())
    raise ConfigError(
        f"{phase} needs {parts} = {gib(sum(needed.values()))} GiB, without activations, and {device} has {gib(free)} "
        f"GiB free: {_cure(recipe, sizes, free)}"
    )


def owners(recipe: RlRecipe, device: str) -> BytesByOwner:
    """Bytes that each owner of the run will use on `device`."""
    dtype = DTYPES[recipe.model.dtype]
    assert recipe.model.path is not None
    count = parameters(recipe.model.path)
    sizes = {"policy weights": count * dtype.itemsize}
    offloaded = recipe.train.offload_optimizer and device.startswith("cuda")
    if recipe.model.lora is None:
        sizes |= _learning("policy", count, dtype, offloaded)
        if recipe.algorithm.kl.coef:
            sizes["reference weights"] = count * dtype.itemsize
    if paths := [teacher.path for teacher in recipe.algorithm.teachers.values() if teacher.path is not None]:
        sizes["teacher weights"] = sum(map(parameters, paths)) * dtype.itemsize
    critic = recipe.critic
    if critic is not None and not critic.shared and critic.url is None:
        count = parameters(critic.path or recipe.model.path)
        sizes |= {"critic weights": count * dtype.itemsize, **_learning("critic", count, dtype, offloaded)}
    rewards = sum(_reward(table, device) for table in recipe.scored_here())
    if rewards:
        sizes["reward weights"] = rewards
    # On the host a pool uses memory only as far as it is written to.
    if isinstance(recipe.engine.kv_bytes, int) and device.startswith("cuda") and not recipe.rollout_processes:
        sizes["KV"] = recipe.engine.kv_bytes
    return sizes


def fullest(recipe: RlRecipe, sizes: BytesByOwner) -> tuple[str, BytesByOwner]:
    """The phase that needs most, and its bytes by owner."""
    sizes = _learned_one_after_the_other(sizes)
    if recipe.placement.name != "swapped":
        return f'placement.name = "{recipe.placement.name}"', sizes
    policy: tuple[str, ...] = ("policy",)
    critic: tuple[str, ...] = ("critic",)
    if recipe.train.epochs * recipe.train.minibatches > 1:
        policy = critic = ("policy", "critic")
    phases = {
        "loading": ("weights", "masters"),
        "generation": ("KV",),
        "the policy's update": policy,
        "the critic's update": critic,
    }

    def of(words: tuple[str, ...]) -> BytesByOwner:
        # The policy's weights are present in every phase.
        return {
            o: size for o, size in sizes.items() if o == "policy weights" or any(word in o.split() for word in words)
        }

    phase = max(phases, key=lambda name: sum(of(phases[name]).values()))
    return f'{phase} with placement.name = "swapped"', of(phases[phase])


def _learned_one_after_the_other(sizes: BytesByOwner) -> BytesByOwner:
    """Gradients are freed after an update: of two models only the larger ones count."""
    gradients = sorted((owner for owner in sizes if owner.endswith("gradients")), key=sizes.__getitem__)
    return {owner: size for owner, size in sizes.items() if owner not in gradients[:-1]}


def parameters(path: str) -> int:
    return sum(math.prod(stored.shape) for stored in read_model(resolve(path)).values())


def available(device: str) -> int | None:
    """Bytes that are available; None if unknown."""
    if device.startswith("cuda"):
        check_device(device)
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return free_memory()


def _check_host(recipe: RlRecipe, device: str, everyone: Group) -> None:
    """Offloaded tensors must fit the hosts; each rank has an equal share of its host."""
    if not (recipe.train.offload_optimizer and device.startswith("cuda")) or recipe.model.lora:
        return
    try:
        here = recipe.model_copy(update={"train": recipe.train.model_copy(update={"offload_optimizer": False})})
        sizes = {o: s for o, s in owners(here, device).items() if o.endswith(("masters", "optimizer"))}
    except PlauditError:
        sizes = {}  # known on this rank, but perhaps not on others: all of them take part in what follows
    needed = sum(sizes.values())
    if lack := shortage(needed // everyone.size, everyone):
        parts = " + ".join(f"{owner} {gib(size)}" for owner, size in sizes.items())
        raise ConfigError(f"train.offload_optimizer puts {parts} = {gib(needed)} GiB into host memory: {lack}; {CURE}")


def _learning(model: str, count: int, dtype: torch.dtype, offloaded: bool = False) -> BytesByOwner:
    """Gradients and Adam's two moments in float32, and a float32 copy of narrower weights."""
    if offloaded:
        return {f"{model} gradients": 4 * count}
    masters = {} if dtype.itemsize >= 4 else {f"{model} masters": 4 * count}
    return {**masters, f"{model} optimizer": 2 * max(4, dtype.itemsize) * count, f"{model} gradients": 4 * count}


def _reward(table: RewardTable | Mapping[str, Any], device: str) -> int:
    keys = table if isinstance(table, Mapping) else table.model_dump()
    if not isinstance(table, Mapping | ReadByEngine | JudgeTable) or keys.get("path") is None:
        return 0
    if choose_device(keys.get("device") or "auto").split(":")[0] != device.split(":")[0]:
        return 0
    return parameters(str(keys["path"])) * DTYPES[keys.get("dtype") or "float32"].itemsize


def _cure(recipe: RlRecipe, sizes: BytesByOwner, free: int) -> str:
    """The first setting with which it would fit."""
    swapped = recipe.model_copy(update={"placement": recipe.placement.model_copy(update={"name": "swapped"})})
    without = {owner: size for owner, size in sizes.items() if owner != "KV"}
    frozen = {
        o: size
        for o, size in sizes.items()
        if not o.endswith(("masters", "optimizer", "gradients")) or "policy" not in o
    }
    frozen.pop("reference weights", None)
    gradients = {o: size for o, size in sizes.items() if not o.endswith(("masters", "optimizer"))}
    offload = choose_device(recipe.model.device).startswith("cuda")
    for setting, wanted in (
        ('placement.name = "swapped"', fullest(swapped, sizes)[1]),
        *([("train.offload_optimizer = true", fullest(recipe, gradients)[1])] if offload else []),
        (f"a smaller engine.kv_bytes (now {gib(sizes.get('KV', 0))} GiB)", fullest(recipe, without)[1]),
        ("model.lora, which trains few weights and needs no reference,", fullest(recipe, frozen)[1]),
    ):  # fmt: skip
        if sum(wanted.values()) <= free:
            return f"set {setting}: then {gib(sum(wanted.values()))} GiB are needed"
    return (
        "no setting makes it fit one device; share it out with resources.data_parallel, or take a smaller model: the "
        f"smallest recipe is {SMALLEST}"
    )
