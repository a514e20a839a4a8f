"""Placement of a run: training ranks and, for RL, the placement, the engine, and the CPUs and devices of its processes.
Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from plaudit.config.table import NonNegative, Positive, Table

STALENESS = 1


class PlacementTable(Table):
    """Where training and generation run; see docs/placements.md.

    colocated      rollouts and learner in one process, on one module; everything stays in memory
    swapped        the same process; each phase keeps only what it needs on the device
    hybrid         the same tensors in two modes, generation and training; with resources.rollout.processes in two
                   processes, which map the same memory
    disaggregated  rollouts in separate processes; the learner waits for them
    async          as disaggregated, and generation continues while the learner trains
    """

    name: Literal["colocated", "swapped", "hybrid", "disaggregated", "async"] = "colocated"
    channel: Literal["disk", "collective", "shared", "reshard"] | None = None
    """How weights are transferred to rollout processes. Default: shared; between machines: collective. reshard: every
    training rank sends each engine rank the shard it needs, and no rank gathers the whole policy."""
    delta: bool = False
    """disk, collective: after the first full transfer send only the values that have changed, bit for bit. The trainer
    keeps one more copy of the policy in host memory."""
    staleness: Annotated[int, Field(ge=0)] = STALENESS
    """async: how many policy versions the oldest token of a sample may lag behind the learner. 0 is synchronous;
    otherwise algorithm.correction.mode defaults to "truncate"."""
    stale: Literal["wait", "drop"] = "wait"
    """async: wait: train on prompts in order and wait for slow ones. drop: train on what finishes first, and sample
    again what has become too stale."""
    in_flight: Literal["continue", "recompute"] = "continue"
    """async: on a weight update a running sequence continues with its KV cache, or its KV is recomputed with the new
    weights."""
    concurrency: PositiveInt | None = None
    """async: prompts in flight. Default: as many as staleness allows."""
    deadline: Positive = 120.0
    """Timeout in seconds for a weight update to reach every rollout process, and for communication between the ranks
    of an engine."""


class EngineTable(Table):
    """The generation engine: the core, or a vLLM or SGLang server (docs/engines.md), given by its address or by a
    Python environment to start it from."""

    name: Literal["core", "vllm", "sglang"] = "core"
    kv_bytes: PositiveInt | Annotated[float, Field(gt=0, lt=1)] | None = None
    state_every: PositiveInt = 256
    """core, models with recurrent layers: tokens between two cached states (docs/core.md)."""
    url: str | tuple[str, ...] | None = None
    """vllm, sglang: URLs of running servers."""
    python: str | None = None
    """vllm: the Python interpreter of an environment with vLLM; resources.rollout.processes servers are started."""
    options: tuple[str, ...] = ()
    """python: additional command-line options of the server."""
    environment: Mapping[str, str] = {}
    """python: additional environment variables of the server."""
    start: Positive = 600.0
    """python: timeout in seconds for a server to become ready."""
    timeout: Positive = 600.0
    """Timeout in seconds for a server to complete all prompts of a call."""
    probe: NonNegative = 0.1
    """Maximum difference between the engine's and the learner's log-probs after each weight update, as the mean over
    the likeliest tokens after two fixed contexts; they must also have changed as the learner's have. 0: not checked."""
    update: bool = True
    """false: engines keep the weights of the first update. The probe then ends the run: a test of the probe."""

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url or ()

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.name == "core":
            for key in ("url", "python", "options", "environment"):
                if getattr(self, key):
                    raise ValueError(
                        f'engine.{key} is for a server, and engine.name = "core" runs in Plaudit\'s processes: remove '
                        "it"
                    )
            return self
        if self.name == "sglang" and self.python is not None:
            raise ValueError(
                'engine.python is for engine.name = "vllm"; "sglang" needs running servers: start them and set '
                "engine.url"
            )
        if bool(self.urls) == (self.python is not None):
            raise ValueError(
                f'engine.name = "{self.name}" needs exactly one of engine.url, a running server, and engine.python, to '
                "start one"
            )
        return self


class RolloutTable(Table):
    """Rollout processes, in placements that have them."""

    processes: Annotated[int, Field(ge=0)] | None = None
    """Default: 1 for disaggregated and async; none for hybrid, which then generates in the learner's process."""
    threads: PositiveInt | None = None
    """CPU threads of each. Default: as many as the learner has, which bit-identical results need."""
    cores: tuple[int, ...] | None = None
    """CPUs to pin them to."""
    devices: tuple[str, ...] | None = None
    """One per rank of each, such as "cuda:1". Default: the CPU, or the GPUs that the learner does not use."""
    prefill: Annotated[int, Field(ge=0)] = 0
    """How many of them only prefill and transfer the KV cache to the others, which only decode."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel ranks of each engine: one process each, and on CUDA one GPU each."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline stages of each engine, each with tensor_parallel ranks."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """disaggregated, async: machines that run the engines, the same number each; `plaudit rollouts RUN` starts them
    there. 0: the engines run on the trainer's machine."""
    address: str | None = None
    """nodes: address of the trainer's machine, to which the nodes connect. Default: torchrun's MASTER_ADDR, or the
    hostname."""

    @property
    def ranks(self) -> int:
        """Ranks of one engine."""
        return self.tensor_parallel * self.pipeline_parallel


def check_nodes(placement: PlacementTable, engine: EngineTable, resources: ResourcesTable, count: int) -> None:
    """Raise ValueError if `count` engines cannot run on separate machines."""
    rollout, nodes = resources.rollout, resources.rollout.nodes
    if not nodes:
        if rollout.address is not None:
            raise ValueError(
                f"resources.rollout.address = {rollout.address!r} is for rollout machines, and "
                "resources.rollout.nodes = 0: set nodes, or remove address"
            )
        return
    channel = placement.channel
    reasons = {
        f'placement.name = "{placement.name}" generates where the policy trains: set name = "disaggregated" or "async"':
            placement.name not in ("disaggregated", "async"),
        f'engine.name = "{engine.name}" is a server, given by engine.url: remove nodes':
            engine.name != "core",
        f'resources.ray = "{resources.ray}" starts the processes: remove one of them': resources.ray is not None,
        "resources.rollout.prefill transfers KV within one machine: remove one": rollout.prefill > 0,
        'placement.channel = "shared" uses the memory of one machine: set "collective", "reshard" or "disk"':
            channel == "shared",
        "resources.rollout.devices and cores are for the trainer's machine: remove them":
            (rollout.devices or rollout.cores) is not None,
        f"resources.rollout.processes = {count} engines do not divide evenly over them: {count} / {nodes} = "
        f"{count / nodes:g}; set processes to a multiple": count % nodes > 0,
    }  # fmt: skip
    for why, applies in reasons.items():
        if applies:
            raise ValueError(f"resources.rollout.nodes = {nodes} separate machine(s) generate, and {why}")


class RewardPoolTable(Table):
    """Ray actors that compute rewards."""

    processes: Annotated[int, Field(ge=0)] = 0
    """Number of actors. 0: rewards are computed in the training process."""
    gpus: NonNegative = 0.0
    """GPUs of each; a fraction shares a GPU."""


class RanksTable(Table):
    """Training ranks: data_parallel × context_parallel × tensor_parallel × pipeline_parallel processes."""

    data_parallel: PositiveInt = 1
    """Ranks that shard weights, gradients and optimizer state (FSDP2), each with a part of the batch."""
    context_parallel: PositiveInt = 1
    """Ranks that shard weights as data_parallel does, and also split the tokens of each micro-batch: for sequences that
    do not fit in one rank's memory. Attention heads are distributed over them."""
    tensor_parallel: PositiveInt = 1
    """Ranks that each weight matrix is split over."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline stages that the layers are split over, each with all ranks of the other kinds; micro-batches pass
    through them."""
    expert_parallel: PositiveInt = 1
    """How many of a stage's data_parallel × context_parallel × tensor_parallel ranks a mixture's experts are
    distributed over; each rank has whole experts, and tokens are exchanged between them. Adds no ranks."""
    timeout: Positive = 1800.0
    """Seconds a rank waits for the others. Must exceed the slowest rank's share of a step (in RL with rollouts and
    rewards) and an evaluation that the main rank runs alone."""

    @model_validator(mode="after")
    def _experts_divide(self) -> Self:
        size, tensor = self.expert_parallel, self.tensor_parallel
        count = self.shards * tensor
        if count % size:
            names, sizes = "data_parallel × context_parallel", f"{self.data_parallel} × {self.context_parallel}"
            if tensor > 1:
                names, sizes = f"{names} × tensor_parallel", f"{sizes} × {tensor}"
            raise ValueError(
                f"{names} = {sizes} ranks form groups of expert_parallel = {size}, and {count} / {size} = "
                f"{count / size:g} is not a whole number: set data_parallel to a multiple"
            )
        if size > 1 and size % tensor:
            raise ValueError(
                f"all tensor_parallel = {tensor} ranks of a group must be in the same expert_parallel = {size} group, "
                f"and {size} / {tensor} = {size / tensor:g} is not a whole number: set expert_parallel to a multiple "
                "of tensor_parallel"
            )
        return self

    @property
    def ranks(self) -> int:
        return self.pipeline_parallel * self.shards * self.tensor_parallel

    @property
    def shards(self) -> int:
        """Number of FSDP2 shards of weights, gradients and optimizer state."""
        return self.data_parallel * self.context_parallel

    @property
    def product(self) -> tuple[str, str]:
        """Return the factors of `ranks` for messages: names and sizes."""
        always = ("data_parallel", "tensor_parallel")
        kinds = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
        names = [name for name in kinds if name in always or getattr(self, name) > 1]
        return " × ".join(names), " × ".join(str(getattr(self, name)) for name in names)


class ResourcesTable(RanksTable):
    """Training ranks, and rollout and reward processes."""

    ray: str | None = None
    """Run them as Ray actors (extra `ray`): "local" starts Ray on this machine, "auto" connects to the
    running one, or give an address. A process reserves as many CPUs of the cluster as it has threads."""
    cores: tuple[int, ...] | None = None
    """CPUs to pin the learner to."""
    rollout: RolloutTable = RolloutTable()
    reward: RewardPoolTable = RewardPoolTable()
