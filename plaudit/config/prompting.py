"""Prompt formatting keys shared by RL and search, and RL's sampling parameters. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, PositiveInt, model_validator

from plaudit.config.table import NonNegative, Table


class AskingTable(Table):
    gym: str | None = None
    """The name of a reasoning-gym task (extra `verify`)."""
    gym_options: Mapping[str, Any] = {}
    """gym: settings of the task, such as max_value."""
    chat: bool = False
    """Put a plain prompt into the model's chat template as the user message."""
    system: str | None = None
    """With chat: the system message."""
    shots: tuple[tuple[str, str], ...] = ()
    """With chat: few-shot examples, pairs of question and answer, as earlier turns of the conversation."""

    @model_validator(mode="after")
    def _in_a_chat(self) -> Self:
        if self.system is not None and not self.chat:
            raise ValueError("system is the first message of a chat: set data.chat = true, or leave it out")
        if self.shots and not self.chat:
            raise ValueError("shots are turns of a chat: set data.chat = true, or leave them out")
        return self

    def without_meaning(self) -> set[str]:
        return {"gym_options"} if self.gym is None else set()


class EvalSamplingTable(Table):
    """Sampling parameters for held-out prompts; omitted keys are as in training."""

    temperature: NonNegative | None = None
    """0: greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    max_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _matters(self) -> Self:
        for name, off in (("top_p", 1), ("top_k", 0)):
            if self.temperature == 0 and (value := getattr(self, name)) not in (None, off):
                raise ValueError(f"temperature = 0 is greedy decoding, which ignores {name} = {value:g}: remove {name}")
        return self


class SamplingTable(Table):
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    branch: tuple[PositiveInt, ...] = ()
    """[2, 2, 2]: the responses to a prompt form a tree: two first steps, two second steps after each, two endings after
    each of these, 8 responses in total. Default: responses are sampled independently, as they always are for held-out
    prompts."""
    step: str = "\n"
    """branch and [search]: the text that ends a step."""
    eval: EvalSamplingTable | None = None

    @model_validator(mode="after")
    def _steps(self) -> Self:
        if self.branch:
            self.check_step()
        return self

    def check_step(self) -> None:
        """Raise ValueError if `step` cannot delimit steps."""
        if not self.step or any(self.step in stop for stop in self.stop):
            raise ValueError(
                f"step = {self.step!r} must delimit steps without ending the response, and it is empty or part of stop "
                f"= {self.stop}: change one of them"
            )

    @property
    def truncation(self) -> str:
        """Describe the settings that truncate the sampled distribution; "" if there are none."""
        limits = {"top_p": self.top_p if self.top_p < 1 else None, "top_k": self.top_k or None}
        return " and ".join(f"sampling.{name} = {limit:g}" for name, limit in limits.items() if limit is not None)

    def evaluating(self) -> SamplingTable:
        """Return the sampling parameters for evaluation: these, overridden by `eval`."""
        own = {} if self.eval is None else self.eval.model_dump(exclude_none=True)
        greedy = {"top_p": 1.0, "top_k": 0} if own.get("temperature") == 0 else {}  # training's are ignored
        return self.model_copy(update=own | greedy)
