"""Assigns CPUs and devices to a recipe's rollout processes; impossible requests are refused with the equation."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from plaudit.config import RlRecipe
from plaudit.errors import ConfigError

PROCESS_BYTES = 300 << 20  # memory of a rollout process after importing torch, without a model


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one engine runs: a process, and a device, for each of its ranks."""

    devices: tuple[str, ...]
    threads: int
    cores: tuple[int, ...]


def pin_learner(recipe: RlRecipe) -> tuple[int, ...]:
    """Pin this process and its children to the CPUs that the recipe lists. Returns its previous CPUs."""
    # Only Linux supports pinning.
    had = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    for key, cores in (("cores", recipe.resources.cores), ("rollout.cores", recipe.resources.rollout.cores)):
        if cores is not None and (not cores or not set(cores) <= set(had)):
            raise ConfigError(
                f"resources.{key} = {list(cores)}, and this process has the CPUs {list(had)}: choose from these"
            )
    if recipe.resources.cores is not None:
        os.sched_setaffinity(0, recipe.resources.cores)
    return had


def rollout_seats(recipe: RlRecipe, device: torch.device, weights: int, cores: Collection[int]) -> list[Seat]:
    """`device` is the learner's, `weights` the bytes of the policy, `cores` the CPUs that the run may use."""
    table, count = recipe.resources.rollout, recipe.rollout_processes
    each = table.ranks
    threads = table.threads or torch.get_num_threads()
    places = _devices(recipe, device, count * each)
    near = table.nodes == 0
    if near and recipe.placement.channel == "collective" and device.type == "cuda" and str(device) in places:
        raise ConfigError(
            'placement.channel = "collective" is NCCL, which needs one GPU each for trainer and rollouts; both '
            f'are on {device}: set channel = "shared"'
        )
    if device.type == "cpu" and near:
        _check_memory(recipe, count * each, weights // each)
    own = () if recipe.resources.ray is not None or not near else table.cores or cores  # another node has others
    return [Seat(tuple(some), threads, tuple(sorted(own))) for some in zip(*[iter(places)] * each, strict=True)]


def _devices(recipe: RlRecipe, device: torch.device, count: int) -> list[str]:
    table, hybrid = recipe.resources.rollout, recipe.placement.name == "hybrid"
    if table.devices is not None:
        _check_devices(table.devices)
        return list(table.devices)
    if device.type == "cpu":
        return ["cpu"] * count
    if table.nodes:  # its machine shows an engine only its own GPUs
        return [f"cuda:{index % table.ranks}" for index in range(count)]
    if recipe.resources.ray is not None and not hybrid:
        return ["cuda:0"] * count  # the only one that Ray shows it
    if hybrid:
        return [str(device)] * count  # it maps the learner's own memory
    ranks, there = recipe.resources.ranks, torch.cuda.device_count()
    if ranks + count > there:
        if table.ranks > 1:
            raise ConfigError(
                f'placement.name = "{recipe.placement.name}" needs {ranks} GPU(s) to train and {_shown(recipe)} = '
                f"{count} to generate = {ranks + count}, and there are {there}: set fewer"
            )
        raise ConfigError(
            f'placement.name = "{recipe.placement.name}" needs {ranks} GPU(s) to train and {count} to generate = '
            f'{ranks + count}, and there are {there}: set placement.name = "hybrid", or '
            f'resources.rollout.devices = ["cuda:0"{", …" if count > 1 else ""}] to share one'
        )
    return [f"cuda:{ranks + index}" for index in range(count)]


def _shown(recipe: RlRecipe) -> str:
    ranks = recipe.resources.rollout.ranks
    return f"resources.rollout.processes = {recipe.rollout_processes}{'' if ranks == 1 else f' × {ranks} ranks'}"


def _check_devices(devices: Sequence[str]) -> None:
    there = torch.cuda.device_count()
    valid = {"cpu", "cuda", *(f"cuda:{index}" for index in range(there))} - ({"cuda"} if there == 0 else set())
    for device in devices:
        if device not in valid:
            raise ConfigError(
                f"resources.rollout.devices has {device!r}, and this machine has {there} GPU(s): use one of "
                f"{', '.join(sorted(valid))}"
            )


def _check_memory(recipe: RlRecipe, count: int, weights: int) -> None:
    """Each process needs the weights, unless it maps the learner's, its KV cache, and PROCESS_BYTES."""
    kv = recipe.engine.kv_bytes if isinstance(recipe.engine.kv_bytes, int) else 0
    own = 0 if recipe.placement.name == "hybrid" else weights
    needed, there = count * (own + kv + PROCESS_BYTES), _available()
    if there is not None and needed > there:
        raise ConfigError(
            f"{_shown(recipe)} × ({own} bytes of weights + {kv} of engine.kv_bytes + "
            f"{PROCESS_BYTES} of Python and torch) = {needed} bytes, and {there} are available: set fewer processes, "
            "or a smaller engine.kv_bytes"
        )


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None  # not Linux
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
