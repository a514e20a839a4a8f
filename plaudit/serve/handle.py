"""The interface of every served model: a handle, the context of a request, and the scored items it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from plaudit.records import Item, Score, StepScores
from plaudit.serve.http.app import Admission
from plaudit.serve.metrics import Metrics
from plaudit.serve.workers.cache import ScoreCache
from plaudit.serve.workers.calls import FairCalls

if TYPE_CHECKING:
    from plaudit.serve.ray.deployment import Cluster


Result = Score | StepScores


class RequestContext(msgspec.Struct, frozen=True):
    """The API key, priority, deadline and cache options of a request.

    path   the items are paths of a search that may be sent again with one more step: each position is cached on its
           own, so that only the new step is computed
    """

    tenant: str
    request_id: str
    deadline: float  # of time.monotonic()
    priority: int = 0
    cache: bool = True
    salt: str = ""
    path: bool = False


class ScoredItems(msgspec.Struct, frozen=True):
    version: str
    results: list[Result]
    tokens: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The state a model reports. `version` is "" for models without versions."""

    name: str
    kind: str
    version: str
    state: str = "ready"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerStatus(ModelStatus):
    """The state of a model computed by workers. `max_tokens` is None until it is loaded."""

    restarts: int = 0
    max_tokens: int | None = None
    labels: Sequence[str] = ()
    queue_items: int = 0
    queue_tokens: int = 0
    held_tokens: int = 0
    budget: int = 0
    replicas: Sequence[Mapping[str, Any]] = ()
    canary: Mapping[str, Any] | None = None


class ModelHandle(Protocol):
    name: str

    @property
    def kind(self) -> str: ...

    async def score(self, items: Sequence[Item], context: RequestContext) -> ScoredItems: ...

    async def healthy(self) -> str:
        """Returns "" if the model is healthy, otherwise the reason."""

    def status(self) -> ModelStatus: ...

    async def close(self) -> None: ...

    def kill(self) -> None:
        """Kill its processes at once, without the event loop: the server exits without waiting."""


@dataclass(frozen=True, slots=True)
class ServerResources:
    """Resources shared by all models of a server."""

    admission: Admission
    metrics: Metrics
    cache: ScoreCache
    threads: ThreadPoolExecutor
    calls: FairCalls
    """Runs blocking calls on those threads."""
    environment: Mapping[str, str]
    on_change: Callable[[], None]
    load_seconds: float
    cluster: Cluster | None = None
    """The Ray cluster whose Ray Serve runs the workers; None: they are child processes of the server."""
