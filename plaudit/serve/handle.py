"""What every served model is to those who ask it for scores: a handle, a request's context, what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from plaudit.records import Item, Score, StepScores
from plaudit.serve.http.app import Admission
from plaudit.serve.metrics import Metrics
from plaudit.serve.workers.cache import ScoreCache
from plaudit.serve.workers.calls import FairCalls

if TYPE_CHECKING:
    from plaudit.serve.ray.deployment import Cluster


Result = Score | StepScores


@dataclass(frozen=True, slots=True)
class RequestContext:
    """On whose behalf, how urgently, until when.

    path   the items are works of positions, which may come again with a step more: each position is kept on its own, so
           that its score is found again and only the new step is computed
    """

    tenant: str
    request_id: str
    deadline: float  # of time.monotonic()
    priority: int = 0
    cache: bool = True
    salt: str = ""
    path: bool = False


@dataclass(frozen=True, slots=True)
class ScoredItems:
    version: str
    results: list[Result]
    tokens: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What a model says of itself. `version` is "" where it has none."""

    name: str
    kind: str
    version: str
    state: str = "ready"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerStatus(ModelStatus):
    """Of a model that workers compute. `max_tokens` is None until it is loaded."""

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

    async def score(self, items: Sequence[Item], ask: RequestContext) -> ScoredItems: ...

    async def healthy(self) -> str:
        """ "" or why not."""

    def status(self) -> ModelStatus: ...

    async def close(self) -> None: ...

    def kill(self) -> None:
        """End its processes at once, without the event loop's help: the server exits and will not wait."""


@dataclass(frozen=True, slots=True)
class ServerResources:
    """What all models of a server share."""

    admission: Admission
    metrics: Metrics
    cache: ScoreCache
    threads: ThreadPoolExecutor
    calls: FairCalls
    """On those threads."""
    environment: Mapping[str, str]
    on_change: Callable[[], None]
    load_seconds: float
    cluster: Cluster | None = None
    """Where Ray Serve keeps the workers; None: they are processes of the server's own."""
