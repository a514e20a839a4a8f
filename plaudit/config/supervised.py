"""The tables that recipes have in common, and the recipes of learning from examples: SFT, preferences, reward and
process models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, NonNegativeInt, PositiveInt, Tag, model_validator

from plaudit.algo.preference import PREFERENCE_METHODS
from plaudit.algo.preference.method import PreferenceMethod
from plaudit.config.placement import RanksTable
from plaudit.config.table import NonNegative, Positive, Share, Table
from plaudit.config.world import World


class NewModel(Table):
    """A Llama-shaped model trained from nothing."""

    hidden: PositiveInt = 64
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    ffn: PositiveInt = 192
    positions: PositiveInt = 256
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden ({self.hidden}) must be a multiple of heads ({self.heads}), "
                f"and heads of kv_heads ({self.kv_heads})"
            )
        return self


class ModelTable(Table):
    path: str | None = None
    """A model directory, a run directory, or the name of an embedded model."""
    new: NewModel | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    """auto takes the GPU if there is one."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.new is None):
            raise ValueError("give either model.path or a [model.new] table, and not both")
        return self


class LoraTable(Table):
    """Train small matrices beside the weights (extra `lora`). The reference is the model without them."""

    rank: PositiveInt = 16
    alpha: Positive = 32.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of layers, or all but the output head; of a mixture of experts the latter are those of its attention."""


class PolicyModelTable(ModelTable):
    lora: LoraTable | None = None
    recompute: bool = False
    """Keep a layer's input alone in the forward pass and compute the rest again in the backward: less memory."""

    @model_validator(mode="after")
    def _has_a_base(self) -> Self:
        if self.lora is not None and self.path is None:
            raise ValueError("model.lora trains beside given weights: give model.path in place of [model.new]")
        return self


class SumsTable(Table):
    """The sums world: how hard its chains are and how its demonstrations go wrong."""

    operands: tuple[PositiveInt, PositiveInt] = (3, 5)
    """Fewest and most numbers in a chain."""
    digits: PositiveInt = 1
    hard_share: Share = 0.0
    """Part of the training problems that come from the long chains of sums-hard."""
    slip: Share = 0.05
    """Chance that a step's result is off."""
    habit: Share = 0.8
    """Chance that the demonstrator drops the carry where he is used to (adding 7)."""
    ramble: Share = 0.1
    """Chance of a true but needless step before each step."""
    near: Share = 0.0
    """Part of a judge's training items that are near misses: one result, or the answer, off by one."""
    near_from: NonNegativeInt = 0
    """The item from which on near misses come: a judge learns the coarse check first and the exact one from there."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        low, high = self.operands
        if not 2 <= low <= high:
            raise ValueError(f"operands must be [fewest, most] with 2 <= fewest <= most, got [{low}, {high}]")
        return self


class DataTable(Table):
    world: World | None = None
    path: str | None = None
    """A .jsonl or .parquet file."""
    eval_path: str | None = None
    """Held-out items; without it the last tenth of `path` (at most eval_items) is held out."""
    limit: PositiveInt | None = None
    eval_items: PositiveInt = 500
    sums: SumsTable = SumsTable()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.world is None) == (self.path is None):
            raise ValueError('give either data.world (such as "sums") or data.path, and not both')
        return self

    def without_meaning(self) -> set[str]:
        return {"sums"} if self.world is None else set()


class PreferenceData(DataTable):
    problems: PositiveInt = 1000
    """Of a world: how many problems the policy is asked for responses to learn from."""
    samples: Annotated[int, Field(ge=2)] = 8
    """Of a world: responses to each problem, drawn from the policy at temperature 1. Right ones over wrong ones."""
    pairs: PositiveInt = 4
    """Of a world: most pairs of one problem."""

    def without_meaning(self) -> set[str]:
        return {"sums", "problems", "samples", "pairs"} if self.world is None else set()


class CheckpointTable(Table):
    every: PositiveInt = 200
    keep: PositiveInt = 2


class TrainTable(Table):
    """How the weights move, whatever the loss is."""

    steps: PositiveInt
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens in one forward pass. Moves memory and time, never the gradient."""
    lr: Positive
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    final_lr_share: Share = 0.05
    warmup: Annotated[int, Field(ge=0)] = 20
    weight_decay: NonNegative = 0.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_norm: Positive = 1.0
    deterministic: bool = True
    """On a GPU: gradients with the same bits each time. false lets torch add up in any order."""
    offload_optimizer: bool = False
    """Adam's moments and the float32 weights wait in host memory and pass through the GPU piece by piece in each step:
    12 bytes a weight less there. The same bits. Over several ranks each keeps those of its shards."""
    threads: PositiveInt | None = None
    """CPU threads; torch's own choice without it. Supervised training of a model narrower than 192 in float32 gives
    each thread a part of the batch; other small models train no faster with more than one."""
    eval_every: PositiveInt = 200
    checkpoint: CheckpointTable = CheckpointTable()


class SupervisedTrain(TrainTable):
    batch: PositiveInt
    """Items per step: demonstrations, pairs or judged solutions."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: steps of weight matrices are made orthogonal, at rates like AdamW's; the rest is stepped by AdamW."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer == "muon" and self.offload_optimizer:
            raise ValueError('train.optimizer = "muon" needs whole matrices: set train.offload_optimizer = false')
        return self


class SftAlgorithm(Table):
    name: Literal["sft"] = "sft"


class BradleyTerry(Table):
    """Pairs: the chosen response should score higher than the rejected one."""

    name: Literal["bradley-terry"] = "bradley-terry"
    use_margins: bool = False
    """Ask for a lead of the item's own `margin`."""
    centring: NonNegative = 0.01
    """Weight of the penalty (chosen + rejected)², which keeps scores around zero."""


class Regression(Table):
    """Rated responses: each attribute's score should equal its rating."""

    name: Literal["regression"] = "regression"
    attributes: tuple[str, ...] = ("score",)


class StepsAlgorithm(Table):
    """Per-step targets, read at the token that ends each step."""

    name: Literal["steps"] = "steps"
    split: Annotated[str, Field(min_length=1)] | None = None
    """The text that ends a step, saved with the model: whole responses are then split as in its training. Without it
    that of the world, or a blank line."""


class PreferenceAlgorithm(Table):
    name: str = "dpo"
    beta: Positive
    """How much a lead counts; how near to the reference the policy stays where there is one."""
    gamma: NonNegative | None = None
    """SimPO: the lead that is asked of the chosen response."""
    desirable: NonNegative | None = None
    """KTO: what a response with label true counts."""
    undesirable: NonNegative | None = None
    prompt_loss: bool | None = None
    """ORPO: whether the SFT term is over the prompt too."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        name = table.get("name", "dpo")
        if not isinstance(name, str) or name not in PREFERENCE_METHODS:
            raise ValueError(f"name = {name!r} is no preference method; there are {', '.join(PREFERENCE_METHODS)}")
        preset = PREFERENCE_METHODS[name].preset
        for key in cls.model_fields.keys() & table.keys() - {"name", *preset}:
            raise ValueError(f"{key} is no key of {name}, which has {', '.join(preset)}: leave it out")
        return {**preset, **table}

    @property
    def method(self) -> PreferenceMethod:
        return PREFERENCE_METHODS[self.name]


class BaseRecipe(Table):
    seed: Annotated[int, Field(ge=0)] = 1
    model: ModelTable
    train: TrainTable


class SupervisedRecipe(BaseRecipe):
    data: DataTable
    train: SupervisedTrain
    resources: RanksTable = RanksTable()

    @model_validator(mode="after")
    def _can_be_shared(self) -> Self:
        if self.resources.ranks > 1 and self.train.optimizer == "muon":
            raise ValueError(
                f'train.optimizer = "muon" needs whole matrices, and resources name {self.resources.ranks} ranks, '
                'which have parts of them: set optimizer = "adamw"'
            )
        return self


class SftRecipe(SupervisedRecipe):
    task: Literal["sft"]
    model: PolicyModelTable
    algorithm: SftAlgorithm = SftAlgorithm()


def algorithm_by_name(table: Any) -> str | None:
    """Which reward algorithm a table means: the first one unless it says otherwise."""
    if isinstance(table, Mapping):
        return str(table.get("name", "bradley-terry"))
    return getattr(table, "name", None)


class RewardRecipe(SupervisedRecipe):
    task: Literal["reward"]
    algorithm: Annotated[
        Annotated[BradleyTerry, Tag("bradley-terry")] | Annotated[Regression, Tag("regression")],
        Discriminator(algorithm_by_name),
    ] = BradleyTerry()


class PrmRecipe(SupervisedRecipe):
    task: Literal["prm"]
    algorithm: StepsAlgorithm = StepsAlgorithm()


class PreferenceRecipe(SupervisedRecipe):
    task: Literal["preference"]
    model: PolicyModelTable
    data: PreferenceData
    algorithm: PreferenceAlgorithm = PreferenceAlgorithm.model_validate({})

    @model_validator(mode="after")
    def _answers_already(self) -> Self:
        if self.model.path is None:
            raise ValueError("model.new has no responses to prefer among: give model.path, a policy after SFT")
        return self
