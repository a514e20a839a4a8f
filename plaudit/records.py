"""Records shared by all packages: frozen, slotted, free of torch, sent between processes and over HTTP as is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]
NEXT = -1  # among the tokens whose log-probs are read: the token that follows
Likely = tuple[tuple[int, float], ...]  # token ids and their log-probs, the best first
Z_95 = 1.96  # standard errors on either side of a mean: its 95 % interval


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for a policy. `truth` is what the task's rule needs to check an answer, `truth_key` its column in a
    data file, and `extra` has the other columns, and the messages of a conversation."""

    text: str
    token_ids: tuple[int, ...] | None = None
    truth: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    truth_key: str = "truth"

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of its row besides the prompt, by name."""
        others = {name: value for name, value in self.extra.items() if name != "messages"}
        return others if self.truth is None else {self.truth_key: self.truth, **others}


@dataclass(frozen=True, slots=True)
class ItemError:
    """The error of one item. A failed item is never a number."""

    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Item:
    """One response to score, in one of four forms: prompt and response, messages, text, tokens.

    prompt    text, or the messages of a conversation so far
    response  text, or a tuple of texts: its steps, already split
    messages  a conversation that ends with the assistant's answer
    text      rendered by the caller: strings of control tokens in it are control tokens
    tokens    token ids, used as they are
    truth     what a rule needs to check the response
    truncate  the side to truncate if the item is too long; without it too long is an error
    cut       the response reached its token limit, so that nothing ends it; not for text and tokens
    columns   of the data row of the prompt, for rules that read them; not sent to servers
    group     consecutive items with the same number are responses to one prompt, for rules that score them together
    """

    prompt: str | tuple[Mapping[str, Any], ...] | None = None
    response: str | tuple[str, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    truth: Any = None
    truncate: Literal["left", "right"] | None = None
    cut: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)
    group: int | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) != (self.response is None):
            raise ValueError("an Item with a prompt needs a response, and one with a response needs a prompt")
        given = (self.prompt is not None, self.messages is not None, self.text is not None, self.tokens is not None)
        if sum(given) != 1:
            forms = list(compress(("prompt", "messages", "text", "tokens"), given))
            raise ValueError(f"an Item has one of prompt + response, messages, text and tokens; this has {forms}")
        if self.cut and (self.text is not None or self.tokens is not None):
            form = "text" if self.tokens is None else "tokens"
            raise ValueError(f"an Item with {form} is read as it is; cut is for prompt + response and messages")


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of a policy, token by token as sampled; nothing is ever re-tokenised.

    logprobs           under the sampling distribution (temperature, top-p, ... applied)
    raw_logprobs       under the model's own distribution (temperature 1, nothing applied)
    versions           the weight version that produced each token
    mask               1 = the policy's token, 0 = a tool's or the environment's
    tempered_logprobs  if more than a temperature was applied: under the full softmax at that temperature
    top_logprobs       if requested: the likeliest tokens at each position, best first, under the model's own
    prompt_logprobs, prompt_top_logprobs   like raw_logprobs and top_logprobs, for the prompt after its first token
    experts            for a mixture of experts, if recorded (core/routing.py): of each computed token, router by router
    stop               the stop string that ended it, or ""
    prompt_ranks       with prompt_logprobs: the rank of each of these tokens in the vocabulary, 1 for the likeliest
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    mask: tuple[int, ...]
    finish_reason: FinishReason
    group: int = 0
    index: int = 0
    reward: float | None = None
    error: ItemError | None = None
    token_rewards: tuple[float, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    tempered_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Likely, ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    prompt_top_logprobs: tuple[Likely, ...] | None = None
    experts: bytes | None = None
    stop: str = ""
    prompt_ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        tokens, rewards, tempered = len(self.token_ids), self.token_rewards, self.tempered_logprobs
        if len(self.logprobs) == len(self.raw_logprobs) == len(self.versions) == len(self.mask) == tokens and (
            (rewards is None or len(rewards) == tokens) and (tempered is None or len(tempered) == tokens)
        ):
            return
        names = ("token_ids", "logprobs", "raw_logprobs", "versions", "mask", "token_rewards", "tempered_logprobs")
        counts = {name: len(values) for name in names if (values := getattr(self, name)) is not None}
        raise ValueError(f"a Sample needs one entry per token in every list, got {counts}")

    @property
    def turn_rewards(self) -> float:
        """What an environment gave for single turns."""
        return sum(self.token_rewards or (), 0.0)

    @property
    def total_reward(self) -> float | None:
        """What the policy is trained on: the reward of the response and those of its turns; None without a reward."""
        return None if self.reward is None else self.reward + self.turn_rewards

    @property
    def behaviour(self) -> tuple[float, ...]:
        """The log-probs that a learner recomputes: under the full softmax at the sampling temperature."""
        return self.logprobs if self.tempered_logprobs is None else self.tempered_logprobs


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's reply to the policy.

    observation  text that the policy reads before it continues
    reward       for this turn, in addition to that of the whole response
    done         the response is finished; the observation is not used
    role         of the observation's message, if the prompt is a conversation
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    role: Literal["user", "tool"] = "user"


@dataclass(frozen=True, slots=True)
class Score:
    """An outcome reward: a finite `value`, or an `error`."""

    value: float | None = None
    error: ItemError | None = None
    attributes: Mapping[str, float] = field(default_factory=dict)
    version: str = ""
    truncated: bool = False
    tokens: int = 0

    def __post_init__(self) -> None:
        if (self.value is None) == (self.error is None):
            raise ValueError("a Score has either a value or an error")


@dataclass(frozen=True, slots=True)
class StepScores:
    """Process rewards: one value per step and their aggregate, or an `error`."""

    values: tuple[float, ...] = ()
    aggregate: float | None = None
    error: ItemError | None = None
    version: str = ""
    truncated: bool = False
    tokens: int = 0

    def __post_init__(self) -> None:
        if (self.aggregate is None) == (self.error is None):
            raise ValueError("StepScores have either an aggregate or an error")


@dataclass(frozen=True, slots=True)
class Batch:
    """Scored samples of whole groups, in a fixed order."""

    samples: tuple[Sample, ...]
    version: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The samples drawn for it, if more than it contains."""

    def groups(self) -> dict[int, list[Sample]]:
        by_group: dict[int, list[Sample]] = {}
        for sample in self.samples:
            by_group.setdefault(sample.group, []).append(sample)
        return by_group
