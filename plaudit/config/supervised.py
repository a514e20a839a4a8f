"""Tables shared by all recipes, and the recipes of supervised training: SFT, preferences, reward and process models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, NonNegativeInt, PositiveInt, Tag, model_validator

from plaudit.algo.preference import PREFERENCE_METHODS
from plaudit.algo.preference.method import PreferenceMethod
from plaudit.config.placement import RanksTable
from plaudit.config.table import NonNegative, Positive, Share, Table
from plaudit.config.world import World


class NewModel(Table):
    """A randomly initialised Llama-shaped model."""

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
    """auto: the GPU if there is one."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.new is None):
            raise ValueError("give either model.path or a [model.new] table, and not both")
        return self


EXPERT_LAYERS = frozenset({"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"})
"""Names of an expert's layers, which dense layers and shared experts have too."""


def names_experts(targets: Sequence[str]) -> bool:
    """Whether LoRA targets include layer names that experts have; "all-linear" does not mean experts."""
    named = () if targets == "all-linear" else targets
    return any(name.rpartition(".")[2] in {*EXPERT_LAYERS, "gate_up_proj", "experts"} for name in named)


class LoraTable(Table):
    """LoRA adapters (extra `lora`). The reference is the model without them."""

    rank: PositiveInt = 16
    alpha: Positive = 32.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of linear layers, or all but the output head; for a mixture of experts all-linear is its attention's."""


class PolicyModelTable(ModelTable):
    lora: LoraTable | None = None
    recompute: bool = False
    """Activation checkpointing: keep only each layer's input and recompute the rest in the backward pass."""

    @model_validator(mode="after")
    def _has_a_base(self) -> Self:
        if self.lora is not None and self.path is None:
            raise ValueError("model.lora trains adapters of existing weights: set model.path instead of [model.new]")
        return self


class SumsTable(Table):
    """The sums world: difficulty of its problems and error rates of its demonstrations."""

    operands: tuple[PositiveInt, PositiveInt] = (3, 5)
    """Fewest and most numbers in a chain."""
    digits: PositiveInt = 1
    hard_share: Share = 0.0
    """Fraction of training problems taken from the long chains of sums-hard."""
    slip: Share = 0.05
    """Probability that a step's result is wrong."""
    habit: Share = 0.8
    """Probability that a demonstration drops the carry in its systematic error (adding 7)."""
    ramble: Share = 0.1
    """Probability of a correct but unnecessary step before each step."""
    near: Share = 0.0
    """Reward model training: fraction of items that are near misses, with one result or the answer off by one."""
    near_from: NonNegativeInt = 0
    """Index of the first item that may be a near miss: the model learns the coarse check first, then the exact one."""

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
    """Held-out items. Default: the last tenth of `path` (at most eval_items)."""
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
    """world: number of problems that the policy samples responses to."""
    samples: Annotated[int, Field(ge=2)] = 8
    """world: responses per problem, sampled from the policy at temperature 1. Correct ones are preferred to wrong
    ones."""
    pairs: PositiveInt = 4
    """world: maximum pairs per problem."""

    def without_meaning(self) -> set[str]:
        return {"sums", "problems", "samples", "pairs"} if self.world is None else set()


class CheckpointTable(Table):
    every: PositiveInt = 200
    keep: PositiveInt = 2


class TrainTable(Table):
    """Optimisation settings of every kind of training."""

    steps: PositiveInt
    micro_batch_tokens: PositiveInt = 8192
    """Maximum tokens in one forward pass. Affects memory and time, never the gradient."""
    lr: Positive
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    final_lr_share: Share = 0.05
    warmup: Annotated[int, Field(ge=0)] = 20
    weight_decay: NonNegative = 0.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_norm: Positive = 1.0
    deterministic: bool = True
    """GPU: bit-identical gradients in every run. false lets torch sum in any order."""
    offload_optimizer: bool = False
    """Keep Adam's moments and the float32 weights in host memory and stream them through the GPU in each step: saves 12
    bytes per weight there. Results are bit-identical. Over several ranks each rank keeps those of its shards."""
    threads: PositiveInt | None = None
    """CPU threads. Default: torch's. Supervised training of a float32 model with hidden size below 192 gives each
    thread a part of the batch; other small models train no faster with more than one."""
    eval_every: PositiveInt = 200
    checkpoint: CheckpointTable = CheckpointTable()


class SupervisedTrain(TrainTable):
    batch: PositiveInt
    """Items per step: demonstrations, pairs or labelled solutions."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised updates for weight matrices, at learning rates like AdamW's; AdamW for the rest."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer == "muon" and self.offload_optimizer:
            raise ValueError(
                'train.optimizer = "muon" needs whole matrices on the device: set train.offload_optimizer = false'
            )
        return self


class SftAlgorithm(Table):
    name: Literal["sft"] = "sft"


class BradleyTerry(Table):
    """Pairs: the chosen response should score higher than the rejected one."""

    name: Literal["bradley-terry"] = "bradley-terry"
    use_margins: bool = False
    """Require the score difference to exceed the item's `margin`."""
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
    """The text that ends a step, saved with the model so that whole responses are split as in training. Default: that
    of the world, or a blank line."""


class PreferenceAlgorithm(Table):
    name: str = "dpo"
    beta: Positive
    """Scale of the preference margin; with a reference, how close the policy stays to it."""
    gamma: NonNegative | None = None
    """SimPO: target margin of the chosen response."""
    desirable: NonNegative | None = None
    """KTO: weight of a response with label true."""
    undesirable: NonNegative | None = None
    prompt_loss: bool | None = None
    """ORPO: whether the SFT term includes the prompt."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        name = table.get("name", "dpo")
        if not isinstance(name, str) or name not in PREFERENCE_METHODS:
            raise ValueError(
                f"name = {name!r}: unknown preference method; expected one of {', '.join(PREFERENCE_METHODS)}"
            )
        preset = PREFERENCE_METHODS[name].preset
        for key in cls.model_fields.keys() & table.keys() - {"name", *preset}:
            raise ValueError(f"{key} does not apply to {name}, whose keys are {', '.join(preset)}: remove it")
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
                f'train.optimizer = "muon" needs whole matrices, and resources set {self.resources.ranks} ranks, '
                'which have shards of them: set optimizer = "adamw"'
            )
        return self


class SftRecipe(SupervisedRecipe):
    task: Literal["sft"]
    model: PolicyModelTable
    algorithm: SftAlgorithm = SftAlgorithm()


def algorithm_by_name(table: Any) -> str | None:
    """Return the name of a table's reward algorithm; the default is the first one."""
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
    def _policy_exists(self) -> Self:
        if self.model.path is None:
            raise ValueError("preference training needs a policy that can generate: set model.path to one after SFT")
        return self
