"""Text Embeddings Inference, huggingface_hub's text classification, and Infinity: APIs for classifiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from plaudit import __version__
from plaudit.records import ItemError
from plaudit.reward.pairs import Cut
from plaudit.reward.reading import EmbeddingReading
from plaudit.serve.handle import WorkerStatus
from plaudit.serve.http.message import HttpError, Reply, Request, Route, given
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.classifier import Classifier, Prompt, Text, activate
from plaudit.serve.protocols.protocol import ProtocolRoutes, sound
from plaudit.serve.protocols.tei import infinity_wire as infinity
from plaudit.serve.protocols.tei import wire as tei
from plaudit.serve.scoring import EMBEDDING_MODEL, ScoringService

PIPELINE = "huggingface_hub: text classification and feature extraction by InferenceClient"
Side = Literal["left", "right"] | None
FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": lambda logits: activate(logits) if len(logits) > 1 else np.ones(1),
    "sigmoid": lambda logits: activate(logits[:, None])[:, 0],
    "none": lambda logits: logits,
}


class TeiRoutes(ProtocolRoutes):
    """Serves a single model, as the original does: `reward_model`."""

    name = "tei"
    errors = staticmethod(tei.write_error)

    def __init__(self, scoring: ScoringService) -> None:
        super().__init__(scoring)
        self.classifier = Classifier(scoring)

    def routes(self) -> list[Route]:
        return [
            self.work("/predict", self.predict, "TEI: every label with its score"),
            self.work("/rerank", self.rerank, "TEI: texts sorted by score", lambda body: "texts" in body),
            self.work("/", self.pipeline, PIPELINE),
            self.route("GET", "/info", self.info, "TEI: the model and its limits"),
        ]

    def base_routes(self) -> list[Route]:
        """InferenceClient posts to its URL as it is given: /tei, without a slash at the end."""
        return [self.work("", self.pipeline, PIPELINE)]

    async def predict(self, request: Request) -> Reply:
        parsed = tei.decoded(request.fields(), tei.Predict)
        texts, single = parsed.texts()
        served = self.classifier.find(None, "outcome")
        prompts = [Text(text, pair) for text, pair in texts]
        rows, _ = await _logits(self.classifier, request, served, prompts, parsed.side(cuts(served)), "inputs")
        labels = served.intake().facts.labels
        predictions = [tei.predictions(row if parsed.raw_scores else activate(row), labels) for row in rows]
        return Reply.json(predictions[0] if single else predictions)

    async def rerank(self, request: Request) -> Reply:
        parsed = tei.decoded(request.fields(), tei.TeiRerank)
        if not parsed.texts:
            raise HttpError(400, "empty", "`texts` cannot be empty")
        served = self.classifier.find(None, "outcome")
        prompts = [Text(parsed.query, text) for text in parsed.texts]
        values, _ = await _scores(
            self.classifier, request, served, prompts, parsed.side(cuts(served)), "texts", raw=parsed.raw_scores
        )
        return Reply.json(tei.ranks(parsed, values))

    async def pipeline(self, request: Request) -> Reply:
        if "parameters" not in given(request.fields()):
            return await self.features(request)
        parsed = tei.decoded(request.fields(), tei.Pipeline, "; this path classifies texts, or extracts features")
        texts = _listed(parsed.inputs)
        served = self.classifier.find(None, "outcome")
        rows, _ = await _logits(
            self.classifier, request, served, [Text(text) for text in texts], right(served), "inputs"
        )
        labels = served.intake().facts.labels
        options = parsed.parameters
        chosen, top = options.function_to_apply, options.top_k
        apply = FUNCTIONS[chosen] if chosen else partial(activate, multi_label=served.intake().facts.multi_label)
        return Reply.json([tei.predictions(apply(row), labels)[:top] for row in rows])

    async def features(self, request: Request) -> Reply:
        """The vectors of a sentence encoder."""
        served = self.scoring.models.served.get(self.scoring.aliases.get(EMBEDDING_MODEL, ""))
        if not isinstance(served, ServedModel):
            raise HttpError(
                422, "unsupported_form", "a body without parameters asks for feature extraction, and no sentence "
                "encoder is served; for a text classification send parameters, if only {}, or POST to /predict",
            )  # fmt: skip
        about = "; for a text classification send parameters, if only {}"
        parsed = tei.decoded(request.fields(), tei.FeatureExtraction, about)
        if parsed.normalize is False:
            raise HttpError(
                422, "invalid_request", "normalize is false, and a vector is as its model gives it: leave it out"
            )
        texts = _listed(parsed.inputs)
        left = parsed.truncation_direction.lower() == "left"
        cut = Cut(served.intake().limit, "left" if left else "right") if parsed.truncate else Cut()
        tokens = sound(await self.classifier.tokens(served, [Text(text) for text in texts], cut), "inputs")
        _, answers = await self.scoring.read(request, served, [EmbeddingReading.work(row) for row in tokens])
        vectors = []
        for place, answer in enumerate(answers):
            if isinstance(answer, ItemError):
                raise HttpError(500, answer.type, f"inputs[{place}]: {answer.message}")
            assert isinstance(answer, np.ndarray)
            vectors.append(answer[0] / np.linalg.norm(answer[0]) if parsed.normalize else answer[0])
        return Reply.json([vector.tolist() for vector in vectors])

    async def info(self, request: Request) -> Reply:
        served = self.classifier.find(None, "outcome")
        intake = served.intake()
        version = served.deployment.version
        facts, most = intake.facts, self.scoring.most_items
        return Reply.json(
            tei.info(served.name, version, facts.labels, intake.limit, most, __version__, cuts=facts.encoder)
        )


class InfinityRoutes(ProtocolRoutes):
    name = "infinity"
    errors = staticmethod(infinity.write_error)

    def __init__(self, scoring: ScoringService) -> None:
        super().__init__(scoring)
        self.classifier = Classifier(scoring)
        self.began = int(time.time())

    def routes(self) -> list[Route]:
        classify, rerank = "Infinity: every label with its score", "Infinity: documents sorted by score"
        return [
            self.work("/classify", self.classify, classify, lambda body: "raw_scores" in body),
            self.work("/rerank", self.rerank, rerank, lambda body: "raw_scores" in body),
            Route("GET", "/models", "key", self.models, "infinity", summary="Infinity: list the classifiers"),
        ]

    def base_routes(self) -> list[Route]:
        return [Route("GET", "/health", "open", self.health, "infinity", summary="Infinity: 200 while it answers")]

    async def classify(self, request: Request) -> Reply:
        parsed = tei.decoded(request.fields(), infinity.Classify)
        if not parsed.input:
            raise HttpError(422, "empty", "input has no texts; expected at least one")
        served = self.classifier.find(parsed.name, "outcome")
        prompts = [Text(text) for text in parsed.input]
        rows, tokens = await _logits(self.classifier, request, served, prompts, right(served), "input")
        facts = served.intake().facts
        shown = rows if parsed.raw_scores else [activate(row, facts.multi_label) for row in rows]
        labels = facts.labels
        return Reply.json(infinity.classified(request.id, served.name, shown, labels, tokens))

    async def rerank(self, request: Request) -> Reply:
        parsed = tei.decoded(request.fields(), infinity.InfinityRerank)
        if not parsed.documents:
            raise HttpError(422, "empty", "documents has no texts; expected at least one")
        served = self.classifier.find(parsed.name, "outcome")
        prompts = [Text(parsed.query, document) for document in parsed.documents]
        values, tokens = await _scores(
            self.classifier, request, served, prompts, right(served), "documents", raw=parsed.raw_scores
        )
        return Reply.json(infinity.reranked(request.id, served.name, parsed, values, tokens))

    async def models(self, request: Request) -> Reply:
        statuses = [model.status() for model in self.scoring.models.served.values() if model.kind == "outcome"]
        return Reply.json(infinity.models([s for s in statuses if isinstance(s, WorkerStatus)], self.began))

    async def health(self, request: Request) -> Reply:
        return Reply.json({"unix": time.time()})


def cuts(served: ServedModel) -> bool:
    """Whether too long texts are truncated silently, as these servers do: acceptable for a reranker, but a reward model
    would score another response without its end."""
    return served.intake().facts.encoder


def _listed(inputs: str | list[str]) -> list[str]:
    if not inputs and isinstance(inputs, list):
        raise HttpError(400, "empty", "`inputs` cannot be empty")
    return [inputs] if isinstance(inputs, str) else inputs


def right(served: ServedModel) -> Side:
    return "right" if cuts(served) else None


async def _logits(
    classifier: Classifier, request: Request, served: ServedModel, prompts: Sequence[Prompt], side: Side, what: str
) -> tuple[list[np.ndarray], int]:
    """The logits and the number of tokens. Without a side nothing is truncated."""
    intake = served.intake()
    cut = Cut() if side is None else Cut(intake.limit, side)
    tokens = sound(await classifier.tokens(served, prompts, cut), what)
    return await classifier.logits(request, served, tokens), sum(map(len, tokens))


async def _scores(
    classifier: Classifier, request: Request, served: ServedModel, prompts: Sequence[Prompt], side: Side, what: str, *,
    raw: bool,
) -> tuple[list[float], int]:  # fmt: skip
    labels = served.intake().facts.labels
    if len(labels) != 1:
        raise HttpError(422, "wrong_kind", f"{served.name} has {len(labels)} labels; reranking needs one; use /predict")
    rows, tokens = await _logits(classifier, request, served, prompts, side, what)
    values = rows if raw else [activate(row) for row in rows]
    return [float(row[0]) for row in values], tokens
