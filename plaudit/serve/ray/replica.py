"""A replica of a model under Ray Serve: a deployment of one local worker, and a TCP port to which servers connect.

The worker is the same process as on a single machine, with its ranks if the model has several; it is restarted here
when it crashes. Ray Serve checks its health with a probe through the model, and replaces replicas that fail.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import ray.util
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig

from plaudit.config.reward import ReadByEngine, parse_reward
from plaudit.process.guard import guard_this_process
from plaudit.process.spawn import spawn_new_processes
from plaudit.records import ItemError
from plaudit.reward.work import Work
from plaudit.serve.metrics import Metrics
from plaudit.serve.workers import frames
from plaudit.serve.workers.autoscale import DOWN_SECONDS, UP_SECONDS
from plaudit.serve.workers.cache import ScoreCache
from plaudit.serve.workers.deployment import Deployment
from plaudit.serve.workers.jobs import Answer, GenerateJob, Ticket

TOKEN_BYTES = 32
TOKEN_SECONDS = 10.0
ALIVE_EVERY = 1.0
HEALTH_SECONDS = 2.0
STALE_SECONDS = 10.0  # the server's report of its queue length expires after this time


class ModelReplica:
    """Servers connect over TCP with a token distributed by Ray, and exchange the same frames as with a local worker."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, table: dict[str, Any], environment: dict[str, str], load_seconds: float, host: str | None
    ) -> None:
        # Ray Serve waits long for an unresponsive replica; one that has exited is replaced at once.
        guard_this_process("a replica")
        spawn_new_processes()
        self.deployment = Deployment(
            "model", 0, table, ScoreCache(0), Metrics(), environment, load_seconds, lambda: None
        )  # fmt: skip
        self.table = table
        self.hello = await self.deployment.opened()
        self.replica_id = serve.get_replica_context().replica_id.unique_id
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.host = host or ray.util.get_node_ip_address()
        self.server = await asyncio.start_server(self._accept, self.host, 0)
        self.waiting = (0.0, 0)

    async def configured(self, *, replica_id: str) -> dict[str, Any]:
        return self.table

    async def address(self, *, replica_id: str) -> tuple[str, int, bytes] | None:
        """The address and the token for servers; None if the call was meant for another replica."""
        return (
            (self.host, self.server.sockets[0].getsockname()[1], self.token) if replica_id == self.replica_id else None
        )

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TOKEN_SECONDS):
                token = await reader.readexactly(TOKEN_BYTES)
            if hmac.compare_digest(token, self.token):
                await ServerConnection(self, writer).run(reader)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            writer.close()

    async def check_health(self) -> None:
        why = await self.deployment.healthy()
        if why:
            raise RuntimeError(why)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        at, waiting = self.waiting
        return {"waiting": float(waiting) if time.monotonic() - at < STALE_SECONDS else 0.0}

    async def __del__(self) -> None:
        if hasattr(self, "server"):
            self.server.close()
        if hasattr(self, "deployment"):
            await self.deployment.close()


class ServerConnection:
    """The connection of one server."""

    def __init__(self, replica: ModelReplica, writer: asyncio.StreamWriter) -> None:
        self.replica = replica
        self.writer = writer
        self._open: dict[int, Ticket] = {}
        self._done: list[int] = []

    async def run(self, reader: asyncio.StreamReader) -> None:
        alive = asyncio.create_task(self._send_heartbeats())
        unpacker = frames.Unpacker()
        try:
            self._send(self.replica.hello)
            self._send(frames.Ready())
            while data := await reader.read(1 << 20):
                for frame in unpacker.feed(data):
                    self._take(frame)
        finally:
            alive.cancel()
            for ticket in self._open.values():
                self.replica.deployment.cancel(ticket)

    def _take(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Waiting():
                self.replica.waiting = (time.monotonic(), frame.tokens)
            case frames.Cancel():
                for id in frame.ids:
                    if (ticket := self._open.pop(id, None)) is not None:
                        self.replica.deployment.cancel(ticket)
            case _:
                for id, work, salt in _works(frame):
                    ticket = self.replica.deployment.submit([work], tenant="", salt=salt, cached=False)
                    self._open[id] = ticket
                    ticket.done.add_done_callback(partial(self._finished, id))

    def _finished(self, id: int, _: asyncio.Future[None]) -> None:
        """Collects answers finished in one iteration of the event loop into one frame."""
        self._done.append(id)
        if len(self._done) == 1:
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        done, self._done = self._done, []
        answers = [(id, self._open.pop(id).answers[0]) for id in done if id in self._open]
        self._send(_results(answers, self.replica.deployment))

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_EVERY)
            worker = self.replica.deployment.replicas
            self._send(worker[0].wire.alive if worker else frames.Alive(0))

    def _send(self, frame: frames.Frame) -> None:
        if not self.writer.is_closing():
            self.writer.write(frames.pack(frame))


def _results(answers: list[tuple[int, Answer | None]], deployment: Deployment) -> frames.Results:
    values = [(id, answer) for id, answer in answers if isinstance(answer, np.ndarray)]
    counts = deployment.counts
    return frames.Results(
        ids=[id for id, _ in values],
        rows=[v.shape[0] for _, v in values],
        columns=[v.shape[1] for _, v in values],
        values=b"".join(np.ascontiguousarray(v, dtype="<f4").tobytes() for _, v in values),
        errors=[(id, answer.type, answer.message) for id, answer in answers if isinstance(answer, ItemError)],
        texts=[],
        tokens_computed=counts.computed,
        tokens_shared=counts.prefix,
        steps=counts.steps,
        budget=deployment.budget,
        pieces=[
            frames.TextPiece(
                id, index, 0, sample.tokens, sample.logprobs, 0, sample.text, sample.finish, sample.top, sample.prompt,
                sample.prompt_top, sample.prompt_ranks, sample.stop,
            )
            for id, answer in answers if isinstance(answer, list)
            for index, sample in enumerate(answer)
        ],
    )  # fmt: skip


class ByTokens:
    """An autoscaling policy: one replica per given number of tokens queued in the servers."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reported = (context.aggregated_metrics or {}).get("waiting", {})
        replicas = -(-int(max(reported.values(), default=0.0)) // self.tokens)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(high, replicas)), context.policy_state


def build(args: Mapping[str, Any]) -> serve.Application:
    """The Ray Serve application for a model's table, as `plaudit deploy` writes it. `host` is the address on which
    replicas listen for servers; without it each listens on its node's address."""
    table = parse_reward(args["table"], "the model's table")
    ranks = table.ranks if isinstance(table, ReadByEngine) else 1
    on_gpu = str(getattr(table, "device", "cpu")).startswith("cuda")
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": ranks, "num_gpus": ranks if on_gpu else 0},
        "health_check_period_s": HEALTH_SECONDS,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": 30.0,
        "request_router_config": RequestRouterConfig(request_router_class="plaudit.serve.ray.router:ReplicaRouter"),
    }
    if isinstance(table, ReadByEngine) and table.max_replicas is not None:
        policy = AutoscalingPolicy(
            policy_function="plaudit.serve.ray.replica:ByTokens", policy_kwargs={"tokens": table.replica_tokens}
        )
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=table.replicas, max_replicas=table.max_replicas, policy=policy, upscale_delay_s=UP_SECONDS,
            downscale_delay_s=DOWN_SECONDS,
        )  # fmt: skip
    else:
        options["num_replicas"] = getattr(table, "replicas", 1)
    deployment = serve.deployment(ModelReplica, name="model", **options)
    environment, seconds = dict(args["environment"]), float(args["load_seconds"])
    return deployment.bind(dict(args["table"]), environment, seconds, args.get("host"))


def _works(frame: frames.Frame) -> list[tuple[int, Work | GenerateJob, str]]:
    match frame:
        case frames.Works():
            tokens, positions = frames.cut(frame.tokens, frame.lengths), frames.cut(frame.positions, frame.counts)
            parts = zip(frame.ids, tokens, positions, frame.columns, frame.logprobs, frame.salts, strict=True)
            return [
                (id, Work(ids, tuple(at), columns, steps=0, truncated=False, logprobs=logprobs), salt)
                for id, ids, at, columns, logprobs, salt in parts
            ]
        case frames.GenerateFrame():
            (ids,) = frames.cut(frame.tokens, [len(frame.tokens) // 4])
            return [(frame.id, GenerateJob(ids, frame.sampling), frame.salt)]
        case _:
            raise ValueError(f"unexpected frame {type(frame).__name__} for a replica")
