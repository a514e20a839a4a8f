"""Where the parts of a run are: the ranks that train and, in RL, placement, engine, and the CPUs and devices of its
processes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from plaudit.config.table import NonNegative, Positive, Table

STALENESS = 1


class PlacementTable(Table):
    """Where things run; see docs/placements.md.

    colocated      rollouts and learner in one process, on one module; everything stays in memory
    swapped        the same process, and a phase has only what it needs on the device
    hybrid         the same tensors in two modes, generation and training; with resources.rollout.processes in two
                   processes, which map the same memory
    disaggregated  rollouts in processes of their own; the learner waits for them
    async          the same, and generation goes on while the learner trains
    """

    name: Literal["colocated", "swapped", "hybrid", "disaggregated", "async"] = "colocated"
    channel: Literal["disk", "collective", "shared", "reshard"] | None = None
    """How weights reach rollout processes. Default: shared; collective between machines. reshard: every training rank
    sends each rank of an engine the part that it needs, and none gathers the policy."""
    delta: bool = False
    """disk, collective: once a process has all weights, only values that have changed travel, bit for bit. The trainer
    keeps one more copy of the policy in host memory."""
    staleness: Annotated[int, Field(ge=0)] = STALENESS
    """async: how many versions older than the learner's the oldest token of a sample may be. 0 is synchronous; else
    algorithm.correction.mode is "truncate" unless it is given."""
    stale: Literal["wait", "drop"] = "wait"
    """async: learn from prompts in their order and wait for slow ones; or from what is finished first, and ask anew
    what became too old."""
    in_flight: Literal["continue", "recompute"] = "continue"
    """async: when new weights come, a sequence goes on with the KV it has, or its tokens are read again with them."""
    concurrency: PositiveInt | None = None
    """async: prompts at work at a time. Default: as many as staleness allows."""
    deadline: Positive = 120.0
    """Seconds in which new weights must reach every rollout process, and the ranks of an engine each other."""


class EngineTable(Table):
    """What generates: the core, or a server of another project (docs/engines.md), which must be given by its address or
    by an environment to start it in."""

    name: Literal["core", "vllm", "sglang"] = "core"
    kv_bytes: PositiveInt | Annotated[float, Field(gt=0, lt=1)] | None = None
    state_every: PositiveInt = 256
    """core, of a model with recurrent layers: tokens between two states that are kept (docs/core.md)."""
    url: str | tuple[str, ...] | None = None
    """vllm, sglang: servers that run already."""
    python: str | None = None
    """vllm: the Python of an environment that has it; resources.rollout.processes servers are started."""
    options: tuple[str, ...] = ()
    """python: further options of the server's command line."""
    environment: Mapping[str, str] = {}
    """python: further environment variables of the server."""
    start: Positive = 600.0
    """python: seconds until a server must be ready."""
    timeout: Positive = 600.0
    """Seconds in which a server must have answered all prompts of a call."""
    probe: NonNegative = 0.1
    """After each publication the engine's log-probs may differ from the learner's by this much, in the mean over the
    likeliest tokens after two fixed contexts; and they must have moved as the learner's have. 0: not asked."""
    update: bool = True
    """false: engines keep the weights of the first publication. The probe then ends the run: a test of the probe."""

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url or ()

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.name == "core":
            for key in ("url", "python", "options", "environment"):
                if getattr(self, key):
                    raise ValueError(f'engine.{key} is for a server, and engine.name = "core" runs here: leave it out')
            return self
        if self.name == "sglang" and self.python is not None:
            raise ValueError('engine.name = "sglang" takes servers that run already: start them, and give engine.url')
        if bool(self.urls) == (self.python is not None):
            raise ValueError(
                f'engine.name = "{self.name}" needs either engine.url, of a server that runs already, or '
                "engine.python, to start one with"
            )
        return self


class RolloutTable(Table):
    """Processes that generate, in placements that have such."""

    processes: Annotated[int, Field(ge=0)] | None = None
    """Default: 1 for disaggregated and async; none for hybrid, which then shares the learner's process."""
    threads: PositiveInt | None = None
    """Of each. Default: as many as the learner has, which bit-equal numbers need."""
    cores: tuple[int, ...] | None = None
    """CPUs that they are pinned to."""
    devices: tuple[str, ...] | None = None
    """One per rank of each, such as "cuda:1". Default: the CPU, or the GPUs that the learner leaves free."""
    prefill: Annotated[int, Field(ge=0)] = 0
    """How many of them only read prompts and hand over their KV to the others, which only go on from there."""
    tensor_parallel: PositiveInt = 1
    """Ranks of each engine that share each matrix: one process each, and on CUDA one GPU each."""
    pipeline_parallel: PositiveInt = 1
    """Stages of each engine that share its layers, each of so many ranks."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """disaggregated, async: machines of their own that have the engines, as many each; `plaudit rollouts RUN` starts
    them there. 0: they are on the trainer's machine."""
    address: str | None = None
    """nodes: of the trainer's machine, at which these reach it. Default: MASTER_ADDR of torchrun, or the machine's
    name."""

    @property
    def ranks(self) -> int:
        """Of one engine."""
        return self.tensor_parallel * self.pipeline_parallel


def check_nodes(placement: PlacementTable, engine: EngineTable, resources: ResourcesTable, count: int) -> None:
    """Raise where `count` engines cannot be on machines of their own."""
    rollout, nodes = resources.rollout, resources.rollout.nodes
    if not nodes:
        if rollout.address is not None:
            raise ValueError(
                f"resources.rollout.address = {rollout.address!r} is for machines that generate, and "
                "resources.rollout.nodes = 0: set their number, or leave it out"
            )
        return
    channel = placement.channel
    reasons = {
        f'placement.name = "{placement.name}" generates where the policy trains: set name = "disaggregated" or "async"':
            placement.name not in ("disaggregated", "async"),
        f'engine.name = "{engine.name}" is a server, which is named by engine.url: leave nodes out':
            engine.name != "core",
        f'resources.ray = "{resources.ray}" starts the processes: leave one of them out': resources.ray is not None,
        "resources.rollout.prefill hands over KV within a machine: drop one": rollout.prefill > 0,
        'placement.channel = "shared" is the memory of one machine: set "collective", "reshard" or "disk"':
            channel == "shared",
        "resources.rollout.devices and cores are of the trainer's machine: leave them out":
            (rollout.devices or rollout.cores) is not None,
        f"resources.rollout.processes = {count} engines do not divide over them: {count} / {nodes} = "
        f"{count / nodes:g}; set processes to a multiple": count % nodes > 0,
    }  # fmt: skip
    for why, true in reasons.items():
        if true:
            raise ValueError(f"resources.rollout.nodes = {nodes} machine(s) of their own generate, and {why}")


class RewardPoolTable(Table):
    """Processes that score, on Ray."""

    processes: Annotated[int, Field(ge=0)] = 0
    """0: rewards are computed where the policy trains."""
    gpus: NonNegative = 0.0
    """Of each; a part of one is shared."""


class RanksTable(Table):
    """Processes that train together: data_parallel × context_parallel × tensor_parallel × pipeline_parallel of them."""

    data_parallel: PositiveInt = 1
    """Ranks that share weights, gradients and optimizer (FSDP2), each with a part of the batch."""
    context_parallel: PositiveInt = 1
    """Ranks that share weights as these do, and the tokens of each micro-batch: for sequences that are too long for the
    memory of one. Attention heads are dealt out over them."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each matrix."""
    pipeline_parallel: PositiveInt = 1
    """Stages that share the layers out, each of as many ranks as the others make: micro-batches go through them."""
    expert_parallel: PositiveInt = 1
    """Of the data_parallel × context_parallel × tensor_parallel ranks of a stage so many share the experts of a mixture
    out, each with whole ones, and exchange tokens around them. They are no further ranks."""
    timeout: Positive = 1800.0
    """Seconds a rank waits for the others: more than the slowest one's part of a step takes, in RL its rollouts and
    rewards, and more than an evaluation takes that the main one makes alone."""

    @model_validator(mode="after")
    def _deals_out(self) -> Self:
        size, tensor = self.expert_parallel, self.tensor_parallel
        count = self.shards * tensor
        if count % size:
            names, sizes = "data_parallel × context_parallel", f"{self.data_parallel} × {self.context_parallel}"
            if tensor > 1:
                names, sizes = f"{names} × tensor_parallel", f"{sizes} × {tensor}"
            raise ValueError(
                f"{names} = {sizes} ranks share experts out in groups of expert_parallel = {size}, and {count} / "
                f"{size} = {count / size:g} is no whole number: set data_parallel to a multiple"
            )
        if size > 1 and size % tensor:
            raise ValueError(
                f"tensor_parallel = {tensor} ranks have the same tokens, and go to experts with a part of them each, "
                f"so that all are in one group of expert_parallel = {size}: {size} / {tensor} = {size / tensor:g} is "
                "no whole number"
            )
        return self

    @property
    def ranks(self) -> int:
        return self.pipeline_parallel * self.shards * self.tensor_parallel

    @property
    def shards(self) -> int:
        """Into which FSDP2 cuts weights, gradients and optimizer."""
        return self.data_parallel * self.context_parallel

    @property
    def product(self) -> tuple[str, str]:
        """What `ranks` is the product of, for messages: names and sizes."""
        always = ("data_parallel", "tensor_parallel")
        kinds = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
        names = [name for name in kinds if name in always or getattr(self, name) > 1]
        return " × ".join(names), " × ".join(str(getattr(self, name)) for name in names)


class ResourcesTable(RanksTable):
    """The ranks that train; and the processes that generate and score."""

    ray: str | None = None
    """Run them as Ray actors (extra `ray`): "local" starts Ray on this machine, "auto" finds the one that runs, and an
    address names one. A process takes as many CPUs of the cluster as it has threads."""
    cores: tuple[int, ...] | None = None
    """CPUs that the learner is pinned to."""
    rollout: RolloutTable = RolloutTable()
    reward: RewardPoolTable = RewardPoolTable()
