"""Which plans Plaudit's own trainer can run, and its own constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from plaudit.config.supervised import names_experts
from plaudit.plan.cost.plans import Plan
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import DTYPE_BYTES
from plaudit.plan.shape.layouts import TrainingLayout
from plaudit.plan.shape.model_shape import ModelShape
from plaudit.plan.shape.workload import Workload

CHANNELS = ("", "shared", "ipc", "broadcast", "reshard", "disk")
CHANNEL = "broadcast"
"""Default channel between pools."""
RESPONSE_SECONDS = 0.15e-3
"""Seconds per response for a rule reward and the advantage in our trainer; the same on a CPU as next to a GPU."""


def own_constants(constants: Constants) -> Constants:
    """Constants with our trainer's own values unless overridden: other trainers do more host work per response."""
    overridden = constants.response_seconds != Constants().response_seconds
    return constants if overridden else replace(constants, response_seconds=RESPONSE_SECONDS)


def unsupported(workload: Workload) -> Mapping[str, str]:
    """Requirements of a run that no plan of ours supports on any hardware, with the fix for each."""
    dtype, engine = workload.dtype, workload.engine_dtype
    lacks = {
        f"training in {dtype}": (dtype not in ("bf16", "fp32"), "set --dtype bf16"),
        f"rollouts in {engine} of a policy in {dtype}": (engine != dtype, "remove --generation-dtype"),
        f"cache in {workload.kv_dtype}": (DTYPE_BYTES[workload.kv_dtype] < 2, "set --kv-dtype bf16"),
    }
    return {name: cure for name, (true, cure) in lacks.items() if true}


def cuts_keys(model: ModelShape, tp: int) -> bool:
    """Whether tp splits key-value heads unevenly: ranks have neither whole heads each nor share one in equal groups."""
    return not model.latent and model.kv_heads % tp > 0 and tp % model.kv_heads > 0


def cuts_heads(model: ModelShape, layout: TrainingLayout) -> bool:
    """Whether context parallel ranks cannot each get whole heads, where several may share a key-value head."""
    keys = max(1, model.kv_heads // layout.tp)
    return layout.cp > 1 and (model.heads // layout.tp) % math.lcm(keys, layout.cp) > 0


def missing(workload: Workload, plan: Plan) -> tuple[str, ...]:
    """Features that Plaudit's own trainer lacks for this plan; empty if it can run it."""
    model, generation, training = workload.model, plan.generation, plan.training
    several = generation.tp > 1 or generation.pp > 1
    engines = plan.generation_cluster
    on_a_node = engines.devices_per_node // generation.devices  # engines that fit whole on a node
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
        "adapter of experts that ranks split": model.experts > 0
        and names_experts(workload.lora_targets)
        and (generation.tp > 1 or training.ep > 1),
        "reference on the host": training.park,
        f"{plan.channel} channel": plan.channel not in CHANNELS,
    }
    return (*unsupported(workload), *(name for name, true in lacks.items() if true))
