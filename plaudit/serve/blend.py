"""A model that combines the scores of other models of the same server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from plaudit.config.reward import BlendTable
from plaudit.records import Item
from plaudit.reward.blend import combine
from plaudit.reward.version import joined
from plaudit.serve.handle import ModelHandle, ModelStatus, RequestContext, ScoredItems


class ServedBlend:
    """Scores with all member models and combines their scores with one function."""

    def __init__(self, name: str, table: BlendTable, members: Mapping[str, ModelHandle]) -> None:
        self.name = name
        self.kind = "blend"
        self._table = table
        self._members = {member: members[member] for member in table.members}

    async def score(self, items: Sequence[Item], context: RequestContext) -> ScoredItems:
        tasks = [asyncio.create_task(member.score(items, context)) for member in self._members.values()]
        try:
            scored = dict(zip(self._members, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
        version = joined((s.version for s in scored.values()), self._table)
        results = [combine(self._table, {name: s.results[i] for name, s in scored.items()}) for i in range(len(items))]
        return ScoredItems(version, list(results), sum(s.tokens for s in scored.values()))

    async def healthy(self) -> str:
        return ""  # its members report their own state

    def status(self) -> ModelStatus:
        return ModelStatus(self.name, self.kind, "")

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        pass
