"""The work of one step of an RLHF run, independent of hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plaudit.algo.methods import METHODS
from plaudit.errors import ConfigError, nearest
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import DTYPE_BYTES
from plaudit.plan.shape.lengths import Lengths
from plaudit.plan.shape.model_shape import ModelShape

GROUP = 8
"""Default responses per prompt for algorithms that compare them: GRPO learns nothing from one."""


@dataclass(frozen=True, slots=True)
class Workload:
    model: ModelShape
    algorithm: str = "grpo"
    prompt: float = 512
    response: float = 1024
    """Mean tokens of a response."""
    max_response: float = 0
    """0 = twice the mean"""
    batch: int = 1024
    """Responses in a step."""
    samples_per_prompt: int = 0
    """0 = eight if the algorithm compares the responses to a prompt, otherwise one"""
    updates: int = 1
    """Optimizer steps in a step of the run, epochs × minibatches."""
    epochs: int = 1
    reference: bool | None = None
    """None = the algorithm's default."""
    critic: ModelShape | None = None
    """For PPO, None = a critic of the policy's size."""
    reward: ModelShape | None = None
    """None = a rule, which needs no accelerator."""
    dtype: str = "bf16"
    generation_dtype: str = ""
    """Empty = as trained."""
    kv_dtype: str = "bf16"
    steps: int = 1000
    lora_rank: int = 0
    """Rank of LoRA adapters on a frozen policy; 0 = all weights are trained."""
    lora_targets: tuple[str, ...] = ()
    """Name suffixes of the layers with adapters; empty = every linear layer but the head."""
    plain: bool = False
    """Trained with plain modules, as in Plaudit's own trainer; see TrainingLayout."""
    micro_tokens: int = 0
    """Tokens of a micro-batch; 0 = 4096, or the longest sequence if that is longer."""
    cache_bytes: float = 0
    """Configured cache size of an engine, which it allocates in full; 0 = free memory, as far as needed."""
    process: ModelShape | None = None
    """The process reward model of rollouts by search, beside the policy."""
    process_cache_bytes: float = 0
    """Configured cache size of its engine; 0 = what the paths of a step need."""

    def __post_init__(self) -> None:
        if self.algorithm not in METHODS:
            raise ConfigError(f"unknown algorithm {self.algorithm!r}; {nearest(self.algorithm, METHODS)}")
        for name in ("batch", "updates", "epochs", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: expected one or more")
        if self.lora_rank < 0:
            raise ConfigError(f"lora rank = {self.lora_rank}: expected one or more, or zero for none")
        if self.lora_rank and not self.adapter_parameters:
            raise ConfigError(f"lora targets {', '.join(self.lora_targets)}: {self.model.name} has no such layer")
        if self.samples_per_prompt < 0:
            raise ConfigError(f"samples = {self.samples_per_prompt}: expected one or more responses to each prompt")
        if self.batch < self.samples_per_prompt:
            raise ConfigError(
                f"batch = {self.batch} responses is less than the {self.samples_per_prompt} samples of one prompt; "
                f"--batch counts responses: set it to {self.samples_per_prompt} or more"
            )
        for name in ("prompt", "response", "max_response"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} = {getattr(self, name)} tokens: expected a number")
        if self.prompt < 0 or self.response < 1 or self.max_response < 0:
            raise ConfigError(
                f"prompt = {self.prompt:g}, response = {self.response:g}, max_response = {self.max_response:g} tokens: "
                "expected 0, 1 and 0 (twice the mean) or more"
            )
        if self.max_response and self.max_response < self.response:
            raise ConfigError(
                f"max_response = {self.max_response:g} is less than the mean response {self.response:g}; "
                f"raise it to at least {self.response:g}"
            )
        for name, value in (
            ("dtype", self.dtype),
            ("kv_dtype", self.kv_dtype),
            ("generation_dtype", self.engine_dtype),
        ):
            if value not in DTYPE_BYTES:
                raise ConfigError(f"{name} = {value!r}; {nearest(value, DTYPE_BYTES)}")
        longest = self.prompt + self.longest
        if self.model.max_context and longest > self.model.max_context:
            left = self.model.max_context - self.prompt
            cure = f"set --max-response to {left:g}" if left >= self.response else f"--response may be {max(left, 0):g}"
            raise ConfigError(
                f"prompt + longest response = {self.prompt:g} + {self.longest:g} = {longest:g} tokens, and "
                f"{self.model.name} has positions for {self.model.max_context}; {cure}"
            )

    @property
    def group(self) -> int:
        """Responses per prompt; they share its prefill."""
        usual = GROUP if METHODS[self.algorithm].advantage.grouped else 1
        return self.samples_per_prompt or min(usual, self.batch)

    @property
    def longest(self) -> float:
        return self.max_response or 2 * self.response

    @property
    def length(self) -> float:
        return self.prompt + self.response

    @property
    def trained_length(self) -> float:
        """Tokens computed in training per response with its prompt: with a single update, Plaudit packs the responses
        to a prompt as a tree, so the prompt is computed once."""
        shared = self.group if self.plain and self.updates == 1 else 1
        return self.prompt / shared + self.response

    @property
    def takes_old(self) -> bool:
        """Whether old log-probabilities are computed before the update. Plaudit's single update needs none: its ratio
        is 1."""
        return not self.plain or self.updates > 1 or self.value_model is not None

    @property
    def has_reference(self) -> bool:
        kl = METHODS[self.algorithm].preset.get("kl", {})
        return kl.get("coef", 0.0) > 0 if self.reference is None else self.reference

    @property
    def value_model(self) -> ModelShape | None:
        learns_values = METHODS[self.algorithm].advantage.critic
        return (self.critic or self.model) if learns_values else None

    @property
    def adapter_parameters(self) -> int:
        return self.model.adapter_parameters(self.lora_rank, self.lora_targets)

    @property
    def trained_share(self) -> float:
        """Share of the policy's parameters that are trained."""
        return self.adapter_parameters / self.model.parameters if self.lora_rank else 1.0

    @property
    def engine_dtype(self) -> str:
        return self.generation_dtype or self.dtype

    def lengths(self, constants: Constants) -> Lengths:
        return Lengths(self.response, max(self.longest, self.response), constants.length_spread)

    @property
    def generated_tokens(self) -> float:
        return self.batch * self.response
