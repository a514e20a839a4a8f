"""A reward in this process behind the client: no socket, but the same records and checks."""

from __future__ import annotations

import asyncio

import httpx
import msgspec

from plaudit.records import Score
from plaudit.reward.reward import Reward
from plaudit.serve.http.message import HttpError
from plaudit.serve.protocols.native import wire as native

MOST_ITEMS = 4096


class InProcess(httpx.AsyncBaseTransport):
    """`RewardClient(transport=InProcess(reward))`. Closing the reward is up to its owner."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        # Rules and models have a version; a reward without one cannot change while it exists.
        self._version: str = getattr(reward, "version", "in-process")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            content = await self._answer(await request.aread())
        except HttpError as error:
            return httpx.Response(error.status, json={"error": {"type": error.type, "message": str(error)}})
        return httpx.Response(200, content=content)

    async def _answer(self, body: bytes) -> bytes:
        request = native.read_json(body, MOST_ITEMS)
        items = [item for group in request.groups if not isinstance(group, str) for item in group]
        results = await asyncio.to_thread(self._reward.score, items)
        if len(results) != len(items):
            raise RuntimeError(f"the reward returned {len(results)} results for {len(items)} items")
        if request.steps and any(isinstance(result, Score) for result in results):
            raise HttpError(422, "not_a_process_model", "this is not a process model, so it has no step scores")
        remaining = iter(results)
        groups = [group if isinstance(group, str) else [next(remaining) for _ in group] for group in request.groups]
        usage = {"items": len(items), "tokens": sum(result.tokens for result in results)}
        return msgspec.json.encode(native.write_json(request, request.model or "", self._version, groups, usage, ""))
