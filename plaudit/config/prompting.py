"""What a model is asked, and how: keys that RL and search have in common; and how RL samples what it answers. Imports
no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, PositiveInt, model_validator

from plaudit.config.table import NonNegative, Table


class AskingTable(Table):
    gym: str | None = None
    """The name of a reasoning-gym task (extra `verify`)."""
    gym_options: Mapping[str, Any] = {}
    """gym: the task's own settings, such as max_value."""
    chat: bool = False
    """A plain prompt becomes the user's message in the model's chat template."""
    system: str | None = None
    """With chat: the system message before it."""
    shots: tuple[tuple[str, str], ...] = ()
    """With chat: questions and answers before it, as turns of the conversation, for a model that needs to be shown."""

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
    """How held-out prompts are answered; what is left out is as in training."""

    temperature: NonNegative | None = None
    """0: the likeliest token each time."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    max_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _matters(self) -> Self:
        for name, off in (("top_p", 1), ("top_k", 0)):
            if self.temperature == 0 and (value := getattr(self, name)) not in (None, off):
                raise ValueError(f"temperature = 0 takes the likeliest token: leave out {name} = {value:g}")
        return self


class SamplingTable(Table):
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    branch: tuple[PositiveInt, ...] = ()
    """[2, 2, 2]: the responses to a prompt are a tree. Two first steps, two second ones behind each, two ends behind
    each of these, 8 responses in all. Without it each is sampled on its own, as held-out prompts' are in any case."""
    step: str = "\n"
    """branch and [search]: the text that ends a step."""
    eval: EvalSamplingTable | None = None

    @model_validator(mode="after")
    def _steps(self) -> Self:
        if self.branch:
            self.check_step()
        return self

    def check_step(self) -> None:
        """ValueError if `step` cannot end a step."""
        if not self.step or any(self.step in stop for stop in self.stop):
            raise ValueError(
                f"step = {self.step!r} must end a step, not a response: it is empty or in stop = {self.stop}"
            )

    @property
    def truncation(self) -> str:
        """What cuts the distribution that is learned from, in words; "" where nothing does."""
        cuts = {"top_p": self.top_p if self.top_p < 1 else None, "top_k": self.top_k or None}
        return " and ".join(f"sampling.{name} = {cut:g}" for name, cut in cuts.items() if cut is not None)

    def evaluating(self) -> SamplingTable:
        """As this, with what `eval` says otherwise."""
        own = {} if self.eval is None else self.eval.model_dump(exclude_none=True)
        greedy = {"top_p": 1.0, "top_k": 0} if own.get("temperature") == 0 else {}  # training's cannot matter then
        return self.model_copy(update=own | greedy)
