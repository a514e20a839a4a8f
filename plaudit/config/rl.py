"""The recipe of RL training. What cannot work is refused here, with the equation, before anything is loaded."""

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
    """Prompts, from one of three sources, or from several in `sources`.

    world  a built-in task, which knows the truth
    path   a .jsonl or .parquet file of {"prompt"} or {"messages"}, with what the rule needs under `truth`
    gym    the name of a reasoning-gym task (extra `verify`)
    """

    world: World | None = None
    path: str | None = None
    eval_path: str | None = None
    """Held-out prompts; without it the last tenth of `path` (at most eval_items) is held out."""
    truth: str = "answer"
    """path: the key of what a rule compares the answer with."""
    limit: PositiveInt | None = None
    eval_items: PositiveInt = 200
    sums: SumsTable = SumsTable()
    measured: str | None = None
    """A run with rollouts of these prompts: mean rewards there are pass rates. Prompts without one are left out."""
    keep: tuple[float, float] | None = None
    """measured: learn from prompts whose pass rate is within, both ends included."""
    order: Literal["shuffled", "easy-first", "hard-first"] = "shuffled"
    """measured: the first epoch goes by pass rate; all others are shuffled."""
    sources: Mapping[str, SourceTable] = {}
    """Several in place of one, by a name of your choice, each with a `weight` and keys of its own."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("world", "path", "gym", "sources") if getattr(self, name)]
        if len(sources) != 1:
            raise ValueError(f"give one of data.world, data.path, data.gym and data.sources; found {sources or 'none'}")
        if self.sources:
            if any(table.sources for table in self.sources.values()):
                raise ValueError("a source has no sources of its own: name them all in data.sources")
            for name, field in type(self).model_fields.items():
                if name not in ("sources", "weight") and getattr(self, name) != field.get_default():
                    raise ValueError(
                        f"data.{name} beside data.sources: give it to the sources, such as data.sources.a.{name}"
                    )
        if self.measured is None and (self.keep is not None or self.order != "shuffled"):
            raise ValueError(
                "data.keep and data.order go by measured pass rates: give data.measured, a run with rollouts"
            )
        if self.measured is not None and self.path is None and self.limit is None:
            raise ValueError("data.measured looks at all prompts, and a world or a gym has no end: give data.limit")
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
    """Its share of the prompts, of the sum of all weights."""


class EnvironmentTable(Table):
    """Something that answers the policy between its turns."""

    name: str
    """A built-in one, or file.py:Class, or package.module:Class"""
    max_turns: PositiveInt = 8
    timeout: Positive = 30.0
    """Seconds for one answer of the environment; a response whose environment takes longer fails."""
    episode_timeout: Positive | None = None
    """Seconds for a whole response with all its turns; one that takes longer fails. Default: no limit."""
    max_observation: PositiveInt = 65536
    """Characters of one observation; a longer one is cut, with a note that says so."""
    threads: PositiveInt = 64
    """Environments that are asked at the same time."""
    lockstep: bool = False
    """All responses of a step take their turns together, so that batches do not depend on how long tools take: on a CPU
    the same bits in every run. One slow tool then stalls all."""
    options: Mapping[str, Any] = {}
    """What the class is made with."""


class AgentTable(Table):
    """A program that plays every response itself, against an OpenAI endpoint of the policy."""

    function: str
    """file.py:function or package.module:function, of (prompt, base_url, api_key); a coroutine function will do."""
    concurrency: PositiveInt = 64
    """Episodes that are played at the same time."""
    timeout: Positive = 300.0
    """Seconds for one episode; one that takes longer fails."""
    conversations: PositiveInt = 1
    """That one episode may have, each a sample; a request that would begin another one is refused."""
    ignore_sampling: bool = False
    """Requests that ask for another temperature, seed or the like are answered with [sampling], and not refused."""
    options: Mapping[str, Any] = {}
    """Further arguments of the function, by name."""


class CriticTable(Table):
    path: str | None = None
    """A model directory whose trunk it starts from. Default: the policy's."""
    shared: bool = False
    """One trunk with the policy: a value head on its hidden states."""
    url: str | None = None
    """A critic server (`plaudit critic`) in place of a local one. What it learns with is said there."""
    key_env: str | None = None
    """url: the environment variable that holds the server's key; the admin key, if it has one."""
    patience: Positive = 600.0
    """url: seconds to wait for an answer, or for a server that is away, before the run ends."""
    lr: Positive = 1e-4
    coef: Positive = 0.5
    """shared: weight of the value loss beside the policy's."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps in which the critic learns and the policy waits."""
    clip_norm: Positive = 1.0

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        homes = [name for name in ("path", "url") if getattr(self, name) is not None] + ["shared"] * self.shared
        if len(homes) > 1:
            raise ValueError(f"a critic has one home; found {' and '.join(homes)}")
        if self.url is not None:
            # Not whether they were given: a resolved recipe gives them all.
            for name in ("lr", "clip_norm", "coef"):
                if (value := getattr(self, name)) != CriticTable.model_fields[name].default:
                    raise ValueError(
                        f"{name} = {value:g} is for a critic of this run, and url names a server: say it there"
                    )
        return self


class RlTrainTable(TrainTable):
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt = 1
    epochs: PositiveInt = 1
    """How often a step's samples are gone through."""
    minibatches: PositiveInt = 1
    """Updates in each of them."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0
    eval_every: PositiveInt = 10
    eval_samples: PositiveInt = 1
    """Responses to each held-out prompt, sampled as training does or as sampling.eval says."""
    non_finite: Literal["halt", "skip"] = "halt"
    """What happens where a loss or gradient is not a finite number: the weights stay, and the run ends or goes on."""
    dump: bool = False
    """Write every step's samples to rollouts/, for --train-only and --replay."""
    routing_replay: bool = False
    """Of a mixture of experts, on a CPU: the engine records the experts of every token, and the learner takes these."""
    show: Annotated[int, Field(ge=0)] = 4
    """Samples per evaluation that go into the event log, token by token."""


class RlRecipe(BaseRecipe):
    task: Literal["rl"]
    model: PolicyModelTable
    data: RlDataTable
    reward: RlRewardTable
    truth: RlRewardTable | None = None
    """Any reward that is truer than `reward`, such as a rule beside a learned model. Held-out responses are scored by
    both, and nothing is learned from this one: the report shows where the reward is no longer worth following."""
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
    def _only_taught(cls, recipe: Any) -> Any:
        """What learns from teachers alone needs no reward: without one every response has 0."""
        algorithm = recipe.get("algorithm")
        if "reward" in recipe or not isinstance(algorithm, Mapping) or not algorithm.get("teachers"):
            return recipe
        return {**recipe, "reward": {"rule": "regex", "pattern": "", "right": 0.0}}

    @model_validator(mode="before")
    @classmethod
    def _correct_staleness(cls, recipe: Any) -> Any:
        """Stale samples are corrected for, unless the recipe says otherwise: without it learning breaks down sooner or
        later (docs/log/stale-samples.md)."""
        placement, algorithm = recipe.get("placement"), recipe.get("algorithm")
        if not isinstance(placement, Mapping) or not isinstance(algorithm, Mapping):
            return recipe
        stale = placement.get("name") == "async" and placement.get("staleness", STALENESS) != 0
        correction = algorithm.get("correction", {})
        if algorithm.get("name") in METHODS and METHODS[algorithm["name"]].loss.pairs:
            return recipe  # a preference holds whoever wrote the pair
        if not stale or not isinstance(correction, Mapping) or "mode" in correction:
            return recipe
        return {**recipe, "algorithm": {**algorithm, "correction": {**correction, "mode": "truncate"}}}

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        train, algorithm, sampling = self.train, self.algorithm, self.sampling
        n = train.samples_per_prompt
        if self.model.path is None:
            raise ValueError("RL starts from a policy that can already answer sometimes: give model.path")
        if algorithm.grouped and n < 2:
            raise ValueError(
                f"samples_per_prompt = {n}, and {algorithm.name} compares a response with the others to its prompt: "
                "r - mean(r) = 0 in a group of one. Set train.samples_per_prompt to 2 or more"
            )
        if algorithm.dynamic is not None and n < 2:
            raise ValueError(f"algorithm.dynamic keeps groups whose rewards differ, and samples_per_prompt = {n}")
        if (train.prompts_per_step * n) % train.minibatches:
            raise ValueError(
                f"prompts_per_step × samples_per_prompt = {train.prompts_per_step} × {n} = "
                f"{train.prompts_per_step * n} responses do not divide into {train.minibatches} minibatches of one size"
            )
        if sampling.max_tokens < 1:
            raise ValueError(f"sampling.max_tokens = {sampling.max_tokens}: a response needs at least one token")
        if sampling.temperature == 0:
            raise ValueError("sampling.temperature = 0 gives the same response every time: there is nothing to compare")
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
                f"shaping.overlong.buffer = {overlong.buffer} is more than sampling.max_tokens = {sampling.max_tokens}"
            )
        if (self.critic is not None) != algorithm.needs_critic:
            if self.critic is not None:
                raise ValueError(f'{algorithm.name} uses no critic: leave [critic] out, or set name = "ppo"')
            estimator = algorithm.advantage.estimator
            raise ValueError(f'advantage.estimator = "{estimator}" needs a [critic] table; an empty one will do')
        if self.resources.ranks > 1:
            if self.critic is not None and self.critic.url is not None:
                raise ValueError(
                    f"critic.url trains on one rank, and resources name {self.resources.ranks}: a critic server takes "
                    "the updates of one process; leave url out, and the critic is shared out as the policy is"
                )
            if self.reward.url is not None and self.resources.timeout <= self.reward.patience:
                raise ValueError(
                    f"resources.timeout = {self.resources.timeout:g} s is not more than reward.patience = "
                    f"{self.reward.patience:g} s: the other ranks would give up before the one that waits for rewards"
                )
        self._can_be_taught()
        self._can_be_placed()
        self._can_replay_routing()
        self._can_be_played()
        if algorithm.bootstrap and algorithm.mask_truncated and algorithm.needs_critic:
            raise ValueError("mask_truncated leaves out what bootstrap values: set one of them to false")
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
                f"{self.algorithm.name} compares the branches of a tree of responses, and there is none: give "
                "sampling.branch, such as [2, 2, 2] for 8 responses, or [search]; sampling.step is what ends a step"
            )
        if branch and (self.agent is not None or self.environment is not None):
            raise ValueError("sampling.branch is for single responses: leave it out, or [agent] and [environment]")

    def _can_be_searched(self) -> None:
        reasons = {
            "sampling.branch makes trees without one": bool(self.sampling.branch),
            "[agent] or [environment] plays turns": (self.agent or self.environment) is not None,
            f"resources name {self.resources.ranks} ranks, not one": self.resources.ranks > 1,
            "train.routing_replay is for responses that are made in one go": self.train.routing_replay,
        }
        if conflicts := [why for why, applies in reasons.items() if applies]:
            raise ValueError(f"[search] makes trees of responses by a process model, and {conflicts[0]}: leave one out")
        self.sampling.check_step()

    def _can_be_taught(self) -> None:
        for name, teacher in self.algorithm.teachers.items():
            if teacher.url is None:
                continue
            if self.sampling.temperature != 1:
                raise ValueError(
                    f"sampling.temperature = {self.sampling.temperature:g}, and the server of algorithm.teachers."
                    f"{name} gives log-probs at 1: set it to 1, or give the teacher's path"
                )
            if self.resources.ranks > 1:
                raise ValueError(
                    f"algorithm.teachers.{name}.url is asked by one rank, and resources name {self.resources.ranks}: "
                    "give the teacher's path, and it is shared out as the policy is"
                )

    def _can_be_played(self) -> None:
        if self.agent is None:
            return
        if self.environment is not None:
            raise ValueError("[agent] plays whole responses, and [environment] answers between turns: leave one out")
        if self.resources.ranks > 1:
            raise ValueError(
                f"[agent] plays on one rank, and resources name {self.resources.ranks}: leave one of them out"
            )

    def scored_here(self) -> list[RewardTable | Mapping[str, Any]]:
        """The rewards of this process: those that are learned from, and the truth."""
        return [table for of in (self.reward, self.truth) if of is not None for table in of.tables().values()]

    @property
    def rollout_processes(self) -> int:
        """How many processes generate beside those that train."""
        if self.resources.rollout.processes is not None:
            return self.resources.rollout.processes
        return int(self.placement.name in ("disaggregated", "async"))

    @property
    def engine_parts(self) -> bool:
        """Whether the ranks that train are those of engines too, each with its part of one."""
        return self.resources.rollout.ranks > 1 and self.rollout_processes == 0

    def _can_be_served(self) -> None:
        """By an engine of another project."""
        engine, placement = self.engine, self.placement
        if engine.name == "core":
            return
        if placement.name not in ("disaggregated", "async"):
            raise ValueError(
                f'engine.name = "{engine.name}" is a server of its own, and placement.name = "{placement.name}" '
                'generates on the learner\'s tensors: set name = "disaggregated" or "async"'
            )
        if engine.name == "sglang" and placement.channel not in (None, "disk"):
            raise ValueError(f'SGLang takes weights by disk: set placement.channel = "disk", not "{placement.channel}"')
        for of, sampling in (("sampling", self.sampling), ("sampling.eval", self.sampling.evaluating())):
            if engine.name == "sglang" and (sampling.top_p != 1 or sampling.top_k):
                raise ValueError(
                    f"SGLang gives log-probs from before {of}.top_p = {sampling.top_p:g} and top_k = "
                    f"{sampling.top_k} act: leave them out, or take another engine"
                )

    def _can_be_placed(self) -> None:
        self._can_be_served()
        placement, rollout = self.placement, self.resources.rollout
        name, count = placement.name, self.rollout_processes
        if name in ("disaggregated", "async") and count == 0:
            raise ValueError(
                f'placement.name = "{name}" generates in processes of their own, and resources.rollout.processes = 0: '
                'set 1 or more, or name = "colocated"'
            )
        if name not in ("disaggregated", "async", "hybrid") and count:
            raise ValueError(
                f'placement.name = "{name}" generates in the learner\'s process, and resources.rollout.processes = '
                f'{count}: leave it out, or set name = "disaggregated"'
            )
        if rollout.prefill and (
            rollout.prefill >= count or name not in ("disaggregated", "async") or self.engine.name != "core"
        ):
            raise ValueError(
                f"resources.rollout.prefill = {rollout.prefill} of {count} process(es) read prompts, and others must "
                'go on: set fewer, in placement.name = "disaggregated" or "async" with the core\'s own engines'
            )
        if rollout.devices is not None and len(rollout.devices) != count * rollout.ranks:
            each = "" if rollout.ranks == 1 else f" of {rollout.ranks} ranks"
            raise ValueError(
                f"resources.rollout.devices names {len(rollout.devices)} device(s) for {count} process(es){each}: one "
                "each"
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
                "placement.delta sends what has changed of all weights to engines of the core: set "
                'placement.channel = "disk" or "collective" and placement.name = "disaggregated" or "async", without '
                "model.lora; or leave delta out"
            )
        if placement.channel == "reshard" and self.engine.name != "core":
            raise ValueError(
                f'placement.channel = "reshard" sends each engine rank its shard, which engine.name = '
                f'"{self.engine.name}" cannot receive: set placement.channel = "collective", or leave out engine.name'
            )
        if name == "hybrid" and placement.channel not in (None, "shared"):
            raise ValueError(
                f'placement.channel = "{placement.channel}" copies weights, and in placement.name = "hybrid" they are '
                'shared: leave it out, or set name = "disaggregated"'
            )

    def _can_replay_routing(self) -> None:
        if not self.train.routing_replay:
            return
        engine, rollout = self.engine.name, self.resources.rollout
        reasons = {
            f'of engine.name = "{engine}" no experts are read: take the core\'s engine': engine != "core",
            f"resources name {self.resources.ranks} ranks to train on: set one": self.resources.ranks > 1,
            f"rank 0 of an engine of {rollout.pipeline_parallel} stages has the routers of its own layers alone: set "
            "resources.rollout.pipeline_parallel = 1": rollout.pipeline_parallel > 1,
            "resources.rollout.prefill hands KV over without them: set 0": rollout.prefill > 0,
        }
        for why, true in reasons.items():
            if true:
                raise ValueError(f"train.routing_replay takes the experts that engines record, and {why}, or drop it")

    def _can_have_ranks(self) -> None:
        """Engines of several ranks."""
        rollout, ranks, name = self.resources.rollout, self.resources.ranks, self.placement.name
        if rollout.ranks == 1:
            return
        named = (
            f"resources.rollout.tensor_parallel = {rollout.tensor_parallel} × pipeline_parallel = "
            f"{rollout.pipeline_parallel} is an engine of {rollout.ranks} ranks"
        )
        left = ranks % rollout.ranks
        reasons = {
            'in placement.name = "hybrid" a process of its own maps the learner\'s tensors: leave '
            "resources.rollout.processes out": name == "hybrid" and self.rollout_processes > 0,
            f"the ranks that train, resources.{' = '.join(self.resources.product)} = {ranks}, are no whole number of "
            f"engines: {ranks} / {rollout.ranks} = {ranks / rollout.ranks:g}": self.engine_parts and left > 0,
            f'engine.name = "{self.engine.name}" has options of its own for that: leave it out here':
                self.engine.name != "core",
            "resources.rollout.prefill hands over KV, of which each rank has a part: drop one": rollout.prefill > 0,
            "resources.ray starts engines of one: leave one of them out": self.resources.ray is not None,
        }  # fmt: skip
        for why, true in reasons.items():
            if true:
                raise ValueError(f"{named}, and {why}")

    def _can_be_on_ray(self) -> None:
        resources = self.resources
        pool = resources.reward.processes
        if resources.ray is None:
            if pool:
                raise ValueError(
                    f'resources.reward.processes = {pool} are Ray actors: set resources.ray = "local", or leave it out'
                )
            return
        if pool and self.reward.url is not None:
            raise ValueError(
                f"resources.reward.processes = {pool}, and reward.url names a server, which scores: leave one out"
            )
        if self.placement.name == "hybrid" and self.rollout_processes:
            raise ValueError(
                f"resources.rollout.processes = {self.rollout_processes} would map the learner's memory "
                f'(placement.name = "hybrid"), and on Ray each process has its own: leave it out, or set name = '
                '"disaggregated"'
            )
        for key, gpus in (
            ("cores", resources.cores), ("rollout.cores", resources.rollout.cores),
            ("rollout.devices", resources.rollout.devices),
        ):  # fmt: skip
            if gpus is not None:
                raise ValueError(
                    f'resources.{key} = {list(gpus)} is of this machine, and resources.ray = "{resources.ray}" gives '
                    "each process its own: leave one of them out"
                )

    def _fits_the_data(self, reward: RewardTable | Mapping[str, Any]) -> None:
        rule = reward.rule if isinstance(reward, RuleTable) else None
        gyms = [part.gym is not None for part in self.data.parts()]
        if any(gyms) and rule in ("exact", "math"):
            raise ValueError(f'a gym task checks its own answers: set rule = "gym" in place of rule = "{rule}"')
        if not all(gyms) and rule == "gym":
            raise ValueError('rule = "gym" asks the task that set the prompt: give data.gym, or take another rule')
