"""OpenRLHF and slime: trainers that post samples and receive rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from plaudit.errors import one_line
from plaudit.models.text import codec_of
from plaudit.records import Item, Score, StepScores
from plaudit.serve.http.message import HttpError, Reply, Request, Route
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.protocol import ProtocolRoutes, sound
from plaudit.serve.scoring import REWARD_MODEL

Truncate = Literal["left", "right"] | None
T = TypeVar("T", bound=msgspec.Struct)


class Queries(msgspec.Struct):
    query: list[str]
    prompts: Any = None
    labels: Any = None

    def item(self, place: int, truncate: Truncate) -> Item:
        """The item at `place`, with prompt and response separated."""
        query, prompt = self.query[place], self._beside(self.prompts, place)
        if not isinstance(prompt, str) or prompt not in query:
            raise HttpError(
                422, "unsupported_form", f"query[{place}] does not contain prompts[{place}], but a rule, judge or "
                "blend needs to know where the response begins",
            )  # fmt: skip
        response = query[query.index(prompt) + len(prompt) :]
        return Item(prompt=prompt, response=response, truth=self._beside(self.labels, place), truncate=truncate)

    def _beside(self, values: Any, place: int) -> Any:
        """The value for one query; the oldest clients send none."""
        return values[place] if isinstance(values, list) and len(values) == len(self.query) else None


class Sample(msgspec.Struct):
    prompt: str | list[dict[str, Any]]
    response: str
    label: Any = None

    def item(self, rendered: str, truncate: Truncate) -> Item:
        if rendered not in ("true", "false"):
            raise HttpError(422, "invalid_request", f"rendered is {rendered[:20]!r}; expected true or false")
        if rendered == "false":
            prompt = self.prompt if isinstance(self.prompt, str) else tuple(self.prompt)
            return Item(prompt=prompt, response=self.response, truth=self.label, truncate=truncate)
        if not isinstance(self.prompt, str):
            raise HttpError(422, "invalid_request", "rendered=true, and the prompt is a list of messages")
        return Item(text=self.prompt + self.response, truth=self.label, truncate=truncate)


class OpenRLHFRoutes(ProtocolRoutes):
    """OpenRLHF's remote reward model: `POST /get_reward`.

        in    {"query": ["<whole text, rendered>", ...], "prompts": [...], "labels": [...]}   (the oldest: query alone)
        out   {"rewards": [0.7, ...], "scores": [0.7, ...], "extra_logs": {"helpfulness": [...]}}

    A client with several URLs sends empty lists to all but one and expects 200 for them. The protocol has no error for
    a single query: a failed query fails its request. Text that is too long is rejected, where the original silently
    truncates the end of the response; `/get_reward?truncate=left` (or `right`) enables truncation.
    `?model=NAME` selects another model than `reward_model`.

    Models read the query. Rules, judges and blends read prompt and response: the query is split at the end of its
    prompt.
    """

    name = "openrlhf"
    fields = False

    def routes(self) -> list[Route]:
        summary = "OpenRLHF: rewards of texts"
        return [self.work("/get_reward", self.get_reward, summary, parameters=("model", "truncate"))]

    async def get_reward(self, request: Request) -> Reply:
        parameters = request.parameters()
        queries = await request.aside(read_queries)
        truncate = read_truncate(parameters)
        self.scoring.check_count(len(queries.query))
        served = self.scoring.find(parameters.get("model", REWARD_MODEL))
        if isinstance(served, ServedModel) and served.kind != "judge":
            # The query is rendered completely: the tokenizer adds no special tokens.
            rows = sound(await served.tokenise(queries.query, special=False), "query")
            items = [Item(tokens=tuple(row), truncate=truncate) for row in rows]
        else:
            items = [queries.item(place, truncate) for place in range(len(queries.query))]
        scored = await self.scoring.score(request, served, items)
        values = self.scoring.values(scored.results, "query")
        return Reply.json({"rewards": values, "scores": values, "extra_logs": attribute_logs(scored.results)})


class SlimeRoutes(ProtocolRoutes):
    """slime's `--rm-type remote_rm --rm-url http://host:5555/remote_rm`: one sample per request.

        in    {"prompt": "..." or [messages], "response": "...", "label": "..."}
        out   0.73, or with ?key=reward (and slime's --reward-key reward) {"reward": 0.73}

    With `?rendered=true` prompt and response are one rendered text, as `--apply-chat-template` produces: control
    strings in them are control tokens. Without it they are plain text, and a prompt that begins with a control token
    is rejected, because its score would be that of another text. `?model=NAME` selects another model than
    `reward_model`.
    """

    name = "slime"
    fields = False

    def routes(self) -> list[Route]:
        names = ("model", "truncate", "rendered", "key")
        return [self.work("/remote_rm", self.remote_rm, "slime: reward of a response", parameters=names)]

    async def remote_rm(self, request: Request) -> Reply:
        parameters = request.parameters()
        sample = await request.aside(read_sample)
        served = self.scoring.find(parameters.get("model", REWARD_MODEL))
        if "rendered" not in parameters and isinstance(served, ServedModel):
            refuse_rendered(sample.prompt, served)
        item = sample.item(parameters.get("rendered", "false"), read_truncate(parameters))
        scored = await self.scoring.score(request, served, [item])
        (value,) = self.scoring.values(scored.results, "sample")
        key = parameters.get("key")
        return Reply.json(value if key is None else {key: value})


def refuse_rendered(prompt: Any, served: ServedModel) -> None:
    """Rejects a prompt that begins with a control token: a chat template has already been applied to it."""
    controls = codec_of(served.intake().tokenizer).controls.values()
    begin = next((text for text in controls if isinstance(prompt, str) and prompt.startswith(text)), None)
    if begin is not None:
        raise HttpError(
            422, "unsupported_form", f"the prompt begins with {begin!r}, a control token of {served.name}, so it looks "
            "already rendered: add ?rendered=true to the URL, or ?rendered=false if it is plain text",
        )  # fmt: skip


def read_queries(body: bytes) -> Queries:
    return decode(body, Queries, "query must be a list of texts")


def read_sample(body: bytes) -> Sample:
    return decode(body, Sample, "expected prompt, response and label")


def decode(body: bytes, kind: type[T], expected: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(422, "invalid_request", f"{expected}: {one_line(error, 200)}") from None


def read_truncate(query: Mapping[str, str]) -> Truncate:
    side = query.get("truncate")
    if side is None or side == "left" or side == "right":
        return side  # type: ignore[return-value]
    raise HttpError(422, "invalid_request", f"truncate is {side[:20]!r}; expected left or right")


def attribute_logs(results: Sequence[Score | StepScores]) -> dict[str, list[float]]:
    attributes = [result.attributes if isinstance(result, Score) else {} for result in results]
    if not attributes or not all(attributes):
        return {}
    return {name: [float(a[name]) for a in attributes] for name in attributes[0]}
