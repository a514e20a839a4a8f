"""What Plaudit's own trainer runs of the plans there are, and the figures that are its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from plaudit.plan.cost.plans import Plan
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import DTYPE_BYTES
from plaudit.plan.shape.layouts import TrainingLayout
from plaudit.plan.shape.model_shape import ModelShape
from plaudit.plan.shape.workload import Workload

CHANNELS = ("", "shared", "ipc", "broadcast", "reshard", "disk")
CHANNEL = "broadcast"
"""Between pools, where no other is chosen."""
RESPONSE_SECONDS = 0.15e-3
"""In which our trainer rewards a response by a rule and takes its advantage, on a CPU as beside a GPU."""


def own_constants(constants: Constants) -> Constants:
    """Those of our trainer, where they are known and nothing else is said: others' do more for each response."""
    overridden = constants.response_seconds != Constants().response_seconds
    return constants if overridden else replace(constants, response_seconds=RESPONSE_SECONDS)


def unsupported(workload: Workload) -> Mapping[str, str]:
    """What a run wants that no plan of ours has, whatever the hardware, with the cure."""
    dtype, engine = workload.dtype, workload.engine_dtype
    lacks = {
        f"training in {dtype}": (dtype not in ("bf16", "fp32"), "take --dtype bf16"),
        f"rollouts in {engine} of a policy in {dtype}": (engine != dtype, "leave out --generation-dtype"),
        f"cache in {workload.kv_dtype}": (DTYPE_BYTES[workload.kv_dtype] < 2, "take --kv-dtype bf16"),
    }
    return {name: cure for name, (true, cure) in lacks.items() if true}


def cuts_keys(model: ModelShape, tp: int) -> bool:
    """Whether tensor ranks can neither have whole key-value heads each nor share one, all by as many ranks."""
    return not model.latent and model.kv_heads % tp > 0 and tp % model.kv_heads > 0


def cuts_heads(model: ModelShape, layout: TrainingLayout) -> bool:
    """Whether the ranks that share rows out cannot be dealt whole heads, where some may share a key-value head."""
    keys = max(1, model.kv_heads // layout.tp)
    return layout.cp > 1 and (model.heads // layout.tp) % math.lcm(keys, layout.cp) > 0


def missing(workload: Workload, plan: Plan) -> tuple[str, ...]:
    """What Plaudit's own trainer lacks for this plan; empty where it runs it."""
    model, generation, training = workload.model, plan.generation, plan.training
    several = generation.tp > 1 or generation.pp > 1
    engines = plan.generation_cluster
    on_a_node = engines.devices_per_node // generation.devices  # engines, each of them whole
    left_over = plan.cluster.devices % generation.devices > 0
    lacks = {
        "engine with more expert than tensor parallelism": generation.ep > generation.tp,
        "context parallelism that cuts heads": cuts_heads(model, training),
        "engines over several devices that are not those that train": several and plan.shared and left_over,
        "engine over several nodes that are not those that train": several
        and not plan.shared
        and on_a_node * engines.nodes != plan.replicas,
        "engine whose tensor ranks do not divide the experts": model.experts % generation.tp > 0,
        "engine that cuts key-value heads": cuts_keys(model, generation.tp),
        "data parallelism without FSDP": training.dp * training.cp > 1 and training.zero < 3,
        "tensor parallelism of experts": model.experts > 0 and training.ep % training.tp > 0,
        "tensor parallelism that cuts key-value heads": cuts_keys(model, training.tp),
        "reference on the host": training.park,
        f"{plan.channel} channel": plan.channel not in CHANNELS,
    }
    return (*unsupported(workload), *(name for name, true in lacks.items() if true))
