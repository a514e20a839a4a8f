"""A Ray cluster and a run's placement group: one bundle of CPUs and GPUs for every process of the recipe.

    rank 0, rank 1, …, rollout 0, …, reward 0, …      in this order in one placement group

A cluster that is too small is refused with the arithmetic. Ray is imported where it is used: it is an extra.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plaudit
from plaudit.config import RlRecipe
from plaudit.errors import ConfigError, one_line

REACH_SECONDS = 10.0
PLACE_SECONDS = 60.0  # for bundles that the cluster has, but not free
STORE_BYTES = 80 << 20  # of a local Ray's object store: samples and weights do not go through it
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a process without a GPU bundle sees none
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # a Ray process ends without its head, and the run is resumed
    "RAY_worker_niceness": "0",  # otherwise Ray lowers the priority of its processes
}


@dataclass(frozen=True, slots=True)
class Pool:
    """Processes of one kind."""

    name: str
    key: str
    """The recipe's, for errors."""
    count: int
    cpus: int
    gpus: float

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": float(self.cpus), **({"GPU": self.gpus} if self.gpus else {})}


def import_ray() -> Any:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ConfigError(
            f"resources.ray needs the package ray ({one_line(error)}): pip install 'plaudit[ray]'"
        ) from error
    return ray


@contextmanager
def connected(where: str) -> Iterator[Any]:
    """Ray, with this process as driver: a running cluster (`auto`, or its address), or one started on this machine
    only."""
    ray = import_ray()
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if where == "local":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        options |= {"num_cpus": cores, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        _reach(where)
        ray.init(where, runtime_env={"env_vars": _environment()}, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f'resources.ray = "{where}": no Ray there ({one_line(error, 160)}); set resources.ray = "local", or start '
            "one with `ray start --head`"
        ) from error
    yield ray
    ray.shutdown()  # only after success: without its head Ray blocks here


def pools(recipe: RlRecipe, gpus: bool) -> list[Pool]:
    """`gpus`: whether policy and engines run on GPUs. A process takes as many CPUs as it has threads."""
    resources, each = recipe.resources, float(gpus)
    threads = recipe.train.threads or 1
    return [
        Pool("rank", resources.product[0], resources.ranks, threads, each),
        Pool(
            "rollout", "rollout.processes", recipe.rollout_processes if recipe.engine.name == "core" else 0,
            resources.rollout.threads or threads, each,
        ),
        Pool("reward", "reward.processes", resources.reward.processes, 1, resources.reward.gpus),
    ]  # fmt: skip


def bundles_of(recipe: RlRecipe, name: str) -> range:
    """Indices of this pool's bundles in the placement group."""
    first = 0
    for pool in pools(recipe, gpus=False):
        if pool.name == name:
            return range(first, first + pool.count)
        first += pool.count
    raise KeyError(name)


def place(ray: Any, recipe: RlRecipe) -> Any:
    """The run's placement group, with all its bundles."""
    have = ray.cluster_resources()
    device = recipe.model.device
    wanted = pools(recipe, device.startswith("cuda") or (device == "auto" and have.get("GPU", 0) > 0))
    check(wanted, have)
    together = recipe.placement.channel == "shared"
    strategy = "STRICT_PACK" if together else "PACK"
    group = ray.util.placement_group([p.bundle for p in wanted for _ in range(p.count)], strategy)
    if not group.wait(PLACE_SECONDS):
        free = ", ".join(f"{ray.available_resources().get(kind, 0):g} {kind}s free" for kind in ("CPU", "GPU"))
        node = " on one node, which placement.channel = shared needs" if together else ""
        raise ConfigError(
            f"Ray could not place {_sum(wanted, 'CPU')}{node} within {PLACE_SECONDS:g} s ({free}): they are in use, "
            "or a process needs more than one node has"
        )
    return group


def check(wanted: Sequence[Pool], have: dict[str, float]) -> None:
    for kind in ("CPU", "GPU"):
        needed = sum(pool.count * pool.bundle.get(kind, 0.0) for pool in wanted)
        if needed > have.get(kind, 0.0):
            keys = ", ".join(f"resources.{p.key}" for p in wanted if p.count and p.bundle.get(kind))
            raise ConfigError(
                f"{_sum(wanted, kind)}, and the Ray cluster has {have.get(kind, 0.0):g}: set fewer ({keys}), or add "
                "nodes"
            )


def in_bundle(group: Any, index: int) -> dict[str, Any]:
    """Options of an actor that uses this whole bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = group.bundle_specs[index]
    return {
        "num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
        ),
    }  # fmt: skip


def own_group(ray: Any) -> Any:
    """The placement group of this process's rank."""
    group = ray.util.get_current_placement_group() if ray.is_initialized() else None
    if group is None:
        raise ConfigError("resources.ray: this process is not a rank on Ray; start ranks with `plaudit train`")
    return group


def _reach(where: str) -> None:
    """If nothing listens, Ray would retry for half a minute and end the process."""
    host, colon, port = where.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), REACH_SECONDS).close()


def _sum(wanted: Sequence[Pool], kind: str) -> str:
    there = [pool for pool in wanted if pool.count and pool.bundle.get(kind)]
    terms = " + ".join(f"{p.count} {p.name}{'s' * (p.count > 1)} × {p.bundle[kind]:g}" for p in there)
    return f"{terms} = {sum(p.count * p.bundle[kind] for p in there):g} {kind}s"


def _environment() -> dict[str, str]:
    """Environment variables that Ray's processes need from this one: above all the path of this package."""
    package = str(Path(plaudit.__file__).parent.parent)
    path = os.pathsep.join(dict.fromkeys([package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    kept = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_CBWR", "HF_HOME", "HF_HUB_OFFLINE", "TRITON_INTERPRET")
    return {"PYTHONPATH": path.rstrip(os.pathsep)} | {k: os.environ[k] for k in kept if k in os.environ}
