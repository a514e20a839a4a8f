"""vLLM's pooling server: /classify, /pooling, /score, /rerank, /tokenize; and /v1/embeddings as OpenAI's clients ask.

What cannot be scored fails its request, as it does there: these replies have no place for an error of one input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from plaudit import __version__
from plaudit.records import ItemError
from plaudit.reward.embedding import EmbeddingReading
from plaudit.serve.http.message import ErrorWriter, Handler, HttpError, Reply, Request, Route
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.classifier import Chat, Classifier, Cut, Prompt, Text, activate
from plaudit.serve.protocols.vllm import wire as vllm
from plaudit.serve.scoring import EMBEDDING_MODEL, ScoringService


class VllmDoor:
    shapes: Mapping[str, ErrorWriter] = {}

    def __init__(self, desk: ScoringService) -> None:
        self.desk = desk
        self.classifier = Classifier(desk)

    def routes(self) -> list[Route]:
        return [
            _route("/classify", self.classify, "vLLM: probabilities of labels, or raw rewards"),
            _route("/pooling", self.pooling, "vLLM: the head's output for a text, its tokens or its steps"),
            _route("/v1/embeddings", self.embeddings, "OpenAI: vectors of a text, or its raw reward as one"),
            *(_route(path, self.score, "vLLM: scores of pairs of texts") for path in ("/score", "/v1/score")),
            *(
                _route(path, self.rerank, "vLLM: documents sorted by score")
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
            _route("/tokenize", self.tokenize, "vLLM: text or messages to token ids"),
            _route("/detokenize", self.detokenize, "vLLM: token ids to text"),
            Route("GET", "/version", "open", self.version, "vllm", summary="vLLM: the release of this server"),
        ]

    async def classify(self, request: Request) -> Reply:
        asked = vllm.read_inputs(_fields(request))
        served = self.classifier.find(asked.asked.model, "outcome")
        tokens = await self._tokens(served, _prompts(asked), asked.asked)
        rows = await self.classifier.logits(request, served, tokens, asked.asked.priority)
        if asked.asked.activate is not False:
            rows = [activate(row) for row in rows]
        labels = served.intake().facts.labels
        return Reply.json(
            vllm.classification(_id(request, asked.asked), served.name, rows, labels, sum(map(len, tokens)))
        )

    async def pooling(self, request: Request) -> Reply:
        asked = vllm.read_inputs(_fields(request))
        if asked.dimensions is not None:
            raise vllm.FieldError("dimensions is currently not supported", "dimensions")
        served = self.classifier.find(asked.asked.model)
        every = asked.task == "token_classify" or (asked.task is None and served.kind == "process")
        if not every and served.kind == "process":
            raise vllm.FieldError("Unsupported task: 'classify' Supported tasks: ['token_classify']", "task")
        tokens = await self._tokens(served, _prompts(asked), asked.asked)
        read = self.classifier.rows if every else self.classifier.logits
        rows = await read(request, served, tokens, asked.asked.priority)
        if asked.asked.activate is not False:
            rows = [activate(row) for row in rows]
        data = [asked.encode(row) for row in rows]
        return Reply.json(vllm.pooled(_id(request, asked.asked), served.name, data, sum(map(len, tokens))))

    async def embeddings(self, request: Request) -> Reply:
        """Raw unless asked otherwise: an activation would bend rewards into 0..1 for clients that cannot say no."""
        asked = vllm.read_inputs(_fields(request))
        encoder = self._encoder(asked.asked.model)
        if encoder is not None:
            return await self._vectors(request, asked, encoder)
        served = self.classifier.find(asked.asked.model, "outcome")
        size = len(served.intake().facts.labels)
        if asked.dimensions not in (None, size):
            raise vllm.FieldError(f"dimensions is {asked.dimensions}, and {served.name} has {size}", "dimensions")
        tokens = await self._tokens(served, _prompts(asked), asked.asked)
        rows = await self.classifier.logits(request, served, tokens, asked.asked.priority)
        if asked.asked.activate:
            rows = [activate(row) for row in rows]
        data = [asked.encode(row) for row in rows]
        return Reply.json(vllm.embeddings(_id(request, asked.asked), served.name, data, sum(map(len, tokens))))

    def _encoder(self, name: str | None) -> ServedModel | None:
        """A sentence encoder of this name; without a name the first one, if there is one."""
        asked = name or EMBEDDING_MODEL
        served = self.desk.models.served.get(self.desk.aliases.get(asked, asked))
        return served if isinstance(served, ServedModel) and served.kind == "embedding" else None

    async def _vectors(self, request: Request, asked: vllm.VllmInputs, served: ServedModel) -> Reply:
        tokens = await self._tokens(served, _prompts(asked), asked.asked)
        works = [EmbeddingReading.work(row) for row in tokens]
        _, answers = await self.desk.read(request, served, works, priority=asked.asked.priority)
        data = []
        for place, answer in enumerate(answers):
            if not isinstance(answer, np.ndarray):
                assert isinstance(answer, ItemError)
                raise HttpError(500, answer.type, f"input[{place}]: {answer.message}")
            if asked.dimensions not in (None, answer.size):
                found = f"dimensions is {asked.dimensions}, and {served.name} has {answer.size}"
                raise vllm.FieldError(found, "dimensions")
            data.append(asked.encode(answer[0]))
        return Reply.json(vllm.embeddings(_id(request, asked.asked), served.name, data, sum(map(len, tokens))))

    async def score(self, request: Request) -> Reply:
        asked = vllm.read_pairs(_fields(request), rerank=False)
        served, values, tokens = await self._scored(request, asked)
        return Reply.json(vllm.scores(_id(request, asked.asked), served.name, values, tokens))

    async def rerank(self, request: Request) -> Reply:
        asked = vllm.read_pairs(_fields(request), rerank=True)
        served, values, tokens = await self._scored(request, asked)
        id = _id(request, asked.asked)
        return Reply.json(vllm.reranked(id, served.name, asked.documents, values, asked.top, tokens))

    async def tokenize(self, request: Request) -> Reply:
        asked = vllm.read_tokenize(_fields(request))
        served = self.classifier.find(asked.asked.model)
        intake = served.intake()
        prompt: Prompt
        if asked.messages is not None:
            prompt = Chat(asked.messages, asked.opening)
        else:
            prompt = Text(asked.prompt or "", special=asked.special)
        tokens = await self.classifier.spelled(served, prompt)
        strings = intake.tokenizer.convert_ids_to_tokens(tokens) if asked.strings else None
        return Reply.json(vllm.tokenized(tokens, strings, intake.limit))

    async def detokenize(self, request: Request) -> Reply:
        asked = vllm.read_detokenize(_fields(request))
        tokenizer = self.classifier.find(asked.asked.model).intake().tokenizer
        # As vLLM: what is no token is no text.
        known = [token for token in asked.tokens if token < len(tokenizer)]
        return Reply.json({"prompt": tokenizer.decode(known)})

    async def version(self, request: Request) -> Reply:
        return Reply.json({"version": __version__})

    async def _scored(self, request: Request, asked: vllm.Pairs) -> tuple[ServedModel, list[float], int]:
        served = self.classifier.find(asked.asked.model, "outcome")
        intake = served.intake()
        if len(intake.facts.labels) != 1:
            raise HttpError(
                400, "wrong_kind", f"{served.name} has {len(intake.facts.labels)} labels, a score needs one: /classify"
            )
        for name, most in (("query", asked.query_tokens), ("doc", asked.document_tokens)):
            if most >= intake.limit:
                raise vllm.FieldError(f"max_tokens_per_{name} ({most}) must be less than {intake.limit}", None)
        prompts = [
            Text(query, document, text_most=asked.query_tokens, pair_most=asked.document_tokens)
            for query, document in zip(asked.queries, asked.documents, strict=True)
        ]
        tokens = await self._tokens(served, prompts, asked.asked)
        rows = np.stack(await self.classifier.logits(request, served, tokens, asked.asked.priority))
        values = rows if asked.asked.activate is False else activate(rows)
        return served, values[:, 0].tolist(), sum(map(len, tokens))

    async def _tokens(self, served: ServedModel, prompts: Sequence[Prompt], asked: vllm.VllmOptions) -> list[list[int]]:
        limit = served.intake().limit
        if asked.truncate is not None and asked.truncate > limit:
            raise vllm.FieldError(
                f"truncate_prompt_tokens is {asked.truncate}, and {served.name} takes {limit} tokens; cut more", None
            )
        most = limit if asked.truncate == -1 else asked.truncate
        cut = Cut(most, asked.side or "right", added=asked.side is None)
        tokens = []
        for place, found in enumerate(await self.classifier.tokens(served, prompts, cut)):
            if isinstance(found, ItemError):
                raise _refused(found, place, "input_tokens" if found.type == "too_long" else None)
            tokens.append(found)
        return tokens


def _route(path: str, handler: Handler, summary: str) -> Route:
    return Route("POST", path, "key", handler, "vllm", True, summary, vllm.write_error)


def _fields(request: Request) -> Mapping[str, object]:
    if request.content_type() != b"application/json":
        raise vllm.FieldError("Unsupported Media Type: Only 'application/json' is allowed", None, "invalid_request")
    return request.fields()


def _prompts(asked: vllm.VllmInputs) -> Sequence[Prompt]:
    if asked.messages is not None:
        return [Chat(asked.messages, asked.opening)]
    return [Text(p, special=asked.special) if isinstance(p, str) else p for p in asked.prompts]


def _refused(error: ItemError, place: int, param: str | None) -> HttpError:
    return vllm.FieldError(f"input {place}: {error.message}", param, error.type)


def _id(request: Request, asked: vllm.VllmOptions) -> str:
    """A request's own name, from its header or its body, or one of ours."""
    return request.id if b"x-request-id" in request.headers or asked.request_id is None else asked.request_id
