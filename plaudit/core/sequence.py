"""The state of a sequence in the engine, and the request it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from plaudit.core.kv.prefix import Chain
from plaudit.core.sampling.noise import row_key
from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.records import FinishReason, ItemError, Likely, Sample

if TYPE_CHECKING:
    from plaudit.core.kv.prefix import Node
    from plaudit.core.model.readouts import Read
    from plaudit.core.sampling.constraint import Constraint
    from plaudit.core.text import TextStream


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of one sample since the last update: its tokens and text; once it has finished, the whole sample."""

    request: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    sample: Sample | None = None
    values: np.ndarray | None = None  # of a scoring request, which has no sample
    raw_logprobs: tuple[float, ...] = ()  # of the tokens, as in Sample; only where text is streamed
    top_logprobs: tuple[Likely, ...] = ()  # the same, if requested


class Draws(NamedTuple):
    """The next tokens of a sequence; every list that the request needs has one entry per token."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    tempered: list[float]  # if params.reshapes
    tops: list[Likely]  # if top_logprobs are requested


@dataclass(eq=False)
class Request:
    """One request; its sequences share the prompt and differ in `index`."""

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    max_tokens: int = 1
    group: int = 0
    deadline: float | None = None  # on the monotonic clock
    on_update: Callable[[Update], None] | None = None
    stop_when: Callable[[list[int], str], bool] | None = None
    read: Read | None = None  # scoring requests: what to read instead of sampling
    prompt_read: Read | None = None  # what to read of the prompt in addition to sampling; None once it is read
    prompt_logprobs: tuple[float, ...] | None = None
    prompt_tops: tuple[Likely, ...] | None = None
    prompt_ranks: tuple[int, ...] | None = None
    sequences: list[Sequence] = field(default_factory=list)
    open: set[int] = field(default_factory=lambda: {0})  # indices of samples (0: the score) not yet delivered
    whole: bool = False  # only finished samples are reported, no partial updates
    text: bool = True  # decode the samples to text


@dataclass(eq=False)
class Sequence:
    """tokens: the prompt and the generated tokens; the KV of the first `computed` ones is in `chain.blocks`."""

    request: Request
    index: int
    tokens: list[int]
    computed: int = 0
    chain: Chain[Node] = field(default_factory=Chain)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    tempered: list[float] = field(default_factory=list)  # if params.reshapes
    tops: list[Likely] = field(default_factory=list)  # if top_logprobs are requested
    versions: list[int] = field(default_factory=list)
    stream: TextStream | None = None
    constraint: Constraint | None = None
    finish: FinishReason | None = None
    error: ItemError | None = None
    experts: bytes | None = None  # set when it finishes, if experts are recorded
    values: list[np.ndarray] = field(default_factory=list)  # scores read so far
    cacheable: bool = True  # False once its KV mixes two weight versions
    since: int = 0  # the scheduler step at which it was queued
    reported: int = 0  # generated tokens already reported in an update
    reported_chars: int = 0  # characters of text already reported

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_ids)

    def restart(self) -> None:
        """Reset to the last reported state, with nothing computed. The caller has released the blocks."""
        self.chain, self.computed, self.values = Chain(), 0, []
        self.finish = self.error = None
        if self.request.read is not None:
            return
        del self.tokens[self.prompt_len + self.reported :]
        for column in (self.logprobs, self.raw_logprobs, self.tempered, self.tops, self.versions):
            del column[self.reported :]
        if self.stream is not None:
            self.stream.rewind(self.tokens[self.prompt_len :])

    def take(self, drawn: Draws, version: int) -> None:
        columns = (self.tokens, self.logprobs, self.raw_logprobs, self.tempered, self.tops)
        for mine, new in zip(columns, drawn, strict=True):
            mine += new  # type: ignore[operator]
        self.versions += [version] * len(drawn.tokens)

    @cached_property
    def noise_key(self) -> int:
        return row_key(self.request.seed, self.index)

    @property
    def reading(self) -> Read | None:
        """What is read from its rows: a scoring request's read; a prompt's, by the first unfinished sample only."""
        request = self.request
        if request.prompt_read is None or next((s for s in request.sequences if s.finish is None), None) is not self:
            return request.read
        return request.prompt_read

    @property
    def ready(self) -> bool:
        """Whether it may be scheduled: the first sample reads the prompt's log-probs, the others then share its KV."""
        return self.request.prompt_read is None or self.reading is not None

    @property
    def stuck(self) -> bool:
        """Whether its constraint allows no further token."""
        constraint = self.constraint
        return constraint is not None and constraint.stuck is not None and self.generated >= constraint.stuck

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def pending(self) -> int:
        """Number of tokens whose KV is not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether one token is left to compute before the next one is sampled."""
        return self.pending == 1 and self.request.read is None

    @property
    def plain(self) -> bool:
        """Whether only stop tokens and lengths end it; the back end tests those itself."""
        return self.stream is None and self.request.stop_when is None and self.constraint is None

    @property
    def unobserved(self) -> bool:
        """Whether nothing on the host needs it before it ends."""
        return self.plain and self.request.on_update is None and self.request.deadline is None

    @property
    def shareable(self) -> int:
        """How many leading tokens may come from the prefix tree: all whose hidden rows are not needed."""
        if (read := self.reading) is not None:
            return read.first_position
        return len(self.tokens) - 1

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key for scheduling and, in reverse, for preemption: priority, then order of submission."""
        return (-self.request.params.priority, self.request.number, self.index)

    @property
    def remaining(self) -> int:
        """How many tokens it may still generate."""
        return self.request.max_tokens - self.generated

    def sample(self, text: str) -> Sample:
        return Sample(
            prompt_ids=self.request.prompt_ids, token_ids=tuple(self.tokens[self.prompt_len :]), text=text,
            logprobs=tuple(self.logprobs), raw_logprobs=tuple(self.raw_logprobs), versions=tuple(self.versions),
            mask=(1,) * self.generated, finish_reason=self.finish or "abort", group=self.request.group,
            index=self.index, error=self.error,
            tempered_logprobs=tuple(self.tempered) if self.request.params.reshapes else None,
            top_logprobs=tuple(self.tops) if self.request.params.top_logprobs else None,
            prompt_logprobs=self.request.prompt_logprobs, prompt_top_logprobs=self.request.prompt_tops,
            experts=self.experts, stop=self.stream.stop if self.stream is not None and self.finish == "stop" else "",
            prompt_ranks=self.request.prompt_ranks,
        )  # fmt: skip
