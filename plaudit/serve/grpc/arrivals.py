"""Memory for messages that are arriving.

gRPC reports the size of a message only when all of it is there. Until then each counts as the largest that is accepted,
and the next one stays with its client, whose stream is blocked by flow control after 64 KiB.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from plaudit.serve.http.app import Quota


class Arrivals:
    """Admits messages while `quota` has `size` bytes left, tenant by tenant."""

    def __init__(self, quota: Quota, size: int) -> None:
        self._quota = quota
        self._size = size
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def one(self, tenant: str) -> AsyncIterator[None]:
        if tenant not in self._waiting and self._fits(tenant):
            self._quota.take(tenant, self._size)
        else:
            await self._turn(tenant)
        try:
            yield
        finally:
            self._free(tenant)

    async def _turn(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted, but the waiter has been cancelled
                self._free(tenant)
            raise

    def _fits(self, tenant: str) -> bool:
        return self._quota.fits(tenant, self._size) or not self._quota.in_use

    def _free(self, tenant: str) -> None:
        self._quota.take(tenant, -self._size)
        for name, turns in tuple(self._waiting.items()):
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns and self._fits(name):
                self._quota.take(name, self._size)
                turns.popleft().set_result(None)
                self._waiting[name] = self._waiting.pop(name)  # to the end
            if not turns:
                del self._waiting[name]
