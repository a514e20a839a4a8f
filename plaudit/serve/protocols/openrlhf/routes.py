"""OpenRLHF and slime: trainers that post what they have sampled and read a number."""

from __future__ import annotations

from collections.abc import Mapping

from plaudit.records import Item, ItemError
from plaudit.serve.http.message import ErrorWriter, HttpError, Reply, Request, Route
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.openrlhf import slime_wire as slime
from plaudit.serve.protocols.openrlhf import wire as openrlhf
from plaudit.serve.scoring import REWARD_MODEL, ScoringService


class OpenRLHFRoutes:
    shapes: Mapping[str, ErrorWriter] = {}

    def __init__(self, scoring: ScoringService) -> None:
        self.scoring = scoring

    def routes(self) -> list[Route]:
        return [Route("POST", "/get_reward", "key", self.get_reward, "openrlhf", True, "OpenRLHF: rewards of texts")]

    async def get_reward(self, request: Request) -> Reply:
        parsed = openrlhf.read(request.content, request.parameters())
        self.scoring.check_count(len(parsed.queries))
        served = self.scoring.find(REWARD_MODEL)
        if isinstance(served, ServedModel) and served.kind != "judge":
            # Rendered with everything in it: the tokenizer adds nothing.
            rows = await served.tokenise(parsed.queries, special=False)
            for place, row in enumerate(rows):
                if isinstance(row, ItemError):
                    raise HttpError(422, row.type, f"query[{place}]: {row.message}")
            items = [
                Item(tokens=tuple(row), truncate=parsed.truncate) for row in rows if not isinstance(row, ItemError)
            ]
        else:
            items = [parsed.item(place) for place in range(len(parsed.queries))]
        scored = await self.scoring.score(request, served, items)
        return Reply.json(openrlhf.write(scored.results, self.scoring.values(scored.results, "query")))


class SlimeRoutes:
    shapes: Mapping[str, ErrorWriter] = {}

    def __init__(self, scoring: ScoringService) -> None:
        self.scoring = scoring

    def routes(self) -> list[Route]:
        return [Route("POST", "/remote_rm", "key", self.remote_rm, "slime", True, "slime: reward of a response")]

    async def remote_rm(self, request: Request) -> Reply:
        parsed = slime.read(request.content, request.parameters())
        scored = await self.scoring.score(request, self.scoring.find(REWARD_MODEL), [parsed.item])
        (value,) = self.scoring.values(scored.results, "sample")
        return Reply.json(slime.write(value, parsed.key))
