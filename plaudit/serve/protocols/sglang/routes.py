"""SGLang's scoring routes, and the step scores that ETS and REBASE request from their fork of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from plaudit import __version__
from plaudit.records import NEXT, Item, ItemError, StepScores
from plaudit.reward.pairs import Cut
from plaudit.reward.process import ProcessReading
from plaudit.reward.work import Work
from plaudit.serve.http.message import HttpError, Reply, Request, Route
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.classifier import Classifier, Prompt, Text
from plaudit.serve.protocols.protocol import ProtocolRoutes, sound
from plaudit.serve.protocols.sglang import ets_wire as ets
from plaudit.serve.protocols.sglang import wire as sglang
from plaudit.serve.protocols.sglang.wire import LogprobRequest, SglangInputs
from plaudit.serve.scoring import INPUT_ERRORS, LOGPROBS_MODEL, PROCESS_MODEL, ScoringService

StepList = tuple[int, Sequence[float]]  # the number of tokens of a path, and the scores of its steps


class SGLangRoutes(ProtocolRoutes):
    name = "sglang"
    errors = staticmethod(sglang.write_error)

    def __init__(self, scoring: ScoringService) -> None:
        super().__init__(scoring)
        self.classifier = Classifier(scoring)

    def routes(self) -> list[Route]:
        routes = [
            self.work("/v1/classify", self.classify, "SGLang: probabilities of labels"),
            self.work("/v1/score", self.score, "SGLang: probabilities of label tokens", sglang.claims_scoring),
            self.work("/generate", self.step_scores, "ETS and REBASE: scores of a path's steps", ets.claims),
            self.work("/generate", self.generate, "SGLang: log-probabilities of a text's tokens"),
            self.route("GET", "/health_generate", self.health, "SGLang: 200 if every model is ready", "open"),
        ]
        rerank, reward = "SGLang: documents sorted by score", "SGLang: raw reward of a text"
        for method in ("POST", "PUT"):
            routes.append(self.work("/v1/rerank", self.rerank, rerank, sglang.claims_rerank, method))
            for path in ("/classify", "/encode"):
                routes.append(self.work(path, self.encode, reward, sglang.claims_inputs, method))
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            routes.append(self.route("GET", path, self.info, "SGLang: the model behind /generate, and its limits"))
        return [replace(r, errors=sglang.write_openai_error) if r.path.startswith("/v1/") else r for r in routes]

    async def encode(self, request: Request) -> Reply:
        began = time.monotonic()
        inputs = sglang.read_inputs(request.fields())
        served = self.classifier.find(self._named(request), "outcome")
        tokens = await self._tokens(served, inputs)
        logits = await self.classifier.logits(request, served, tokens)
        replies = [
            sglang.write_embedding(row.tolist(), _meta(request, i, ids, served, began))
            for i, (row, ids) in enumerate(zip(logits, tokens, strict=True))
        ]
        return Reply.json(replies[0] if inputs.single else replies)

    async def classify(self, request: Request) -> Reply:
        inputs = sglang.read_classify(request.fields())
        served = self.classifier.find(self._named(request), "outcome")
        labels = _several_labels(served)
        tokens = await self._tokens(served, inputs)
        logits = await self.classifier.logits(request, served, tokens)
        rows = [dict(zip(labels, row.tolist(), strict=True)) for row in logits]
        return Reply.json(sglang.write_classify(served.name, rows, sum(map(len, tokens)), request.id))

    async def score(self, request: Request) -> Reply:
        parsed = sglang.read_scoring(request.fields())
        served = self._causal(self._named(request), LOGPROBS_MODEL, PROCESS_MODEL) if parsed.labels else None
        if served is None or parsed.labels is None:
            served = self.classifier.find(self._named(request), "outcome")
            if parsed.softmax:
                _several_labels(served)
            tokens = await self._tokens(served, parsed.inputs)
            rows = [row.tolist() for row in await self.classifier.logits(request, served, tokens)]
            chances = [sglang.softmax(row) for row in rows] if parsed.softmax else rows
        else:
            _check_ids(served, parsed.labels, "label_token_ids")
            tokens = await self._tokens(served, parsed.inputs)
            works = [Work(ids, (len(ids) - 1,), parsed.labels, 0, False, logprobs=True) for ids in tokens]
            logs = [row[0].tolist() for row in await self._read(request, served, works, parsed.inputs.field)]
            chances = [sglang.softmax(row) if parsed.softmax else np.exp(row).tolist() for row in logs]
        return Reply.json(sglang.write_scoring(served.name, chances, sum(map(len, tokens))))

    async def rerank(self, request: Request) -> Reply:
        began = time.monotonic()
        parsed = sglang.read_rerank(request.fields())
        served = self.classifier.find(self._named(request), "outcome")
        if len(served.intake().facts.labels) > 1:
            raise HttpError(422, "wrong_kind", f"{served.name} has several labels; reranking needs a model with one")
        pairs: list[Prompt] = [Text(parsed.query, document) for document in parsed.documents]
        tokens = sound(await self.classifier.tokens(served, pairs, Cut()), "documents")
        values = [float(row[0]) for row in await self.classifier.logits(request, served, tokens)]
        metas = [_meta(request, i, ids, served, began) for i, ids in enumerate(tokens)]
        return Reply.json(sglang.write_rerank(parsed, values, metas))

    async def generate(self, request: Request) -> Reply:
        began = time.monotonic()
        parsed = sglang.read_generate(request.fields())
        served = self._reader(self._named(request), LOGPROBS_MODEL, PROCESS_MODEL)
        for wish in parsed.wishes:
            _check_ids(served, wish.tokens, "token_ids_logprob")
        tokens = await self._tokens(served, parsed.inputs)
        works = [_generate_works(ids, wish) for ids, wish in zip(tokens, parsed.wishes, strict=True)]
        rows = iter(await self._read(request, served, [w for pair in works for w in pair if w], parsed.inputs.field))
        tokenizer = served.intake().tokenizer
        name = (lambda token: str(tokenizer.decode([token]))) if parsed.named else (lambda token: None)
        replies = []
        for i, (ids, wish, (first, last)) in enumerate(zip(tokens, parsed.wishes, works, strict=True)):
            read = next(rows) if first else None
            at_last = next(rows)[0] if last else None
            meta = _meta(request, i, ids, served, began)
            replies.append(sglang.write_generate(ids, wish, read, at_last, name, meta))
        return Reply.json(replies[0] if parsed.inputs.single else replies)

    async def step_scores(self, request: Request) -> Reply:
        parsed = ets.read(request.fields())
        by_format = [i for i, require in enumerate(parsed.requires) if require.pair is None]
        scores: dict[int, StepList] = {}
        if by_format:
            scores |= await self._scores_by_format(request, parsed, by_format)
        if len(by_format) < len(parsed.requires):
            scores |= await self._scores_of_pairs(request, parsed)
        replies = [ets.write(*scores[i], f"{request.id}-{i}") for i in range(len(parsed.requires))]
        return Reply.json(replies[0] if parsed.inputs.single else replies)

    async def _steps(
        self, request: Request, served: ServedModel, parsed: ets.EtsRequest, places: Sequence[int]
    ) -> tuple[dict[int, list[int]], dict[int, StepList]]:
        """Token ids of the texts whose last step can be scored, and empty lists for the others, which are counted as
        errors: the client cannot handle an error reply, its thread would end and the search would wait forever."""
        rows = await self.classifier.tokens(served, [_prompts(parsed.inputs)[place] for place in places], Cut())
        tokenizer = served.intake().tokenizer
        steps: dict[int, list[int]] = {}
        empty: dict[int, StepList] = {}
        for place, row in zip(places, rows, strict=True):
            if isinstance(row, ItemError):
                self.scoring.drop(request, served, row)
                empty[place] = 0, ()
            elif problem := _unscored(row, parsed.requires[place].at, tokenizer):
                self.scoring.drop(request, served, ItemError("no_steps", problem))
                empty[place] = len(row), ()
            else:
                steps[place] = row
        return steps, empty

    async def _scores_by_format(
        self, request: Request, parsed: ets.EtsRequest, places: Sequence[int]
    ) -> dict[int, StepList]:
        served = self.scoring.find_model(PROCESS_MODEL, "process")
        served.intake()
        reading = served.reading
        assert isinstance(reading, ProcessReading)
        if not reading.tag:
            raise HttpError(
                422, "wrong_kind", f"the step format of {served.name} has no tag, so {ets.FIELD} cannot name one; "
                "serve a model whose format has a tag, or name it with --alias process_model=NAME",
            )  # fmt: skip
        for place in places:
            if parsed.requires[place].at != reading.tag[-1]:
                raise HttpError(
                    422, "refused", f"{ets.FIELD} is {parsed.requires[place].at}, but a step of {served.name} "
                    f"ends with {reading.tag[-1]} ({reading.format.tag!r}); send that id, or [PLUS, MINUS, TAG]",
                )  # fmt: skip
        steps, empty = await self._steps(request, served, parsed, places)
        scored = await self.scoring.score(request, served, [Item(tokens=tuple(row)) for row in steps.values()])
        self.scoring.values(scored.results, parsed.inputs.field)
        lists = [result.values for result in scored.results if isinstance(result, StepScores)]
        return empty | {place: (len(row), values) for (place, row), values in zip(steps.items(), lists, strict=True)}

    async def _scores_of_pairs(self, request: Request, parsed: ets.EtsRequest) -> dict[int, StepList]:
        served = self._reader(None, PROCESS_MODEL, LOGPROBS_MODEL)
        places = [i for i, require in enumerate(parsed.requires) if require.pair is not None]
        for place in places:
            _check_ids(served, parsed.requires[place].pair or (), ets.FIELD)
        steps, scores = await self._steps(request, served, parsed, places)
        works = [_pair_work(row, parsed.requires[place]) for place, row in steps.items()]
        rows = await self._read(request, served, works, parsed.inputs.field, path=True) if works else []
        for (place, ids), row in zip(steps.items(), rows, strict=True):
            scores[place] = len(ids), [sglang.softmax(pair)[0] for pair in row.tolist()]
        return scores

    async def health(self, request: Request) -> Reply:
        return Reply(503 if await self.scoring.models.unready() else 200, b"")

    async def info(self, request: Request) -> Reply:
        """Returns names instead of paths, which are private to the server."""
        served = self._causal(None, LOGPROBS_MODEL, PROCESS_MODEL) or self.classifier.find(None)
        facts = served.intake().facts
        return Reply.json(
            {
                "model_path": served.name, "served_model_name": served.name, "tokenizer_path": served.name,
                "is_generation": facts.causal, "preferred_sampling_params": None, "architectures": [facts.name],
                "weight_version": served.deployment.version, "max_req_input_len": served.intake().limit,
                "version": f"plaudit {__version__}",
            }
        )  # fmt: skip

    def _named(self, request: Request) -> str | None:
        """SGLang serves one model and ignores this name; here it selects a model if it is one of ours."""
        name = request.fields().get("model")
        ours = isinstance(name, str) and (name in self.scoring.models.served or name in self.scoring.aliases)
        return name if ours else None

    def _causal(self, *names: str | None) -> ServedModel | None:
        """The first of these models that is a causal LM."""
        for name in names:
            served = self.scoring.models.served.get(self.scoring.aliases.get(name or "", name or ""))
            if isinstance(served, ServedModel) and served.kind != "judge" and served.intake().facts.causal:
                return served
        return None

    def _reader(self, *names: str | None) -> ServedModel:
        served = self._causal(*names)
        if served is None:
            raise HttpError(
                422, "wrong_kind", "no causal LM is served, and log-probs need its language model head: serve one "
                f"(--model PATH), or select one (--alias {LOGPROBS_MODEL}=NAME)",
            )  # fmt: skip
        return served

    async def _tokens(self, served: ServedModel, inputs: SglangInputs) -> list[list[int]]:
        """Tokenises as SGLang does: control strings are control tokens, and the tokenizer adds its special tokens."""
        return sound(await self.classifier.tokens(served, _prompts(inputs), Cut()), inputs.field)

    async def _read(
        self, request: Request, served: ServedModel, works: Sequence[Work], field: str, *, path: bool = False
    ) -> list[np.ndarray]:
        _, answers = await self.scoring.read(request, served, works, path=path)
        rows = []
        for answer in answers:
            if isinstance(answer, ItemError):
                status = 422 if answer.type in INPUT_ERRORS else 500
                raise HttpError(status, answer.type, f"{field}: {answer.message}")
            assert isinstance(answer, np.ndarray)
            rows.append(answer)
        return rows


def _generate_works(tokens: list[int], wish: LogprobRequest) -> tuple[Work | None, Work | None]:
    """The works for the positions before the last token, and for the last token. They share the computation."""
    count = len(tokens)
    start = count if wish.start is None else wish.start
    if start > count:
        raise HttpError(
            400, "refused", f"logprob_start_len is {start}; expected at most {count}, the tokens of the input"
        )
    first = Work(tokens, tuple(range(start, count - 1)), (NEXT, *wish.tokens), 0, False, logprobs=True)
    last = Work(tokens, (count - 1,), wish.tokens or (0,), 0, False, logprobs=True)
    if not first.positions:
        # also if no log-probs are requested: computes the tokens, so that the next request reuses their KV cache
        return None, last
    return first, last if wish.tokens else None


def _prompts(inputs: SglangInputs) -> list[Prompt]:
    return [Text(text) for text in inputs.texts] or list(inputs.tokens)


def _unscored(tokens: Sequence[int], at: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """Why the last step of a path has no score; empty if it has one. Scores of earlier steps were requested before, and
    the search would take the last of them for this step's score."""
    if at < 0:
        return "" if len(tokens) + at >= 0 else f"the text has only {len(tokens)} tokens, and the position is {at}"
    tags = [place for place, token in enumerate(tokens) if token == at]
    if not tags:
        return f"the text has no tag {at}"
    rest = str(tokenizer.decode(tokens[tags[-1] + 1 :], skip_special_tokens=True)).strip()
    return f"{len(rest)} characters follow the last tag" if rest else ""


def _pair_work(tokens: list[int], require: ets.Require) -> Work:
    at = require.at
    places = tuple(i for i, token in enumerate(tokens) if token == at) if at >= 0 else (len(tokens) + at,)
    return Work(tokens, places, require.pair, len(places), False)


def _check_ids(served: ServedModel, tokens: Sequence[int], field: str) -> None:
    size = served.intake().facts.vocab_size
    for token in tokens:
        if not 0 <= token < size:
            raise HttpError(400, "refused", f"{field} has {token}; expected 0..{size - 1} for {served.name}")


def _several_labels(served: ServedModel) -> tuple[str, ...]:
    labels = served.intake().facts.labels
    if len(labels) < 2:
        raise HttpError(
            422, "wrong_kind", f"{served.name} has one label, whose softmax is always 1; use /classify for the reward"
        )
    return labels


def _meta(request: Request, place: int, tokens: Sequence[int], served: ServedModel, began: float) -> dict[str, Any]:
    return sglang.meta_info(f"{request.id}-{place}", len(tokens), served.deployment.version, began)
