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


class VllmRoutes:
    shapes: Mapping[str, ErrorWriter] = {}

    def __init__(self, scoring: ScoringService) -> None:
        self.scoring = scoring
        self.classifier = Classifier(scoring)

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
        parsed = vllm.read_inputs(_fields(request))
        served = self.classifier.find(parsed.options.model, "outcome")
        tokens = await self._tokens(served, _prompts(parsed), parsed.options)
        rows = await self.classifier.logits(request, served, tokens, parsed.options.priority)
        if parsed.options.activate is not False:
            rows = [activate(row) for row in rows]
        labels = served.intake().facts.labels
        return Reply.json(
            vllm.classification(_id(request, parsed.options), served.name, rows, labels, sum(map(len, tokens)))
        )

    async def pooling(self, request: Request) -> Reply:
        parsed = vllm.read_inputs(_fields(request))
        if parsed.dimensions is not None:
            raise vllm.FieldError("dimensions is currently not supported", "dimensions")
        served = self.classifier.find(parsed.options.model)
        every = parsed.task == "token_classify" or (parsed.task is None and served.kind == "process")
        if not every and served.kind == "process":
            raise vllm.FieldError("Unsupported task: 'classify' Supported tasks: ['token_classify']", "task")
        tokens = await self._tokens(served, _prompts(parsed), parsed.options)
        read = self.classifier.rows if every else self.classifier.logits
        rows = await read(request, served, tokens, parsed.options.priority)
        if parsed.options.activate is not False:
            rows = [activate(row) for row in rows]
        data = [parsed.encode(row) for row in rows]
        return Reply.json(vllm.pooled(_id(request, parsed.options), served.name, data, sum(map(len, tokens))))

    async def embeddings(self, request: Request) -> Reply:
        """Raw unless asked otherwise: an activation would bend rewards into 0..1 for clients that cannot say no."""
        parsed = vllm.read_inputs(_fields(request))
        encoder = self._encoder(parsed.options.model)
        if encoder is not None:
            return await self._vectors(request, parsed, encoder)
        served = self.classifier.find(parsed.options.model, "outcome")
        size = len(served.intake().facts.labels)
        if parsed.dimensions not in (None, size):
            raise vllm.FieldError(f"dimensions is {parsed.dimensions}, and {served.name} has {size}", "dimensions")
        tokens = await self._tokens(served, _prompts(parsed), parsed.options)
        rows = await self.classifier.logits(request, served, tokens, parsed.options.priority)
        if parsed.options.activate:
            rows = [activate(row) for row in rows]
        data = [parsed.encode(row) for row in rows]
        return Reply.json(vllm.embeddings(_id(request, parsed.options), served.name, data, sum(map(len, tokens))))

    def _encoder(self, name: str | None) -> ServedModel | None:
        """A sentence encoder of this name; without a name the first one, if there is one."""
        alias = name or EMBEDDING_MODEL
        served = self.scoring.models.served.get(self.scoring.aliases.get(alias, alias))
        return served if isinstance(served, ServedModel) and served.kind == "embedding" else None

    async def _vectors(self, request: Request, parsed: vllm.VllmInputs, served: ServedModel) -> Reply:
        tokens = await self._tokens(served, _prompts(parsed), parsed.options)
        works = [EmbeddingReading.work(row) for row in tokens]
        _, answers = await self.scoring.read(request, served, works, priority=parsed.options.priority)
        data = []
        for place, answer in enumerate(answers):
            if not isinstance(answer, np.ndarray):
                assert isinstance(answer, ItemError)
                raise HttpError(500, answer.type, f"input[{place}]: {answer.message}")
            if parsed.dimensions not in (None, answer.size):
                problem = f"dimensions is {parsed.dimensions}, and {served.name} has {answer.size}"
                raise vllm.FieldError(problem, "dimensions")
            data.append(parsed.encode(answer[0]))
        return Reply.json(vllm.embeddings(_id(request, parsed.options), served.name, data, sum(map(len, tokens))))

    async def score(self, request: Request) -> Reply:
        parsed = vllm.read_pairs(_fields(request), rerank=False)
        served, values, tokens = await self._scored(request, parsed)
        return Reply.json(vllm.scores(_id(request, parsed.options), served.name, values, tokens))

    async def rerank(self, request: Request) -> Reply:
        parsed = vllm.read_pairs(_fields(request), rerank=True)
        served, values, tokens = await self._scored(request, parsed)
        id = _id(request, parsed.options)
        return Reply.json(vllm.reranked(id, served.name, parsed.documents, values, parsed.top, tokens))

    async def tokenize(self, request: Request) -> Reply:
        parsed = vllm.read_tokenize(_fields(request))
        served = self.classifier.find(parsed.options.model)
        intake = served.intake()
        prompt: Prompt
        if parsed.messages is not None:
            prompt = Chat(parsed.messages, parsed.opening)
        else:
            prompt = Text(parsed.prompt or "", special=parsed.special)
        tokens = await self.classifier.spelled(served, prompt)
        strings = intake.tokenizer.convert_ids_to_tokens(tokens) if parsed.strings else None
        return Reply.json(vllm.tokenized(tokens, strings, intake.limit))

    async def detokenize(self, request: Request) -> Reply:
        parsed = vllm.read_detokenize(_fields(request))
        tokenizer = self.classifier.find(parsed.options.model).intake().tokenizer
        # As vLLM: what is no token is no text.
        in_vocabulary = [token for token in parsed.tokens if token < len(tokenizer)]
        return Reply.json({"prompt": tokenizer.decode(in_vocabulary)})

    async def version(self, request: Request) -> Reply:
        return Reply.json({"version": __version__})

    async def _scored(self, request: Request, parsed: vllm.Pairs) -> tuple[ServedModel, list[float], int]:
        served = self.classifier.find(parsed.options.model, "outcome")
        intake = served.intake()
        if len(intake.facts.labels) != 1:
            raise HttpError(
                400, "wrong_kind", f"{served.name} has {len(intake.facts.labels)} labels, a score needs one: /classify"
            )
        for name, most in (("query", parsed.query_tokens), ("doc", parsed.document_tokens)):
            if most >= intake.limit:
                raise vllm.FieldError(f"max_tokens_per_{name} ({most}) must be less than {intake.limit}", None)
        prompts = [
            Text(query, document, text_most=parsed.query_tokens, pair_most=parsed.document_tokens)
            for query, document in zip(parsed.queries, parsed.documents, strict=True)
        ]
        tokens = await self._tokens(served, prompts, parsed.options)
        rows = np.stack(await self.classifier.logits(request, served, tokens, parsed.options.priority))
        values = rows if parsed.options.activate is False else activate(rows)
        return served, values[:, 0].tolist(), sum(map(len, tokens))

    async def _tokens(
        self, served: ServedModel, prompts: Sequence[Prompt], options: vllm.VllmOptions
    ) -> list[list[int]]:
        limit = served.intake().limit
        if options.truncate is not None and options.truncate > limit:
            raise vllm.FieldError(
                f"truncate_prompt_tokens is {options.truncate}, and {served.name} takes {limit} tokens; cut more", None
            )
        most = limit if options.truncate == -1 else options.truncate
        cut = Cut(most, options.side or "right", added=options.side is None)
        tokens = []
        for place, row in enumerate(await self.classifier.tokens(served, prompts, cut)):
            if isinstance(row, ItemError):
                raise _refused(row, place, "input_tokens" if row.type == "too_long" else None)
            tokens.append(row)
        return tokens


def _route(path: str, handler: Handler, summary: str) -> Route:
    return Route("POST", path, "key", handler, "vllm", True, summary, vllm.write_error)


def _fields(request: Request) -> Mapping[str, object]:
    if request.content_type() != b"application/json":
        raise vllm.FieldError("Unsupported Media Type: Only 'application/json' is allowed", None, "invalid_request")
    return request.fields()


def _prompts(parsed: vllm.VllmInputs) -> Sequence[Prompt]:
    if parsed.messages is not None:
        return [Chat(parsed.messages, parsed.opening)]
    return [Text(p, special=parsed.special) if isinstance(p, str) else p for p in parsed.prompts]


def _refused(error: ItemError, place: int, param: str | None) -> HttpError:
    return vllm.FieldError(f"input {place}: {error.message}", param, error.type)


def _id(request: Request, options: vllm.VllmOptions) -> str:
    """A request's own name, from its header or its body, or one of ours."""
    return request.id if b"x-request-id" in request.headers or options.request_id is None else options.request_id
