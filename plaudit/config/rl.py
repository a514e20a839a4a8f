"""The recipe of RL training. Configurations that cannot work are refused here, with the equation, before loading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from plaudit.algo.methods import METHODS
from plaudit.config.algorithm import RlAlgorithm
from plaudit.config.placement import STALENESS, EngineTable, PlacementTable, ResourcesTable, check_nodes
from plaudit.config.prompting import AskingTable, SamplingTable
from plaudit.config.reward import RewardTable, RlRewardTable, RuleTable
from plaudit.config.search import RolloutSearchTable
from plaudit.config.supervised import BaseRecipe, PolicyModelTable, SumsTable, TrainTable
from plaudit.config.table import Positive, Table
from plaudit.config.world import World


class RlDataTable(AskingTable):
    """Prompts from one of three sources, or from several in `sources`.

    world  a built-in task with known right answers
    path   a .jsonl or .parquet file of {"prompt"} or {"messages"}, with the rule's reference answer under `truth`
    gym    the name of a reasoning-gym task (extra `verify`)
    """

    world: World | None = None
    path: str | None = None
    eval_path: str | None = None
    """Held-out prompts. Default: the last tenth of `path` (at most eval_items)."""
    truth: str = "answer"
    """path: the key of the reference answer for a rule."""
    limit: PositiveInt | None = None
    eval_items: PositiveInt = 200
    sums: SumsTable = SumsTable()
    measured: str | None = None
    """A run with rollouts of these prompts, whose mean rewards are the pass rates. Prompts without one are skipped."""
    keep: tuple[float, float] | None = None
    """measured: train on prompts whose pass rate is in this range, bounds included."""
    order: Literal["shuffled", "easy-first", "hard-first"] = "shuffled"
    """measured: order the first epoch by pass rate; later epochs are shuffled."""
    sources: Mapping[str, SourceTable] = {}
    """Several sources, under names of your choice, each with a `weight` and its own keys."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("world", "path", "gym", "sources") if getattr(self, name)]
        if len(sources) != 1:
            raise ValueError(f"give one of data.world, data.path, data.gym and data.sources; got {sources or 'none'}")
        if self.sources:
            if any(table.sources for table in self.sources.values()):
                raise ValueError("a source cannot have sources: list them all in data.sources")
            for name, field in type(self).model_fields.items():
                if name not in ("sources", "weight") and getattr(self, name) != field.get_default():
                    raise ValueError(
                        f"data.{name} does not apply with data.sources: set it per source, such as "
                        f"data.sources.a.{name}"
                    )
        if self.measured is None and (self.keep is not None or self.order != "shuffled"):
            raise ValueError("data.keep and data.order need pass rates: set data.measured, a run with rollouts")
        if self.measured is not None and self.path is None and self.limit is None:
            raise ValueError("data.measured needs all prompts, and a world or a gym is unlimited: set data.limit")
        if self.keep is not None and self.keep[0] > self.keep[1]:
            raise ValueError(f"data.keep = [{self.keep[0]:g}, {self.keep[1]:g}] must be [lowest, highest]")
        return self

    def without_meaning(self) -> set[str]:
        world = set() if self.world is not None else {"sums"}
        return {*super().without_meaning(), "sources", *world}

    def parts(self) -> list[RlDataTable]:
        return list(self.sources.values()) or [self]


class SourceTable(RlDataTable):
    weight: Positive = 1.0
    """Its share of the prompts, relative to the sum of all weights."""


class EnvironmentTable(Table):
    """A multi-turn environment that responds between the policy's turns."""

    name: str
    """A built-in environment, file.py:Class, or package.module:Class"""
    max_turns: PositiveInt = 8
    timeout: Positive = 30.0
    """Timeout in seconds for one observation; the response fails after it."""
    episode_timeout: Positive | None = None
    """Timeout in seconds for a whole response with all its turns, after which it fails. Default: no limit."""
    max_observation: PositiveInt = 65536
    """Maximum characters of one observation; a longer one is truncated, with a note in the text."""
    threads: PositiveInt = 64
    """Environments called concurrently."""
    lockstep: bool = False
    """All responses of a step take their turns together, so that batches do not depend on how long tools take: on a CPU
    results are bit-identical in every run. One slow tool then stalls all."""
    options: Mapping[str, Any] = {}
    """Constructor arguments of the class."""


class AgentTable(Table):
    """An agent program that runs each episode itself, against an OpenAI-compatible endpoint of the policy."""

    function: str
    """file.py:function or package.module:function, called with (prompt, base_url, api_key); it may be a coroutine
    function."""
    concurrency: PositiveInt = 64
    """Concurrent episodes."""
    timeout: Positive = 300.0
    """Timeout in seconds for one episode, after which it fails."""
    conversations: PositiveInt = 1
    """Maximum conversations of an episode, each of which is a sample; a request that would start another is refused."""
    ignore_sampling: bool = False
    """Apply [sampling] to requests with a different temperature, seed or the like instead of refusing them."""
    options: Mapping[str, Any] = {}
    """Additional keyword arguments of the function."""


class CriticTable(Table):
    path: str | None = None
    """A model directory to initialise the critic's trunk from. Default: the policy's."""
    shared: bool = False
    """Share the policy's trunk: a value head on its hidden states."""
    url: str | None = None
    """A critic server (`plaudit critic`) instead of a local critic. Its training settings are set on the server."""
    key_env: str | None = None
    """url: the environment variable that holds the server's key; the admin key, if it has one."""
    patience: Positive = 600.0
    """url: seconds to wait for a response, or for an unreachable server, before the run ends."""
    lr: Positive = 1e-4
    coef: Positive = 0.5
    """shared: weight of the value loss relative to the policy loss."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Initial steps that train only the critic."""
    clip_norm: Positive = 1.0

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("path", "url") if getattr(self, name) is not None] + ["shared"] * self.shared
        if len(sources) > 1:
            raise ValueError(f"give at most one of critic.path, url and shared; got {' and '.join(sources)}")
        if self.url is not None:
            # Compare values, not whether keys are set: a resolved recipe sets all of them.
            for name in ("lr", "clip_norm", "coef"):
                if (value := getattr(self, name)) != CriticTable.model_fields[name].default:
                    raise ValueError(
                        f"{name} = {value:g} is for a local critic, and url is a server: set it on the server"
                    )
        return self


class RlTrainTable(TrainTable):
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt = 1
    epochs: PositiveInt = 1
    """Passes over a step's samples."""
    minibatches: PositiveInt = 1
    """Updates per epoch."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0
    eval_every: PositiveInt = 10
    eval_samples: PositiveInt = 1
    """Responses per held-out prompt, sampled with [sampling] and the overrides of sampling.eval."""
    non_finite: Literal["halt", "skip"] = "halt"
    """On a non-finite loss or gradient the weights are not updated, and the run ends or continues."""
    dump: bool = False
    """Write every step's samples to rollouts/, for --train-only and --replay."""
    routing_replay: bool = False
    """Mixture of experts, on a CPU: the engine records the experts chosen for every token, and the learner uses
    them."""
    show: Annotated[int, Field(ge=0)] = 4
    """Samples per evaluation written to the event log, token by token."""


class RlRecipe(BaseRecipe):
    task: Literal["rl"]
    model: PolicyModelTable
    data: RlDataTable
    reward: RlRewardTable
    truth: RlRewardTable | None = None
    """A more reliable reward for comparison, such as a rule when `reward` is a learned model. Held-out responses are
    scored by both, and this one is not trained on: the report shows where the two diverge (reward hacking)."""
    algorithm: RlAlgorithm
    critic: CriticTable | None = None
    train: RlTrainTable
    sampling: SamplingTable = SamplingTable()
    environment: EnvironmentTable | None = None
    agent: AgentTable | None = None
    search: RolloutSearchTable | None = None
    placement: PlacementTable = PlacementTable()
    engine: EngineTable = EngineTable()
    resources: ResourcesTable = ResourcesTable()

    @model_validator(mode="before")
    @classmethod
    def _default_reward(cls, recipe: Any) -> Any:
        """With teachers the reward is optional: without one every response has reward 0."""
        algorithm = recipe.get("algorithm")
        if "reward" in recipe or not isinstance(algorithm, Mapping) or not algorithm.get("teachers"):
            return recipe
        return {**recipe, "reward": {"rule": "regex", "pattern": "", "right": 0.0}}

    @model_validator(mode="before")
    @classmethod
    def _correct_staleness(cls, recipe: Any) -> Any:
        """Correct for stale samples by default: otherwise training diverges in time (docs/log/stale-samples.md)."""
        placement, algorithm = recipe.get("placement"), recipe.get("algorithm")
        if not isinstance(placement, Mapping) or not isinstance(algorithm, Mapping):
            return recipe
        stale = placement.get("name") == "async" and placement.get("staleness", STALENESS) != 0
        correction = algorithm.get("correction", {})
        if algorithm.get("name") in METHODS and METHODS[algorithm["name"]].loss.pairs:
            return recipe  # a preference does not depend on which policy sampled the pair
        if not stale or not isinstance(correction, Mapping) or "mode" in correction:
            return recipe
        return {**recipe, "algorithm": {**algorithm, "correction": {**correction, "mode": "truncate"}}}

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        train, algorithm, sampling = self.train, self.algorithm, self.sampling
        n = train.samples_per_prompt
        if self.model.path is None:
            raise ValueError("RL needs an initial policy that sometimes answers correctly: set model.path")
        if algorithm.grouped and n < 2:
            raise ValueError(
                f"train.samples_per_prompt = {n}, and {algorithm.name} compares the responses to a prompt: r - "
                "mean(r) = 0 in a group of one. Set train.samples_per_prompt to 2 or more"
            )
        if algorithm.dynamic is not None and n < 2:
            raise ValueError(f"algorithm.dynamic needs train.samples_per_prompt of 2 or more, and it is {n}")
        if (train.prompts_per_step * n) % train.minibatches:
            raise ValueError(
                f"prompts_per_step × samples_per_prompt = {train.prompts_per_step} × {n} = "
                f"{train.prompts_per_step * n} responses are not a multiple of minibatches = {train.minibatches}"
            )
        if sampling.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens = {sampling.max_tokens}: expected 1 or more")
        if sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0 gives equal responses, and RL needs different ones: set it above 0"
            )
        if sampling.evaluating().temperature == 0 and train.eval_samples > 1:
            raise ValueError(
                f"sampling.eval.temperature = 0 gives the same response every time, and train.eval_samples = "
                f"{train.eval_samples}: set one of them to 1"
            )
        self._can_branch()
        if self.search is not None:
            self._can_be_searched()
        for table in self.scored_here():
            self._fits_the_data(table)
        overlong = algorithm.shaping.overlong
        if overlong is not None and overlong.buffer > sampling.max_tokens:
            raise ValueError(
                f"shaping.overlong.buffer = {overlong.buffer} exceeds sampling.max_tokens = {sampling.max_tokens}"
            )
        if (self.critic is not None) != algorithm.needs_critic:
            if self.critic is not None:
                raise ValueError(f'{algorithm.name} uses no critic: remove [critic], or set algorithm.name = "ppo"')
            estimator = algorithm.advantage.estimator
            raise ValueError(
                f'advantage.estimator = "{estimator}" needs a critic: add a [critic] table, which may be empty'
            )
        if self.resources.ranks > 1:
            if self.critic is not None and self.critic.url is not None:
                raise ValueError(
                    f"critic.url needs one training rank, and resources set {self.resources.ranks}: a critic server "
                    "accepts updates from one process. Remove critic.url, and the critic is sharded as the policy is"
                )
            if self.reward.url is not None and self.resources.timeout <= self.reward.patience:
                raise ValueError(
                    f"resources.timeout = {self.resources.timeout:g} s must exceed reward.patience = "
                    f"{self.reward.patience:g} s: the other ranks would time out before the one that waits for rewards"
                )
        self._can_be_taught()
        self._can_be_placed()
        self._can_replay_routing()
        self._can_be_played()
        if algorithm.bootstrap and algorithm.mask_truncated and algorithm.needs_critic:
            raise ValueError("mask_truncated excludes the responses that bootstrap values: set one of them to false")
        return self

    def _can_branch(self) -> None:
        branch, n, estimator = self.sampling.branch, self.train.samples_per_prompt, self.algorithm.advantage.estimator
        if branch and math.prod(branch) != n:
            raise ValueError(
                f"sampling.branch = {list(branch)} gives {' × '.join(map(str, branch))} = {math.prod(branch)} "
                f"responses to a prompt, and train.samples_per_prompt = {n}: make them equal"
            )
        if estimator == "branch" and not branch and self.search is None:
            raise ValueError(
                f"{self.algorithm.name} compares the branches of a tree of responses, and there is no tree: set "
                "sampling.branch, such as [2, 2, 2] for 8 responses, or add [search]; sampling.step ends a step"
            )
        if branch and (self.agent is not None or self.environment is not None):
            raise ValueError("sampling.branch is for single-turn responses: remove it, or [agent] and [environment]")

    def _can_be_searched(self) -> None:
        reasons = {
            "sampling.branch builds trees without one": bool(self.sampling.branch),
            "[agent] or [environment] is multi-turn": (self.agent or self.environment) is not None,
            f"resources set {self.resources.ranks} ranks, not one": self.resources.ranks > 1,
            "train.routing_replay needs responses generated in one pass": self.train.routing_replay,
        }
        if conflicts := [why for why, applies in reasons.items() if applies]:
            raise ValueError(f"[search] builds trees of responses by a process model, and {conflicts[0]}: remove one")
        self.sampling.check_step()

    def _can_be_taught(self) -> None:
        for name, teacher in self.algorithm.teachers.items():
            if teacher.url is None:
                continue
            if self.sampling.temperature != 1:
                raise ValueError(
                    f"sampling.temperature = {self.sampling.temperature:g}, and the server of algorithm.teachers."
                    f"{name} returns log-probs at temperature 1: set it to 1, or set the teacher's path"
                )
            if self.resources.ranks > 1:
                raise ValueError(
                    f"algorithm.teachers.{name}.url needs one training rank, and resources set {self.resources.ranks}: "
                    "set the teacher's path, and it is sharded as the policy is"
                )

    def _can_be_played(self) -> None:
        if self.agent is None:
            return
        if self.environment is not None:
            raise ValueError("[agent] runs whole episodes, and [environment] responds between turns: remove one")
        if self.resources.ranks > 1:
            raise ValueError(f"[agent] needs one training rank, and resources set {self.resources.ranks}: remove one")

    def scored_here(self) -> list[RewardTable | Mapping[str, Any]]:
        """Return the rewards computed in this process: those trained on, and the truth."""
        return [table for of in (self.reward, self.truth) if of is not None for table in of.tables().values()]

    @property
    def rollout_processes(self) -> int:
        """Number of rollout processes in addition to the training ranks."""
        if self.resources.rollout.processes is not None:
            return self.resources.rollout.processes
        return int(self.placement.name in ("disaggregated", "async"))

    @property
    def engine_parts(self) -> bool:
        """Whether the training ranks are also the engine ranks, each with its shard of an engine."""
        return self.resources.rollout.ranks > 1 and self.rollout_processes == 0

    def _can_be_served(self) -> None:
        """Check an external engine, vLLM or SGLang."""
        engine, placement = self.engine, self.placement
        if engine.name == "core":
            return
        if placement.name not in ("disaggregated", "async"):
            raise ValueError(
                f'engine.name = "{engine.name}" is a separate server, and placement.name = "{placement.name}" '
                'generates on the learner\'s tensors: set placement.name = "disaggregated" or "async"'
            )
        if engine.name == "sglang" and placement.channel not in (None, "disk"):
            raise ValueError(f'SGLang loads from disk: set placement.channel = "disk", not "{placement.channel}"')
        for of, sampling in (("sampling", self.sampling), ("sampling.eval", self.sampling.evaluating())):
            if engine.name == "sglang" and (sampling.top_p != 1 or sampling.top_k):
                raise ValueError(
                    f"SGLang returns log-probs from before {of}.top_p = {sampling.top_p:g} and top_k = "
                    f"{sampling.top_k} are applied: remove them, or use another engine"
                )

    def _can_be_placed(self) -> None:
        self._can_be_served()
        placement, rollout = self.placement, self.resources.rollout
        name, count = placement.name, self.rollout_processes
        if name in ("disaggregated", "async") and count == 0:
            raise ValueError(
                f'placement.name = "{name}" generates in separate processes, and resources.rollout.processes = 0: '
                'set 1 or more, or placement.name = "colocated"'
            )
        if name not in ("disaggregated", "async", "hybrid") and count:
            raise ValueError(
                f'placement.name = "{name}" generates in the learner\'s process, and resources.rollout.processes = '
                f'{count}: remove it, or set placement.name = "disaggregated"'
            )
        if rollout.prefill and (
            rollout.prefill >= count or name not in ("disaggregated", "async") or self.engine.name != "core"
        ):
            raise ValueError(
                f"resources.rollout.prefill = {rollout.prefill} of {count} process(es) only prefill, and others must "
                'decode: set fewer, with placement.name = "disaggregated" or "async" and engine.name = "core"'
            )
        if rollout.devices is not None and len(rollout.devices) != count * rollout.ranks:
            each = "" if rollout.ranks == 1 else f" of {rollout.ranks} ranks"
            raise ValueError(
                f"resources.rollout.devices lists {len(rollout.devices)} for {count} process(es){each}: give one each"
            )
        check_nodes(placement, self.engine, self.resources, count)
        self._can_have_ranks()
        self._can_be_on_ray()
        if placement.delta and (
            placement.channel not in ("disk", "collective")
            or self.engine.name != "core"
            or self.model.lora is not None
            or name not in ("disaggregated", "async")
        ):
            raise ValueError(
                "placement.delta sends changed weights to the core's engines: set placement.channel = "
                '"disk" or "collective" and placement.name = "disaggregated" or "async", without model.lora; or remove '
                "delta"
            )
        if placement.channel == "reshard" and self.engine.name != "core":
            raise ValueError(
                f'placement.channel = "reshard" sends each engine rank its shard, which engine.name = '
                f'"{self.engine.name}" cannot receive: set placement.channel = "collective", or remove engine.name'
            )
        if name == "hybrid" and placement.channel not in (None, "shared"):
            raise ValueError(
                f'placement.channel = "{placement.channel}" copies weights, and in placement.name = "hybrid" they are '
                'shared: remove it, or set placement.name = "disaggregated"'
            )

    def _can_replay_routing(self) -> None:
        if not self.train.routing_replay:
            return
        engine, rollout = self.engine.name, self.resources.rollout
        reasons = {
            f'engine.name = "{engine}" does not report them: set "core"': engine != "core",
            f"resources set {self.resources.ranks} training ranks: set one": self.resources.ranks > 1,
            f"rank 0 of an engine of {rollout.pipeline_parallel} stages has only the routers of its own layers: set "
            "resources.rollout.pipeline_parallel = 1": rollout.pipeline_parallel > 1,
            "resources.rollout.prefill transfers KV without them: set 0": rollout.prefill > 0,
        }
        for why, applies in reasons.items():
            if applies:
                raise ValueError(f"train.routing_replay needs the experts that engines record, and {why}, or remove it")

    def _can_have_ranks(self) -> None:
        """Check engines of several ranks."""
        rollout, ranks, name = self.resources.rollout, self.resources.ranks, self.placement.name
        if rollout.ranks == 1:
            return
        named = (
            f"resources.rollout.tensor_parallel = {rollout.tensor_parallel} × pipeline_parallel = "
            f"{rollout.pipeline_parallel} is an engine of {rollout.ranks} ranks"
        )
        left = ranks % rollout.ranks
        reasons = {
            'in placement.name = "hybrid" a separate process maps the learner\'s tensors: remove '
            "resources.rollout.processes": name == "hybrid" and self.rollout_processes > 0,
            f"the training ranks, resources.{' = '.join(self.resources.product)} = {ranks}, are not a whole number of "
            f"engines: {ranks} / {rollout.ranks} = {ranks / rollout.ranks:g}": self.engine_parts and left > 0,
            f'engine.name = "{self.engine.name}" has its own options for that: remove it here':
                self.engine.name != "core",
            "resources.rollout.prefill transfers KV, of which each rank has a shard: remove one": rollout.prefill > 0,
            "resources.ray starts engines of one rank: remove one of them": self.resources.ray is not None,
        }  # fmt: skip
        for why, applies in reasons.items():
            if applies:
                raise ValueError(f"{named}, and {why}")

    def _can_be_on_ray(self) -> None:
        resources = self.resources
        pool = resources.reward.processes
        if resources.ray is None:
            if pool:
                raise ValueError(
                    f'resources.reward.processes = {pool} are Ray actors: set resources.ray = "local", or remove it'
                )
            return
        if pool and self.reward.url is not None:
            raise ValueError(
                f"resources.reward.processes = {pool}, and reward.url is a server that computes rewards: remove one"
            )
        if self.placement.name == "hybrid" and self.rollout_processes:
            raise ValueError(
                f"resources.rollout.processes = {self.rollout_processes} would map the learner's memory "
                f'(placement.name = "hybrid"), and on Ray each process has its own: remove it, or set placement.name = '
                '"disaggregated"'
            )
        for key, values in (
            ("cores", resources.cores), ("rollout.cores", resources.rollout.cores),
            ("rollout.devices", resources.rollout.devices),
        ):  # fmt: skip
            if values is not None:
                raise ValueError(
                    f'resources.{key} = {list(values)} is for this machine, and resources.ray = "{resources.ray}" '
                    "assigns each process its own: remove one of them"
                )

    def _fits_the_data(self, reward: RewardTable | Mapping[str, Any]) -> None:
        rule = reward.rule if isinstance(reward, RuleTable) else None
        gyms = [part.gym is not None for part in self.data.parts()]
        if any(gyms) and rule in ("exact", "math"):
            raise ValueError(f'a gym task checks its own answers: set rule = "gym" instead of rule = "{rule}"')
        if not all(gyms) and rule == "gym":
            raise ValueError('rule = "gym" scores by the gym task of the prompt: set data.gym, or use another rule')
