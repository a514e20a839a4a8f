"""vLLM's pooling server: /classify, /pooling, /score, /rerank, /tokenize; and OpenAI's /v1/embeddings.

An input that cannot be scored fails its request, as in vLLM: these replies have no error for a single input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from plaudit import __version__
from plaudit.records import ItemError
from plaudit.reward.pairs import Cut
from plaudit.reward.reading import EmbeddingReading
from plaudit.serve.http.message import HttpError, Reply, Request, Route
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.classifier import Chat, Classifier, Prompt, Text, activate
from plaudit.serve.protocols.protocol import ProtocolRoutes
from plaudit.serve.protocols.vllm import wire as vllm
from plaudit.serve.scoring import EMBEDDING_MODEL, PROCESS_MODEL, REWARD_MODEL, ScoringService


class VllmRoutes(ProtocolRoutes):
    name = "vllm"
    errors = staticmethod(vllm.write_error)

    def __init__(self, scoring: ScoringService) -> None:
        super().__init__(scoring)
        self.classifier = Classifier(scoring)

    def routes(self) -> list[Route]:
        scores, ranks = "vLLM: scores of pairs of texts", "vLLM: documents sorted by score"
        return [
            self.work("/classify", self.classify, "vLLM: probabilities of labels, or raw rewards"),
            self.work("/pooling", self.pooling, "vLLM: the head's output for a text, its tokens or its steps"),
            self.work("/v1/embeddings", self.embeddings, "OpenAI: vectors of a text, or its raw reward as one"),
            *(self.work(path, self.score, scores) for path in ("/score", "/v1/score")),
            *(self.work(path, self.rerank, ranks) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            self.work("/tokenize", self.tokenize, "vLLM: text or messages to token ids"),
            self.work("/detokenize", self.detokenize, "vLLM: token ids to text"),
            self.work("/invocations", self.invocations, "SageMaker: one of the above, selected by the body"),
            self.route("GET", "/ping", self.ping, "SageMaker: 200 if every model is ready", "open"),
            self.route("GET", "/load", self.load, "vLLM: the number of open requests"),
            Route("GET", "/version", "open", self.version, "vllm", summary="vLLM: the release of this server"),
        ]

    async def invocations(self, request: Request) -> Reply:
        fields = _fields(request)
        if "query" in fields:
            return await self.rerank(request)
        if fields.keys() & {"queries", "text_1", "data_1"}:
            return await self.score(request)
        if "task" in fields:
            return await self.pooling(request)
        name = fields.get("model")
        encoder = self._encoder(name if isinstance(name, str) else None)
        return await (self.classify(request) if encoder is None else self.embeddings(request))

    async def ping(self, request: Request) -> Reply:
        return Reply(503 if await self.scoring.models.unready() else 200, b"")

    async def load(self, request: Request) -> Reply:
        return Reply.json({"server_load": self.scoring.models.admission.open_requests})

    async def classify(self, request: Request) -> Reply:
        parsed = vllm.read_inputs(_fields(request))
        served = self.classifier.find(parsed.model, "outcome")
        tokens = await self._tokens(served, _prompts(parsed), parsed)
        rows = await self.classifier.logits(request, served, tokens, parsed.queue_priority, parsed.cache_salt)
        if parsed.activate is not False:
            rows = [activate(row, served.intake().facts.multi_label) for row in rows]
        labels = served.intake().facts.labels
        return Reply.json(vllm.classification(_id(request, parsed), served.name, rows, labels, sum(map(len, tokens))))

    async def pooling(self, request: Request) -> Reply:
        parsed = vllm.read_vectors(_fields(request))
        if parsed.dimensions is not None:
            raise vllm.FieldError("dimensions is currently not supported", "dimensions")
        served = self.classifier.find(parsed.model)
        every = parsed.task == "token_classify" or (parsed.task is None and served.kind == "process")
        if not every and served.kind == "process":
            raise vllm.FieldError("Unsupported task: 'classify' Supported tasks: ['token_classify']", "task")
        tokens = await self._tokens(served, _prompts(parsed), parsed)
        read = self.classifier.rows if every else self.classifier.logits
        rows = await read(request, served, tokens, parsed.queue_priority, parsed.cache_salt)
        if parsed.activate is not False:
            rows = [activate(row, served.intake().facts.multi_label) for row in rows]
        data = [parsed.encode(row) for row in rows]
        return Reply.json(vllm.pooled(_id(request, parsed), served.name, data, sum(map(len, tokens))))

    async def embeddings(self, request: Request) -> Reply:
        """Raw values by default: an activation would squash rewards to 0..1 for clients that cannot disable it."""
        parsed = vllm.read_vectors(_fields(request))
        encoder = self._encoder(parsed.model)
        if encoder is not None:
            return await self._vectors(request, parsed, encoder)
        served = self.classifier.find(parsed.model, "outcome")
        size = len(served.intake().facts.labels)
        if parsed.dimensions not in (None, size):
            raise vllm.FieldError(f"dimensions is {parsed.dimensions}; expected {size} for {served.name}", "dimensions")
        tokens = await self._tokens(served, _prompts(parsed), parsed)
        rows = await self.classifier.logits(request, served, tokens, parsed.queue_priority, parsed.cache_salt)
        if parsed.activate:
            rows = [activate(row) for row in rows]
        data = [parsed.encode(row) for row in rows]
        return Reply.json(vllm.embeddings(_id(request, parsed), served.name, data, sum(map(len, tokens))))

    def _encoder(self, name: str | None) -> ServedModel | None:
        """The sentence encoder of this name; without a name the first one, if any."""
        alias = name or EMBEDDING_MODEL
        served = self.scoring.models.served.get(self.scoring.aliases.get(alias, alias))
        return served if isinstance(served, ServedModel) and served.kind == "embedding" else None

    async def _vectors(self, request: Request, parsed: vllm.VllmVectors, served: ServedModel) -> Reply:
        tokens = await self._tokens(served, _prompts(parsed), parsed)
        works = [EmbeddingReading.work(row) for row in tokens]
        _, answers = await self.scoring.read(
            request, served, works, priority=parsed.queue_priority, salt=parsed.cache_salt
        )
        data = []
        for place, answer in enumerate(answers):
            if not isinstance(answer, np.ndarray):
                assert isinstance(answer, ItemError)
                raise HttpError(500, answer.type, f"input[{place}]: {answer.message}")
            if parsed.dimensions not in (None, answer.size):
                problem = f"dimensions is {parsed.dimensions}; expected {answer.size} for {served.name}"
                raise vllm.FieldError(problem, "dimensions")
            data.append(parsed.encode(answer[0]))
        return Reply.json(vllm.embeddings(_id(request, parsed), served.name, data, sum(map(len, tokens))))

    async def score(self, request: Request) -> Reply:
        parsed = vllm.read_pairs(_fields(request), rerank=False)
        served, values, tokens = await self._scored(request, parsed)
        return Reply.json(vllm.scores(_id(request, parsed), served.name, values, tokens))

    async def rerank(self, request: Request) -> Reply:
        parsed = vllm.read_pairs(_fields(request), rerank=True)
        served, values, tokens = await self._scored(request, parsed)
        id = _id(request, parsed)
        return Reply.json(vllm.reranked(id, served.name, parsed, values, tokens))

    async def tokenize(self, request: Request) -> Reply:
        parsed = vllm.read_tokenize(_fields(request))
        served = self._reader(parsed.model)
        intake = served.intake()
        chat = None if parsed.messages is None else _chat(parsed, bool(parsed.add_generation_prompt))
        prompt = chat or Text(parsed.prompt or "", special=parsed.add_special_tokens)
        tokens = await self.classifier.full_tokens(served, prompt)
        strings = intake.tokenizer.convert_ids_to_tokens(tokens) if parsed.return_token_strs else None
        return Reply.json(vllm.tokenized(tokens, strings, intake.limit))

    async def detokenize(self, request: Request) -> Reply:
        parsed = vllm.decoded(_fields(request), vllm.Detokenize)
        tokenizer = self._reader(parsed.model).intake().tokenizer
        # As in vLLM: an invalid token decodes to no text.
        in_vocabulary = [token for token in parsed.tokens if token < len(tokenizer)]
        return Reply.json({"prompt": tokenizer.decode(in_vocabulary)})

    def _reader(self, name: str | None) -> ServedModel:
        """The model of any kind whose tokenizer is meant; without a name the first reward model, or the first model."""
        if name or REWARD_MODEL in self.scoring.aliases or PROCESS_MODEL in self.scoring.aliases:
            served = self.scoring.find(self.classifier.name(name))
        else:
            served = self.scoring.find(None)
        if not isinstance(served, ServedModel):
            raise HttpError(422, "wrong_kind", f"{served.name} is a {served.kind} and has no tokenizer; name a model")
        return served

    async def version(self, request: Request) -> Reply:
        return Reply.json({"version": __version__})

    async def _scored(self, request: Request, parsed: vllm.Pairs) -> tuple[ServedModel, list[float], int]:
        served = self.classifier.find(parsed.model, "outcome")
        intake = served.intake()
        if len(intake.facts.labels) != 1:
            raise HttpError(
                400,
                "wrong_kind",
                f"{served.name} has {len(intake.facts.labels)} labels; scoring needs one; use /classify",
            )
        for name, most in (("query", parsed.max_tokens_per_query), ("doc", parsed.max_tokens_per_doc)):
            if most >= intake.limit:
                raise vllm.FieldError(f"max_tokens_per_{name} ({most}) must be less than {intake.limit}", None)
        prompts = [
            Text(query, document, text_most=parsed.max_tokens_per_query, pair_most=parsed.max_tokens_per_doc)
            for query, document in zip(parsed.queries, parsed.documents, strict=True)
        ]
        tokens = await self._tokens(served, prompts, parsed)
        rows = np.stack(await self.classifier.logits(request, served, tokens, parsed.queue_priority, parsed.cache_salt))
        values = rows if parsed.activate is False else activate(rows)
        return served, values[:, 0].tolist(), sum(map(len, tokens))

    async def _tokens(
        self, served: ServedModel, prompts: Sequence[Prompt], parsed: vllm.VllmInputs | vllm.Pairs
    ) -> list[list[int]]:
        limit, most = served.intake().limit, parsed.truncate_prompt_tokens
        if most is not None and most > limit:
            raise vllm.FieldError(
                f"truncate_prompt_tokens is {most}; expected at most {limit} tokens for {served.name}", None
            )
        side = parsed.truncation_side
        # Without a side it is truncated as in transformers, which keeps special tokens.
        cut = Cut(limit if most == -1 else most, side or "right", added=side is None)
        tokens = []
        for place, row in enumerate(await self.classifier.tokens(served, prompts, cut)):
            if isinstance(row, ItemError):
                param = "input_tokens" if row.type == "too_long" else None
                # Clients match this message to shorten a prompt and retry.
                cure = ". Please reduce the length of the input prompt" if row.type == "too_long" else ""
                raise vllm.FieldError(f"input {place}: {row.message}{cure}", param, row.type)
            tokens.append(row)
        return tokens


def _fields(request: Request) -> Mapping[str, object]:
    if request.content_type() != b"application/json":
        raise vllm.FieldError("Unsupported Media Type: Only 'application/json' is allowed", None, "invalid_request")
    return request.fields()


def _prompts(parsed: vllm.VllmInputs) -> Sequence[Prompt]:
    if parsed.messages is not None:
        return [_chat(parsed, parsed.add_generation_prompt)]
    return [Text(p, special=parsed.add_special_tokens) if isinstance(p, str) else p for p in parsed.input]


def _chat(parsed: vllm.VllmInputs | vllm.Tokenize, opening: bool) -> Chat:
    assert parsed.messages is not None
    return Chat(parsed.messages, opening, parsed.continue_final_message, parsed.variables)


def _id(request: Request, parsed: vllm.VllmInputs | vllm.Pairs) -> str:
    return vllm.reply_id(request, parsed.request_id)
