"""An engine on an HTTP server, with the same `generate` as the core's engine.

Requests of one call are sent together, one per prompt, and the server batches them. A request whose connection breaks
is retried, since nothing of its answer was used; after all responses the client checks that the server is still the
same process with the same weights, so that a server restarted in between cannot return samples of other weights.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import httpx

from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.errors import BadReply, EngineError, EngineLost, RequestError, StaleWeights, one_line
from plaudit.place.engines.engine_server import EngineServer
from plaudit.place.engines.http_wire import HttpWire
from plaudit.records import FinishReason, ItemError, Sample

AT_ONCE = 512  # connections
CONNECT = 5.0  # seconds to connect, and the longest pause between two retries
AWAY = 20.0  # seconds for which a server may refuse connections before it counts as lost
CONTROL = 120.0  # seconds for control calls such as pausing and waking
AGAIN = (429, 503)  # worth a retry
BEAT_EVERY = 5.0  # seconds between two liveness checks while requests are in flight
BEAT_SECONDS = 120.0  # timeout of such a check: it waits for the batch, and a first one may compile


@dataclass(frozen=True, slots=True)
class State:
    """version   of the weights; None if none were sent since the process started
    life      identifies the process; None if the server does not report it
    """

    version: int | None
    life: str | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sample from a server's response."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str


class HttpEngine(ABC):
    """name       for errors
    stop_ids   the model's end-of-sequence tokens, as in the core
    timeout    seconds for one call of generate
    server     the process, if it was started here; closed with the engine
    wire       the control connection of a weight channel
    """

    wire: HttpWire

    def __init__(
        self, url: str, *, name: str, stop_ids: Sequence[int], timeout: float, server: EngineServer | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.name = f"{name} at {self.url}"
        self.stop_ids = tuple(sorted(stop_ids))
        self.timeout = timeout
        self.server = server
        self.version: int | None = None
        self.loading = False  # a weight update, which may take long
        self._life: str | None = None
        self._weights = threading.RLock()  # acquired while the weights change
        # The address is the recipe's: redirects are not followed, and proxies of the environment not used.
        self._ssl = httpx.create_ssl_context(trust_env=False)  # once: creating it costs more than a short call
        self._http = httpx.Client(
            base_url=self.url, follow_redirects=False, trust_env=False, timeout=CONTROL, verify=self._ssl
        )

    # The protocol of a server

    @abstractmethod
    def request(self, prompt: Sequence[int], params: SamplingParams) -> tuple[str, dict[str, Any]]:
        """Path and body of the request for a prompt's samples."""

    @abstractmethod
    def drawn(self, reply: Any) -> list[Drawn]:
        """The samples in a response."""

    @abstractmethod
    def logprobs_of(
        self, prompt: Sequence[int], params: SamplingParams, drawn: Drawn
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Under the distribution that was sampled, and under the model's own."""

    @abstractmethod
    def state(self) -> State: ...

    @abstractmethod
    def beat(self, seconds: float) -> None:
        """Raises EngineError unless all its processes are alive: one may also hang, or be stopped."""

    @abstractmethod
    def pause(self) -> None:
        """Nothing is computed until resume(); requests stay queued."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def forget(self) -> None:
        """Drop all cached KV."""

    @abstractmethod
    def top_logprobs(self, context: Sequence[int], count: int) -> dict[int, float]:
        """The most likely next tokens, through the same path as any generation."""

    # Generation

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], begun: object = None
    ) -> list[Sample]:
        """As `Engine.generate`: all samples of the first prompt, then the second's."""
        if begun is not None:
            raise RequestError(f"{self.name} cannot continue samples of another engine: use the core")
        if len(prompts) != len(params):
            raise RequestError(f"{len(prompts)} prompts and {len(params)} SamplingParams: pass one per prompt")
        for name in (name for option in params for name in option.core_only()):
            raise RequestError(f"{name} is not supported by {self.name}: remove it, or use the core")
        version = self.version
        if version is None:
            raise StaleWeights(f"{self.name} has received no weights yet: publish weights before generating")
        replies = asyncio.run(self._request_all(prompts, params))
        self.check_state()
        samples = []
        for group, (prompt, options, reply) in enumerate(zip(prompts, params, replies, strict=True)):
            if isinstance(reply, ItemError):
                samples += [_aborted(prompt, group, index, reply) for index in range(options.n)]
                continue
            drawn = self.drawn(reply)
            if len(drawn) != options.n or any(len(d.token_ids) != len(d.logprobs) for d in drawn):
                raise BadReply(
                    f"{self.name} returned {len(drawn)} samples for n = {options.n}, or not one log-prob per token"
                )
            samples += [self._sample(prompt, group, i, options, d, version) for i, d in enumerate(drawn)]
        return samples

    def _sample(
        self, prompt: Sequence[int], group: int, index: int, params: SamplingParams, drawn: Drawn, version: int
    ) -> Sample:
        """If weights changed during generation, all tokens count as the older version's: the server does not report
        which are."""
        count = len(drawn.token_ids)
        logprobs, raw = self.logprobs_of(prompt, params, drawn)
        known = params.reshapes and params.temperature == 1 and not any(map(math.isnan, raw))
        return Sample(
            tuple(prompt), tuple(drawn.token_ids), drawn.text, tuple(logprobs), tuple(raw), (version,) * count,
            (1,) * count, _finish_reason(drawn.finish_reason), group=group, index=index,
            tempered_logprobs=tuple(raw) if known else None,
        )  # fmt: skip

    def healthy(self) -> bool:
        """Whether it can generate a token."""
        try:
            self.top_logprobs([self.stop_ids[0] if self.stop_ids else 0], 1)
        except EngineError:
            return False
        return True

    def check_state(self) -> None:
        """Raise unless the server has the weights that were sent to it."""
        with self._weights:
            state = self.state()
        if self._life is not None and state.life != self._life:
            self.version = None
            raise StaleWeights(f"{self.name} was restarted and has its initial weights: publish before generating")
        if state.version != self.version:
            raise StaleWeights(f"{self.name} has weights of version {state.version}, expected {self.version}")

    def new_version(self, version: int | None) -> None:
        """Record the version that it received; None: unknown."""
        self.version = version
        self._life = self.state().life

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is computed; afterwards no KV computed before is used."""
        with self._weights:
            self.pause()
            try:
                yield
                self.forget()
            finally:
                self.resume()

    def close(self) -> None:
        self._http.close()
        if self.server is not None:
            self.server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Internal

    def control(self, method: str, path: str, body: Any = None, seconds: float = CONTROL, **query: Any) -> Any:
        """One request that is not retried."""
        try:
            reply = self._http.request(method, path, json=body, params=query or None, timeout=seconds)
        except httpx.TransportError as error:
            raise self.lost(error) from error
        if reply.status_code != 200:
            raise EngineError(f"{self.name} answered {method} {path} with {reply.status_code}: {_error_text(reply)}")
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        return reply.json() if is_json and reply.content else None

    def lost(self, error: Exception) -> EngineLost:
        if self.server is not None:
            self.server.check()  # raises with the reason why it ended
        return EngineLost(f"{self.name} does not answer: {type(error).__name__} {one_line(error)}")

    async def _request_all(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[dict[str, Any] | ItemError]:
        limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
        times = httpx.Timeout(None, connect=CONNECT)
        async with httpx.AsyncClient(
            base_url=self.url, limits=limits, timeout=times, follow_redirects=False, trust_env=False, verify=self._ssl
        ) as http:
            requests = [self._ask(http, prompt, options) for prompt, options in zip(prompts, params, strict=True)]
            answers = asyncio.gather(*requests)
            watch = asyncio.create_task(self._watch())
            both: set[asyncio.Future[Any]] = {answers, watch}
            try:
                done, _ = await asyncio.wait(both, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
                if answers in done:
                    return answers.result()
                if watch in done:
                    watch.result()
                raise EngineLost(
                    f"{self.name} did not finish {len(prompts)} prompts within engine.timeout = {self.timeout:g} s"
                )
            finally:
                watch.cancel()
                answers.cancel()
                await asyncio.gather(answers, watch, return_exceptions=True)

    async def _watch(self) -> None:
        """Returns only by raising an error."""
        while True:
            await asyncio.sleep(BEAT_EVERY)
            if not self.loading:
                await asyncio.to_thread(self.beat, BEAT_SECONDS)

    async def _ask(
        self, http: httpx.AsyncClient, prompt: Sequence[int], params: SamplingParams
    ) -> dict[str, Any] | ItemError:
        path, body = self.request(prompt, params)
        try:
            async with asyncio.timeout(params.deadline):
                return await self._post(http, path, body)
        except TimeoutError:
            return ItemError("Aborted", f"ran past its deadline of {params.deadline} s")

    async def _post(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        pause, away_since = 0.1, time.monotonic()
        while True:
            try:
                reply = await http.post(path, json=body)
            except httpx.TransportError as error:
                if time.monotonic() - away_since > AWAY or (self.server is not None and not self.server.alive):
                    raise self.lost(error) from error
            else:
                away_since = time.monotonic()
                if reply.status_code == 200:
                    payload: dict[str, Any] = reply.json()
                    return payload
                if reply.status_code == 400:
                    raise RequestError(
                        f"{self.name} rejected a prompt of {len(body.get('prompt', ()))} tokens: {_error_text(reply)}"
                    )
                if reply.status_code not in AGAIN:
                    raise EngineError(f"{self.name} answered with {reply.status_code}: {_error_text(reply)}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, CONNECT)


def _aborted(prompt: Sequence[int], group: int, index: int, error: ItemError) -> Sample:
    return Sample(tuple(prompt), (), "", (), (), (), (), "abort", group=group, index=index, error=error)


def _finish_reason(name: str) -> FinishReason:
    if name in ("stop", "length", "abort"):
        return name  # type: ignore[return-value]
    return "stop" if name == "repetition" else "error"


def _error_text(reply: httpx.Response) -> str:
    try:
        error = reply.json().get("error", reply.text)
        text = error.get("message", reply.text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        text = reply.text
    return one_line(ValueError(text))
