"""OpenRLHF and slime: trainers that post what they have sampled and read a number."""

from __future__ import annotations

from collections.abc import Mapping

from plaudit.records import Item, ItemError
from plaudit.serve.http.message import ErrorWriter, HttpError, Reply, Request, Route
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.openrlhf import slime_wire as slime
from plaudit.serve.protocols.openrlhf import wire as openrlhf
from plaudit.serve.scoring import REWARD_MODEL, ScoringService


class OpenRLHFDoor:
    shapes: Mapping[str, ErrorWriter] = {}

    def __init__(self, desk: ScoringService) -> None:
        self.desk = desk

    def routes(self) -> list[Route]:
        return [Route("POST", "/get_reward", "key", self.get_reward, "openrlhf", True, "OpenRLHF: rewards of texts")]

    async def get_reward(self, request: Request) -> Reply:
        asked = openrlhf.read(request.content, request.parameters())
        self.desk.check_count(len(asked.queries))
        served = self.desk.find(REWARD_MODEL)
        if isinstance(served, ServedModel) and served.kind != "judge":
            # Rendered with everything in it: the tokenizer adds nothing.
            rows = await served.tokenise(asked.queries, special=False)
            for place, row in enumerate(rows):
                if isinstance(row, ItemError):
                    raise HttpError(422, row.type, f"query[{place}]: {row.message}")
            items = [Item(tokens=tuple(row), truncate=asked.truncate) for row in rows if not isinstance(row, ItemError)]
        else:
            items = [asked.item(place) for place in range(len(asked.queries))]
        scored = await self.desk.score(request, served, items)
        return Reply.json(openrlhf.write(scored.results, self.desk.values(scored.results, "query")))


class SlimeDoor:
    shapes: Mapping[str, ErrorWriter] = {}

    def __init__(self, desk: ScoringService) -> None:
        self.desk = desk

    def routes(self) -> list[Route]:
        return [Route("POST", "/remote_rm", "key", self.remote_rm, "slime", True, "slime: reward of a response")]

    async def remote_rm(self, request: Request) -> Reply:
        asked = slime.read(request.content, request.parameters())
        scored = await self.desk.score(request, self.desk.find(REWARD_MODEL), [asked.item])
        (value,) = self.desk.values(scored.results, "sample")
        return Reply.json(slime.write(value, asked.key))
