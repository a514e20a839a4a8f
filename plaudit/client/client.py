"""Clients of `plaudit serve`: return a result for every item, in order, or raise. A failure is never a number.

`AsyncRewardClient` is the implementation; `RewardClient` runs it in a thread.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Literal, Self, overload

import httpx
import msgspec

from plaudit.client.exchange import Exchange, Options, Result, exchanges
from plaudit.client.items import Entry, all_items
from plaudit.client.network import UNIX, Network, StrPath
from plaudit.client.replicas import Replica, Replicas
from plaudit.errors import BadReply, ConfigError, RequestRefused, RewardUnavailable, VersionChanged
from plaudit.records import Item, Score, StepScores

DEFAULT_URL = "http://127.0.0.1:5555"
CONNECTIONS = 64  # per server
CONNECT_SECONDS = 5.0
PROBE_EVERY, PROBE_SECONDS = 10.0, 5.0  # health checks of a server that does not answer, if there are others
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
RESCORES = 2  # repetitions of the part of a call scored by an older version, before the call fails

Side = Literal["left", "right"]
OnRetry = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class _Answer:
    sent: float
    version: str
    results: list[Result]


class _RetryableError(Exception):
    """An attempt failed in a way that may succeed on a retry."""


class _Unresponsive(_RetryableError):
    """The server does not answer its health check either."""


class AsyncRewardClient:
    """urls       one server, or several of the same model: each request goes to the least busy one;
               http, https, unix:PATH, or grpc and grpcs, which need grpcio and the port of --grpc-port
    model      its name; default: the first model of the server
    timeout    seconds for one `score`, including waiting and retries; None: no limit
    retries    attempts after the first for each request of a call
    transport  instead of the network: `InProcess(reward)`, or `httpx.ASGITransport(app)`
    hedge      seconds after which an unanswered request is also sent to another server, or again to the same one;
               the first answer counts and the other request is cancelled
    on_retry   called for every failed attempt that is retried, with the reason and the seconds left (None: no limit)
    ca_file, client_cert  PEM files for https: `network.py`
    """

    def __init__(
        self, urls: str | Sequence[str] = DEFAULT_URL, *, model: str | None = None, api_key: str | None = None,
        timeout: float | None = 300.0, retries: int = 30, transport: httpx.AsyncBaseTransport | None = None,
        on_retry: OnRetry | None = None, ca_file: StrPath | None = None, client_cert: StrPath | None = None,
        hedge: float | None = None,
    ) -> None:  # fmt: skip
        self._settings: dict[str, Any] = {
            "urls": urls, "model": model, "api_key": api_key, "timeout": timeout, "retries": retries,
            "transport": transport, "on_retry": on_retry, "ca_file": ca_file, "client_cert": client_cert,
            "hedge": hedge,
        }  # fmt: skip
        self.urls = _checked_urls(urls)
        self.model = model
        self.timeout = timeout
        self.retries = retries
        if hedge is not None and not hedge > 0:
            raise ConfigError(
                f"hedge is {hedge}; expected seconds above 0, such as the 95th percentile of request times"
            )
        self.hedge = hedge
        self._on_retry = on_retry
        self._replicas = Replicas(self.urls)
        self._process = os.getpid()
        connections = CONNECTIONS * len(self.urls)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            if not api_key or not api_key.isascii() or not api_key.isprintable():
                raise ConfigError("api_key must be one or more printable ASCII characters")
            headers["Authorization"] = f"Bearer {api_key}"
        self._network = Network(self.urls, headers, connections, ca_file, client_cert, transport)

    @overload
    async def score(
        self, items: Item, *, steps: Literal[False] = ..., truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> Score: ...  # fmt: skip

    @overload
    async def score(
        self, items: Item, *, steps: Literal[True], truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> StepScores: ...  # fmt: skip

    @overload
    async def score(
        self, items: Item, *, steps: bool, truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> Result: ...  # fmt: skip

    @overload
    async def score(
        self, items: Iterable[Entry], *, steps: Literal[False] = ..., truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> list[Score]: ...  # fmt: skip

    @overload
    async def score(
        self, items: Iterable[Entry], *, steps: Literal[True], truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> list[StepScores]: ...  # fmt: skip

    @overload
    async def score(
        self, items: Iterable[Entry], *, steps: bool, truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> list[Result]: ...  # fmt: skip

    async def score(
        self, items: Item | Iterable[Entry], *, steps: bool = False, truncate: Side | None = None, priority: int = 0,
        version: str | None = None,
    ) -> Any:  # fmt: skip
        """Returns a result for every response, in order: `Score`s, or `StepScores` with `steps`; for a single Item its
        result. A response that the server could not score has an `error`. All scores of a call have the same version:
        `version`, if given."""
        if self._process != os.getpid():  # what the parent process had in progress is not in progress here
            self._replicas, self._process = Replicas(self.urls), os.getpid()
        entries = [items] if isinstance(items, Item) else items
        requests, results = exchanges(all_items(entries), Options(self.model, steps, truncate, priority))
        for request, answer in zip(requests, await self._one_version(requests, version), strict=True):
            results.update(zip(request.places, answer.results, strict=True))
        ordered = [results[place] for place in range(len(results))]
        return ordered[0] if isinstance(items, Item) else ordered

    async def close(self) -> None:
        """Closes the connections of this event loop. A later call opens new ones, also in another loop."""
        await self._network.close()

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        """Copied to another process by its settings: a copy has its own connections."""
        return partial(type(self), **self._settings), ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _one_version(self, requests: Sequence[Exchange], version: str | None) -> list[_Answer]:
        """A model may be swapped during a call. What the older version scored is then scored again."""
        began = time.monotonic()
        answers = await self._all(requests, began, version)
        for attempt in range(RESCORES + 1):
            # A request sent later cannot reach an older version; one answered later can.
            newest = max(answers, key=lambda answer: answer.sent).version if answers else ""
            older = [i for i, answer in enumerate(answers) if answer.version != newest]
            if not older:
                break
            if attempt == RESCORES:
                versions = sorted({answer.version for answer in answers})
                raise VersionChanged(
                    f"{self._names()} scored parts of one call with versions {', '.join(versions)}, even after "
                    f"{RESCORES} repetitions; serve the same model on all servers, or call again after the swap"
                )
            for i, answer in zip(older, await self._all([requests[i] for i in older], began, version), strict=True):
                answers[i] = answer
        return answers

    async def _all(self, requests: Sequence[Exchange], began: float, version: str | None) -> list[_Answer]:
        tasks = [asyncio.create_task(self._answered(request, began, version)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _answered(self, request: Exchange, began: float, version: str | None) -> _Answer:
        """Sends one request until it is answered, rejected, or out of attempts or time."""
        body = request.body()
        deadline = None if self.timeout is None else began + self.timeout
        cause = "the timeout expired before the first attempt"
        attempts = 0
        pause = 0.0
        while attempts <= self.retries:
            wait = self._replicas.rest_left() + pause
            if deadline is not None and time.monotonic() + wait >= deadline:
                break
            await asyncio.sleep(wait)
            try:
                async with self._connection(deadline):
                    attempts += 1
                    return await self._hedged(request, body, deadline, version)
            except _RetryableError as failure:
                cause = str(failure)
                if self._on_retry is not None and attempts <= self.retries:
                    self._on_retry(cause, None if deadline is None else max(0.0, deadline - time.monotonic()))
            # Full jitter, so that requests rejected together are not retried together.
            pause = random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempts - 1, 20)))
        raise RewardUnavailable(
            f"no scores from {self._names()} after {attempts} attempt(s) in {time.monotonic() - began:.1f} s "
            f"(timeout {self.timeout} s, retries {self.retries}): {cause}; check that the server is running and ready"
        )

    @asynccontextmanager
    async def _connection(self, deadline: float | None) -> AsyncIterator[None]:
        free = await self._network.free()
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await free.acquire()
        except TimeoutError:
            raise _RetryableError("all connections were in use by other calls") from None
        try:
            yield
        finally:
            free.release()

    async def _hedged(self, request: Exchange, body: bytes, deadline: float | None, version: str | None) -> _Answer:
        """One attempt, and a second one in parallel if there is no answer after `hedge` seconds. The first answer
        counts, and the other attempt is cancelled."""
        replica = self._replicas.choose()
        if self.hedge is None:
            return await self._attempt(replica, request, body, deadline, version)
        under_way = {asyncio.create_task(self._attempt(replica, request, body, deadline, version))}
        try:
            done, _ = await asyncio.wait(under_way, timeout=self.hedge)
            if not done:
                other = self._replicas.choose(beside=replica)
                under_way.add(asyncio.create_task(self._attempt(other, request, body, deadline, version)))
            while True:
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda each: each.exception() is not None):
                    # otherwise the other may still answer
                    if not (under_way and isinstance(task.exception(), _RetryableError)):
                        return task.result()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _attempt(
        self, replica: Replica, request: Exchange, body: bytes, deadline: float | None, version: str | None
    ) -> _Answer:
        sent = time.monotonic()
        # If there are other servers, one that hangs does not get the whole timeout.
        seconds = None if deadline is None else (deadline - sent) / (1 if len(self.urls) == 1 else 2)
        replica.outstanding += 1
        try:
            reply = await self._post(replica.url, body, seconds, request.route)
            _check_status(replica, reply)
        except _Unresponsive:
            replica.silent()
            raise
        except _RetryableError:
            if not replica.resting:  # a server that sent Retry-After is alive
                replica.failed()
            raise
        finally:
            replica.outstanding -= 1
        replica.succeeded()
        try:
            served_version, results = request.read(reply.content)
        except BadReply as error:
            raise BadReply(f"{replica.url}: {error}") from None
        if version is not None and served_version != version:
            raise VersionChanged(f"{replica.url} serves version {served_version}, but {version} was requested")
        return _Answer(sent, served_version, results)

    async def _post(self, url: str, body: bytes, seconds: float | None, route: str) -> httpx.Response:
        """Sends the remaining time as deadline, so that the server stops computing after it."""
        headers = {} if seconds is None else {"X-Deadline": f"{seconds:.3f}"}
        if route:
            headers["X-Route-Key"] = route
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        post = self._network.send("POST", url, "/v1/rewards", content=body, headers=headers, timeout=timeout)
        try:
            async with asyncio.timeout(seconds):
                return await (post if len(self.urls) == 1 else self._while_alive(url, post))
        except TimeoutError:
            raise _RetryableError(f"{url} did not answer within {seconds:.1f} s") from None
        except httpx.RequestError as error:
            raise _RetryableError(f"{url} cannot be reached ({type(error).__name__}: {error})") from None

    async def _while_alive(self, url: str, post: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
        """The reply, as long as the server is alive. A stopped process accepts requests and answers none, not even the
        health check; one that computes for long still answers that."""
        reply = asyncio.create_task(post)
        try:
            while not (await asyncio.wait({reply}, timeout=PROBE_EVERY))[0]:
                try:
                    async with asyncio.timeout(PROBE_SECONDS):
                        await self._network.send("GET", url, "/health/live", timeout=None)
                except (TimeoutError, httpx.RequestError):
                    if not reply.done():
                        raise _Unresponsive(f"{url} does not answer, nor does its /health/live") from None
            return reply.result()
        finally:
            reply.cancel()

    def _names(self) -> str:
        return ", ".join(self.urls)


class RewardClient:
    """`AsyncRewardClient` for synchronous code, with the same arguments. Thread-safe. A copy in another process
    (pickled into a Ray actor or a spawned process, or after os.fork()) has its own thread and connections."""

    def __init__(
        self, urls: str | Sequence[str] = DEFAULT_URL, *, model: str | None = None, api_key: str | None = None,
        timeout: float | None = 300.0, retries: int = 30, transport: httpx.AsyncBaseTransport | None = None,
        on_retry: OnRetry | None = None, ca_file: StrPath | None = None, client_cert: StrPath | None = None,
        hedge: float | None = None,
    ) -> None:  # fmt: skip
        self._client = AsyncRewardClient(
            urls, model=model, api_key=api_key, timeout=timeout, retries=retries, transport=transport,
            on_retry=on_retry, ca_file=ca_file, client_cert=client_cert, hedge=hedge,
        )  # fmt: skip
        self.urls = self._client.urls
        self._closed = False
        self._thread: _LoopThread | None = None

    @overload
    def score(
        self, items: Item, *, steps: Literal[False] = ..., truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> Score: ...  # fmt: skip

    @overload
    def score(
        self, items: Item, *, steps: Literal[True], truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> StepScores: ...  # fmt: skip

    @overload
    def score(
        self, items: Item, *, steps: bool, truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> Result: ...  # fmt: skip

    @overload
    def score(
        self, items: Iterable[Entry], *, steps: Literal[False] = ..., truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> list[Score]: ...  # fmt: skip

    @overload
    def score(
        self, items: Iterable[Entry], *, steps: Literal[True], truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> list[StepScores]: ...  # fmt: skip

    @overload
    def score(
        self, items: Iterable[Entry], *, steps: bool, truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> list[Result]: ...  # fmt: skip

    def score(
        self, items: Item | Iterable[Entry], *, steps: bool = False, truncate: Side | None = None, priority: int = 0,
        version: str | None = None,
    ) -> Any:  # fmt: skip
        future = self.submit(items, steps=steps, truncate=truncate, priority=priority, version=version)
        try:
            return future.result()
        finally:
            future.cancel()  # the wait was interrupted

    @overload
    def submit(
        self, items: Item, *, steps: Literal[False] = ..., truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> Future[Score]: ...  # fmt: skip

    @overload
    def submit(
        self, items: Item, *, steps: Literal[True], truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> Future[StepScores]: ...  # fmt: skip

    @overload
    def submit(
        self, items: Item, *, steps: bool, truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> Future[Result]: ...  # fmt: skip

    @overload
    def submit(
        self, items: Iterable[Entry], *, steps: Literal[False] = ..., truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> Future[list[Score]]: ...  # fmt: skip

    @overload
    def submit(
        self, items: Iterable[Entry], *, steps: Literal[True], truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> Future[list[StepScores]]: ...  # fmt: skip

    @overload
    def submit(
        self, items: Iterable[Entry], *, steps: bool, truncate: Side | None = ..., priority: int = ...,
        version: str | None = ...,
    ) -> Future[list[Result]]: ...  # fmt: skip

    def submit(
        self, items: Item | Iterable[Entry], *, steps: bool = False, truncate: Side | None = None, priority: int = 0,
        version: str | None = None,
    ) -> Any:  # fmt: skip
        """The result of `score` in a future. Cancelling it cancels the requests."""
        thread = self._started()
        # copied now: the caller may change its list while the thread works
        copied = items if isinstance(items, Item) else all_items(items)
        scored = self._client.score(copied, steps=steps, truncate=truncate, priority=priority, version=version)
        return asyncio.run_coroutine_threadsafe(scored, thread.loop)

    def close(self) -> None:
        """Cancels futures that are not done."""
        with _starting:
            self._closed, thread = True, self._thread
        if thread is not None and thread.process == os.getpid():
            thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        """Copied to another process by its settings: a copy has its own thread and connections, and is open."""
        return partial(type(self), **self._client._settings), ()

    def _started(self) -> _LoopThread:
        """The thread of this process, started by the first call: os.fork() copies the client, but not its thread."""
        with _starting:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._thread is None or self._thread.process != os.getpid():
                if self._thread is not None:
                    _of_the_parent.append(self._thread)
                self._thread = _LoopThread(self._client)
            return self._thread


class _LoopThread:
    """A thread with an event loop, in which a client's calls run."""

    def __init__(self, client: AsyncRewardClient) -> None:
        self.process = os.getpid()
        self._client = client
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(started)), name="reward-client", daemon=True
        )
        self._thread.start()
        self.loop, self._ended = started.result()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    async def _live(self, started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        ended = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), ended))
        await ended.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()


_starting = threading.Lock()
# Event loops copied by os.fork(). They are never freed: to close one would change the parent's epoll instance, which
# both processes share.
_of_the_parent: list[_LoopThread] = []


def _after_fork() -> None:
    """Another thread of the parent may have had the lock."""
    global _starting
    _starting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _checked_urls(urls: str | Sequence[str]) -> list[str]:
    addresses = [urls] if isinstance(urls, str) else list(dict.fromkeys(urls))
    if not addresses:
        raise ConfigError("urls is empty; expected the URL of a reward server")
    for url in addresses:
        if url.startswith(UNIX):
            if not url.removeprefix(UNIX).startswith("/"):
                raise ConfigError(
                    f"{url!r} is not a unix socket; expected an absolute path, such as unix:/run/plaudit.sock"
                )
            continue
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.host:
            raise ConfigError(f"{url!r} is not the URL of a server; expected, for example, {DEFAULT_URL}")
        if parts.userinfo:
            raise ConfigError(f"the URL of {parts.host} contains a password, which messages would show; use api_key")
        if parts.scheme.startswith("grpc") and (parts.port is None or parts.path != "/"):
            raise ConfigError(f"{url!r} is not a gRPC address; expected, for example, grpc://127.0.0.1:8001")
    return [url.rstrip("/") for url in addresses]


def _check_status(replica: Replica, reply: httpx.Response) -> None:
    """Returns if the reply can be parsed; raises _RetryableError, or an error that a retry cannot fix."""
    status = reply.status_code
    if status == 200:
        return
    type, message = _error_of(reply)
    summary = f"{replica.url} answered {status} ({type}: {message})" if type else f"{replica.url} answered {status}"
    if status in (408, 429) or status >= 500:
        replica.rest(_retry_after(reply))
        raise _RetryableError(summary)
    if status >= 400:
        raise RequestRefused(status, type, summary)
    raise BadReply(f"{summary}; expected 200; redirects are not followed: use the server's own address")


def _error_of(reply: httpx.Response) -> tuple[str, str]:
    """The type and message of the server's error, if present."""
    try:
        error: Any = msgspec.json.decode(reply.content)["error"]
        return str(error["type"])[:100], " ".join(str(error["message"]).split())[:500]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return "", ""


def _retry_after(reply: httpx.Response) -> float:
    header = reply.headers.get("retry-after", "")
    try:
        seconds = float(header) if header.isdigit() else parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, seconds)
