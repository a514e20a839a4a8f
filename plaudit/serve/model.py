"""The models that a server serves: a model in its worker, a rule, a judge, or a blend of others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np

from plaudit.config.reward import (
    BlendTable,
    JudgeTable,
    ReadByEngine,
    RewardTable,
    RuleTable,
)
from plaudit.errors import Refused, RequestError
from plaudit.records import Item, ItemError, Score, StepScores
from plaudit.reward.judges.backends import HttpAsk
from plaudit.reward.judges.judge import Judge, JudgeReward
from plaudit.reward.process import ProcessReading
from plaudit.reward.reading import EmbeddingReading, Intake, LogprobsReading
from plaudit.reward.reward import Reward
from plaudit.reward.rules.rule import RuleReward
from plaudit.reward.version import digest
from plaudit.reward.work import Work
from plaudit.serve.blend import ServedBlend
from plaudit.serve.handle import (
    ModelHandle,
    ModelStatus,
    RequestContext,
    Result,
    ScoredItems,
    ServerResources,
    WorkerStatus,
)
from plaudit.serve.http.message import ROUTE_KEY, TENANT, HttpError
from plaudit.serve.http.traces import TRACE
from plaudit.serve.judge import JudgeReading
from plaudit.serve.step_path import Path
from plaudit.serve.version import Canary, Reading, Scoring, Table, TextReading, Version
from plaudit.serve.workers.autoscale import Autoscale
from plaudit.serve.workers.calls import FairCalls
from plaudit.serve.workers.deployment import Deployment
from plaudit.serve.workers.jobs import Answer, GenerateJob, Ticket

P = TypeVar("P")
R = TypeVar("R")
INLINE_CHARACTERS = 4096  # of a request that is tokenised inline: a thread would cost more
INLINE_TOKENS = 65536
TOGETHER = 16  # items prepared or scored in one thread call; others wait meanwhile
PIECE_CHARACTERS = 65536  # of texts tokenised in one thread call
CALL_SECONDS = 0.05  # target duration of one thread call of rules
NO_DEADLINE = 3600.0  # for requests that are already limited by another deadline


class ServedModel:
    """A model in its worker: outcome, process, or a judge that our engine runs. A swap replaces its deployment;
    requests stay with the deployment they were sent to."""

    def __init__(self, name: str, table: Table, resources: ServerResources) -> None:
        self.name = name
        self._resources = resources
        self._prepare_seconds = resources.metrics.prepare_seconds.labels(name)
        self._number = 0
        self._deployments: set[Deployment] = set()  # in service, loading or retiring
        self._retiring: set[asyncio.Task[None]] = set()
        self._autoscale = _autoscale(table)
        self.main = self._deploy(table)
        self.canary: Canary | None = None
        self._resumed: tuple[Table, float] | None = None  # the previous server's canary, until it is loaded

    @property
    def kind(self) -> str:
        return self.main.table.kind

    @property
    def current(self) -> Version:
        """The version that answers the current request."""
        if self.canary is not None and self.canary.takes(ROUTE_KEY.get()):
            return self.canary.version
        return self.main

    @property
    def deployment(self) -> Deployment:
        return self.current.deployment

    @property
    def reading(self) -> Reading | None:
        return self.current.reading

    async def open(self) -> None:
        await self.main.open(self._resources.threads)
        self._serves(self.main)
        if self._resumed is not None:
            table, share = self._resumed
            self.try_out(await self.load(table), share)
            self._resumed = None

    def resume(self, table: Table, share: float) -> None:
        self._resumed = (table, share)

    async def load(self, table: Table) -> Version:
        """Loads and warms up another version beside this one; pass it to `use`, `try_out` or `discard`."""
        if self.main.reading is None:
            raise RequestError(f"{self.name} is still loading; wait until it is ready")
        self._number += 1
        fresh = self._deploy(table)
        try:
            await fresh.open(self._resources.threads)
        except BaseException:
            await self._close(fresh.deployment)
            raise
        return fresh

    def use(self, version: Version) -> None:
        """Make it the main version. Requests in progress stay with the version they were sent to."""
        if self.canary is not None and self.canary.version is version:
            self.canary = None
        old, self.main = self.main, version
        self._serves(version)
        self.discard(old)

    def try_out(self, version: Version, share: float) -> None:
        self.canary = Canary(version, share)
        self._serves(version)
        self._resources.on_change()

    def discard(self, version: Version) -> None:
        """Close it after its requests are answered."""
        if self.canary is not None and self.canary.version is version:
            self.canary = None
        self._resources.metrics.version.remove(self.name, version.name)
        task = asyncio.create_task(self._retire(version.deployment))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        self._resources.on_change()

    def _serves(self, version: Version) -> None:
        self._resources.metrics.version.labels(self.name, version.name).set(1)

    async def score(self, items: Sequence[Item], context: RequestContext) -> ScoredItems:
        version = self.current
        deployment, reading = version.deployment, version.reading
        if reading is None or deployment.state == "failed":
            raise HttpError(503, "not_ready", f"{self.name}: {deployment.public_reason}", retry_after=1)
        if isinstance(reading, EmbeddingReading):
            raise HttpError(
                422, "wrong_kind", f"{self.name} is an encoder and returns no scores: POST to /v1/embeddings"
            )
        if isinstance(reading, LogprobsReading):
            raise HttpError(
                422, "wrong_kind", f"{self.name} generates text and returns no scores: POST to /v1/chat/completions; a "
                'causal LM that scores steps needs kind = "process" and its format',
            )  # fmt: skip
        with deployment:
            began = time.perf_counter()
            if _small(items):
                works = _prepared(reading, items, None)
            else:
                works = await self._prepare(reading, items, context)
            seconds = time.perf_counter() - began
            self._prepare_seconds.observe(seconds)
            if (trace := TRACE.get()) is not None:
                trace.prepared(seconds)
            sound = [work for work in works if not isinstance(work, ItemError)]
            tokens = sum(len(work.tokens) for work in sound)
            answers = await self._compute(deployment, sound, tokens, context)
        results = _finished(reading, works, answers, deployment.version)
        values = [r.aggregate if isinstance(r, StepScores) else r.value for r in results]
        scores = [value for value in values if value is not None]
        self._count(version, len(scores), len(results), time.perf_counter() - began, sum(scores))
        return ScoredItems(deployment.version, results, tokens)

    async def read(self, works: Sequence[Work | GenerateJob], context: RequestContext) -> tuple[str, list[Answer]]:
        """Returns the version, and for each work the model's rows or the continuation of the prompt."""
        version = self.current
        deployment = version.deployment
        if version.reading is None or deployment.state == "failed":
            raise HttpError(503, "not_ready", f"{self.name}: {deployment.public_reason}", retry_after=1)
        began = time.perf_counter()
        with deployment:
            answers = await self._compute(deployment, works, sum(work.cost for work in works), context)
        good = sum(not isinstance(answer, ItemError) for answer in answers)
        self._count(version, good, len(answers), time.perf_counter() - began)
        return deployment.version, answers

    def _count(self, version: Version, scored: int, items: int, seconds: float, scores: float = 0.0) -> None:
        self._resources.metrics.of_version(self.name, version.name).count(scored, items - scored, seconds, scores)

    async def tokenise(self, texts: Sequence[str], *, special: bool) -> list[list[int] | ItemError]:
        """Tokenises texts that the caller has rendered."""
        intake = self.intake()
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return _tokenised(intake, texts, special)
        return await self.in_turn(lambda piece: _tokenised(intake, piece, special), texts, len)

    async def in_turn(
        self, run: Callable[[Sequence[P]], list[R]], parts: Sequence[P], size: Callable[[P], int]
    ) -> list[R]:
        """Runs `run` on the parts in threads, one piece at a time, so that other requests take turns."""
        calls = [(partial(run, piece), sum(map(size, piece))) for piece in _pieces(parts, size)]
        rows = await self._resources.calls.run(calls, TENANT.get(), time.monotonic() + NO_DEADLINE)
        return [row for piece in rows for row in piece]

    def intake(self) -> Intake:
        return self.loaded().intake

    def loaded(self) -> TextReading:
        version = self.current
        if version.reading is None or isinstance(version.reading, JudgeReading):
            raise HttpError(503, "not_ready", f"{self.name}: {version.deployment.public_reason}", retry_after=1)
        return version.reading

    async def _compute(
        self, deployment: Deployment, works: Sequence[Work | GenerateJob], tokens: int, context: RequestContext
    ) -> list[Answer]:
        paths: list[Path] = []
        left = works
        if context.path:
            paths = [
                deployment.path(work, context.salt, recall=context.cache) for work in works if isinstance(work, Work)
            ]
            left = [path.rest for path in paths if path.rest is not None]
        with self._resources.admission.tokens(context.tenant, tokens):
            ticket = deployment.submit(
                left, tenant=context.tenant, priority=context.priority, salt=context.salt, cached=context.cache
            )
            answers = await self._wait(deployment, ticket, context)
        if not context.path:
            return answers
        remaining = iter(answers)
        return [path.joined(None if path.rest is None else next(remaining)) for path in paths]

    async def healthy(self) -> str:
        loaded = self.main.reading is not None and self._resumed is None
        why = await self.main.deployment.healthy() if loaded else "the model is loading"
        return f"{self.name}: {why}" if why else ""

    def status(self) -> WorkerStatus:
        reading, deployment = self.main.reading, self.main.deployment
        return WorkerStatus(
            self.name, self.kind, deployment.version, deployment.state, deployment.reason, deployment.restarts,
            None if reading is None else _limit(reading), [] if reading is None else list(reading.facts.labels),
            deployment.queue.items, deployment.queue.tokens, deployment.in_flight_tokens, deployment.budget,
            [replica.describe() for replica in deployment.replicas],
            None if self.canary is None else self.canary.describe(),
        )  # fmt: skip

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(self._close(deployment) for deployment in tuple(self._deployments)))

    def kill(self) -> None:
        for deployment in self._deployments:
            deployment.kill()

    def scale(self, count: int) -> None:
        """Set the target number of replicas. With max_replicas in its table, autoscaling resumes from the next
        second."""
        if not isinstance(self.main.table, ReadByEngine):
            raise RequestError(f"{self.name} is a {self.kind} model, which always has one worker")
        self.main.table = self.main.table.model_copy(update={"replicas": count})
        self.main.deployment.scale(count)

    def tick(self) -> None:
        """Every second."""
        table, deployment = self.main.table, self.main.deployment
        if self.main.reading is None or not isinstance(table, ReadByEngine) or table.max_replicas is None:
            return
        if self._resources.cluster is not None:
            return  # Ray Serve scales it
        if (self._autoscale.least, self._autoscale.most) != (table.replicas, table.max_replicas):
            self._autoscale = _autoscale(table)
        staying = sum(not replica.leaving for replica in deployment.replicas)
        wanted = self._autoscale.wanted(staying, deployment.queue.tokens, 1.0)
        if wanted != staying:
            deployment.scale(wanted)

    def _deploy(self, table: Table) -> Version:
        resources = self._resources
        tree = table.model_dump(exclude_none=True)
        arguments = (
            self.name, self._number, tree, resources.cache, resources.metrics, dict(resources.environment),
            resources.load_seconds, resources.on_change,
        )  # fmt: skip
        if resources.cluster is None:
            deployment = Deployment(*arguments, replicas=getattr(table, "replicas", 1))
        else:
            from plaudit.serve.ray.deployment import RayDeployment

            deployment = RayDeployment(resources.cluster, *arguments)
        self._deployments.add(deployment)
        return Version(deployment, table)

    async def _retire(self, deployment: Deployment) -> None:
        await deployment.drained()
        await self._close(deployment)
        self._resources.metrics.forget(self.name, deployment.version)

    async def _close(self, deployment: Deployment) -> None:
        await deployment.close()
        self._deployments.discard(deployment)

    async def _prepare(
        self, reading: Scoring, items: Sequence[Item], context: RequestContext
    ) -> list[Work | GenerateJob | ItemError]:
        over = threading.Event()
        pieces = [items[start : start + TOGETHER] for start in range(0, len(items), TOGETHER)]
        calls = [(partial(_prepared, reading, piece, over), sum(map(_guessed_tokens, piece))) for piece in pieces]
        try:
            works = await self._resources.calls.run(calls, context.tenant, context.deadline, context.priority)
        finally:
            over.set()  # a thread cannot be cancelled: it checks this before each item
        return [work for piece in works for work in piece]

    async def _wait(self, deployment: Deployment, ticket: Ticket, context: RequestContext) -> list[Answer]:
        metrics = self._resources.metrics
        try:
            await deployment.wait(ticket, context.deadline)
        except TimeoutError:
            waiting, computing = deployment.cancel(ticket)
            metrics.expired.labels(self.name).inc(waiting)
            raise HttpError(
                504, "deadline", f"the deadline expired with {waiting} items queued and {computing} being computed"
            ) from None
        except asyncio.CancelledError:
            waiting, computing = deployment.cancel(ticket)
            metrics.cancelled.labels(self.name).inc(waiting + computing)
            raise
        finally:
            if (trace := TRACE.get()) is not None:
                trace.computed(self.name, deployment.version, (job.times for job in ticket.jobs))
        return [answer for answer in ticket.answers if answer is not None]


class ServedCalls:
    """A rule, or a judge behind another HTTP server: threads wait for the external call."""

    def __init__(
        self, name: str, kind: str, reward: Reward, version: str, resources: ServerResources, threads: int
    ) -> None:
        self.name = name
        self.kind = kind
        self._reward = reward
        self._version = version
        self._resources = resources
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"{kind}-{name}")
        self._calls = FairCalls(self._threads, threads)
        self._seconds = CALL_SECONDS  # recent duration per item

    async def score(self, items: Sequence[Item], context: RequestContext) -> ScoredItems:
        # As many per thread call as take CALL_SECONDS, so that slow items do not delay others.
        size = max(1, min(TOGETHER, int(CALL_SECONDS / max(self._seconds, 1e-6))))
        pieces = [items[start : start + size] for start in range(0, len(items), size)]
        calls = [(partial(self._score, piece), sum(map(_guessed_tokens, piece))) for piece in pieces]
        with self._resources.admission.tokens(context.tenant, sum(cost for _, cost in calls)):
            results = await self._calls.run(calls, context.tenant, context.deadline, context.priority)
        return ScoredItems(self._version, [result for piece in results for result in piece], 0)

    def _score(self, items: Sequence[Item]) -> list[Result]:
        began = time.perf_counter()
        results = self._reward.score(items)
        self._seconds += 0.2 * ((time.perf_counter() - began) / len(items) - self._seconds)
        return list(results)

    async def healthy(self) -> str:
        return ""

    def status(self) -> ModelStatus:
        return ModelStatus(self.name, self.kind, self._version)

    async def close(self) -> None:
        self._reward.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def kill(self) -> None:
        self._reward.close()


def _autoscale(table: Table) -> Autoscale:
    if not isinstance(table, ReadByEngine):
        return Autoscale(1, 1, 1)
    return Autoscale(table.replicas, table.max_replicas or table.replicas, table.replica_tokens)


def _pieces(parts: Sequence[P], size: Callable[[P], int]) -> Iterator[list[P]]:
    """Splits parts into pieces; a piece ends with the part that reaches the size limit."""
    piece: list[P] = []
    characters = 0
    for part in parts:
        piece.append(part)
        characters += size(part)
        if characters > PIECE_CHARACTERS:
            yield piece
            piece, characters = [], 0
    if piece:
        yield piece


def _small(items: Sequence[Item]) -> bool:
    characters = tokens = 0
    for item in items:
        if item.messages is not None or isinstance(item.prompt, tuple):
            return False  # a chat template is rendered in another process, which takes time
        if item.tokens is not None:
            tokens += len(item.tokens)
        else:
            response = item.response if isinstance(item.response, str) else "".join(item.response or ())
            characters += len(item.text or "") + len(item.prompt or "") + len(response)
    return characters <= INLINE_CHARACTERS and tokens <= INLINE_TOKENS


def _prepared(
    reading: Scoring, items: Sequence[Item], over: threading.Event | None
) -> list[Work | GenerateJob | ItemError]:
    works: list[Work | GenerateJob | ItemError] = []
    for place, item in enumerate(items):
        if over is not None and over.is_set():
            break  # the request was cancelled
        if place == 0 and not isinstance(reading, JudgeReading):
            reading.prerender(items)
        try:
            works.append(reading.prepare(item))
        except Refused as error:
            works.append(ItemError(error.type, str(error)))
        except RequestError as error:
            works.append(ItemError("invalid_item", str(error)))
    return works


def _tokenised(intake: Intake, texts: Sequence[str], special: bool) -> list[list[int] | ItemError]:
    rows: list[list[int] | ItemError] = []
    for text in texts:
        try:
            rows.append(intake.rendered(text, special))
        except Refused as error:
            rows.append(ItemError(error.type, str(error)))
    return rows


def _finished(
    reading: Scoring, works: Sequence[Work | GenerateJob | ItemError], answers: Sequence[Answer], version: str
) -> list[Result]:
    """Converts rows to scores, in the order of the items."""
    results: list[Result] = []
    remaining = iter(answers)
    make = StepScores if isinstance(reading, ProcessReading) else Score
    for work in works:
        if isinstance(work, ItemError):
            results.append(make(error=work, version=version))
            continue
        answer = next(remaining)
        if isinstance(answer, ItemError):
            results.append(make(error=answer, version=version, tokens=len(work.tokens)))
        elif isinstance(reading, JudgeReading):
            assert isinstance(work, GenerateJob)
            assert isinstance(answer, list)
            results.append(reading.finish(work, answer[0]))
        else:
            assert isinstance(work, Work)
            assert isinstance(answer, np.ndarray)
            results.append(reading.finish(work, answer))
    return results


def _limit(reading: Reading) -> int:
    return reading.limit if isinstance(reading, JudgeReading) else reading.intake.limit


def _guessed_tokens(item: Item) -> int:
    """Estimates tokens for rules, which have no tokenizer: four characters per token."""
    return 1 + len(str(item.response or item.messages or item.text or "")) // 4


def new_served(
    name: str, table: RewardTable, resources: ServerResources, models: Mapping[str, ModelHandle]
) -> ModelHandle:
    if isinstance(table, BlendTable):
        return ServedBlend(name, table, models)
    if isinstance(table, RuleTable):
        rule = RuleReward(table, exposed=True)
        return ServedCalls(name, table.kind, rule, rule.version, resources, table.processes)
    if isinstance(table, JudgeTable) and table.url is not None:
        judge = JudgeReward(Judge(table), HttpAsk(table))
        return ServedCalls(name, table.kind, judge, f"0-{digest(table)}", resources, table.concurrency)
    return ServedModel(name, table, resources)
