"""A server's models as policy and scorer of a search: calls from the search's thread run on the event loop.

Each call counts as part of the request: its deadline, its key's share and its quotas apply.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from plaudit.config.search import StepsTable
from plaudit.errors import PlauditError
from plaudit.records import ItemError
from plaudit.search.backends.policy import Ended, Step, StepRequest
from plaudit.search.backends.scored import Path, Scored, items_of, last_scores, whole_score
from plaudit.search.backends.step_text import StepText
from plaudit.serve.handle import ModelHandle
from plaudit.serve.http.message import HttpError, Request
from plaudit.serve.model import ServedModel
from plaudit.serve.scoring import ScoringService
from plaudit.serve.workers.frames import Sampling
from plaudit.serve.workers.jobs import Answer, GenerateJob

T = TypeVar("T")
GONE = ("model_failed", "model_closed")


class Interrupted(PlauditError):
    """The search cannot continue. `cause` is the error for its client."""

    def __init__(self, cause: HttpError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class LoopCalls:
    """Calls from a search's thread to the event loop, one at a time. Retries on overload, as a client would."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.stopped = threading.Event()
        self._loop = loop
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None
        # the request's context: it determines which version of a model answers
        self._context = contextvars.copy_context()

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        while True:
            try:
                return self._begun(make).result()
            except CancelledError:
                raise _cancelled() from None
            except HttpError as error:
                if error.type != "overloaded" or time.monotonic() >= self.request.deadline:
                    raise Interrupted(error) from None
                self.stopped.wait(min(error.retry_after or 1, max(0.0, self.request.deadline - time.monotonic())))

    def stop(self) -> None:
        """Cancel the search. Thread-safe."""
        with self._lock:
            self.stopped.set()
            if self._future is not None:
                self._future.cancel()

    def _begun(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        with self._lock:
            if self.stopped.is_set():
                raise _cancelled()
            future = self._context.run(asyncio.run_coroutine_threadsafe, make(), self._loop)
            self._future = future
            return future


class ServedPolicy:
    """A causal LM of the server, which caches the KV of paths as long as there is space."""

    def __init__(self, calls: LoopCalls, scoring: ScoringService, served: ServedModel, steps: StepsTable) -> None:
        self.steps = steps
        self.generated = 0
        self._calls = calls
        self._scoring = scoring
        self._served = served
        self._text = StepText(served.intake().tokenizer)

    def extend(self, requests: Sequence[StepRequest]) -> list[list[Step]]:
        jobs = [GenerateJob([*request.prompt, *request.response_ids], self._sampling(request)) for request in requests]
        parent = self._calls.request
        _, answers = self._calls.call(lambda: self._scoring.read(parent, self._served, jobs))
        return [self._steps(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def release(self, places: Sequence[Any]) -> None:
        """Does nothing: the worker evicts unused entries itself."""

    def close(self) -> None:
        """Does nothing: the model belongs to the server."""

    def _sampling(self, request: StepRequest) -> Sampling:
        steps = self.steps
        return Sampling(
            max_tokens=min(steps.max_step_tokens, max(1, steps.max_tokens - len(request.response_ids))),
            n=request.count, temperature=0.0 if request.greedy else steps.temperature,
            top_p=1.0 if request.greedy else steps.top_p, stop=(steps.stop,), seed=request.seed,
        )  # fmt: skip

    def _steps(self, request: StepRequest, answer: Answer) -> list[Step]:
        if isinstance(answer, ItemError):
            if answer.type in GONE:
                raise Interrupted(HttpError(503, answer.type, answer.message))
            return [Step(error=f"generation failed: {answer.message}")] * request.count
        assert isinstance(answer, list)
        steps = []
        for sample in answer:
            text = self._text(request.response_ids, request.text, tuple(sample.tokens))
            ended: Ended = "length" if sample.finish == "length" else "step" if self.steps.stop in text else "end"
            logprob = sum(sample.logprobs) / max(1, len(sample.tokens))
            steps.append(Step(tuple(sample.tokens), text, ended, logprob))
            self.generated += len(sample.tokens)
        return steps


class ServedJudge:
    """A reward of the server: a process model, or for whole responses any other kind."""

    computed = 0

    def __init__(self, calls: LoopCalls, scoring: ScoringService, served: ModelHandle) -> None:
        self.whole = served.kind != "process"
        self._calls = calls
        self._scoring = scoring
        self._served = served

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        assert not hidden, "searches on a server can only cluster by text"
        request = self._calls.request
        scored = self._calls.call(lambda: self._scoring.score(request, self._served, items_of(paths)))
        for result in scored.results:
            if result.error is not None and result.error.type in GONE:
                raise Interrupted(HttpError(503, result.error.type, result.error.message))
        return [*map(whole_score, scored.results)] if self.whole else last_scores(paths, scored.results)

    def release(self, places: Sequence[Any]) -> None:
        """Does nothing: the worker evicts unused entries itself."""

    def close(self) -> None:
        """Does nothing: the model belongs to the server."""


def _cancelled() -> Interrupted:
    return Interrupted(HttpError(499, "disconnected", "the client disconnected"))
