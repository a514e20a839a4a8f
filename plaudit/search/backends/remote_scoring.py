"""Process and outcome models on servers of other projects. The input is assembled here with the model's own tokenizer
and format and sent as token ids: the server adds nothing to it, and every path hits its prefix cache.

vllm    a process model by /pooling: a row for every token, or for every step where the server pools by STEP;
        an outcome model by /classify, or for pairs of texts by /score
sglang  a causal process model by /v1/score: the probabilities of its label tokens; an outcome model by /classify
openai  a causal process model by /v1/completions: the log-probs of the most likely next tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from plaudit.config.reward import OutcomeTable, ProcessTable
from plaudit.config.search import OrmTable, PrmTable
from plaudit.errors import BadReply, ConfigError, Refused, RequestRefused
from plaudit.models import load_tokenizer, resolve
from plaudit.models.safety import read_json
from plaudit.records import Item
from plaudit.reward.directory import complete
from plaudit.reward.load import new_reading
from plaudit.reward.process import ProcessReading
from plaudit.reward.reading import OutcomeReading
from plaudit.reward.work import ModelInfo, Work
from plaudit.search.backends.model_server import ModelServer
from plaudit.search.backends.scored import Path, Scored, items_of, mismatch, whole_score

TOP = 5  # log-probs of likely tokens; OpenAI returns no more
KNOWN_TO = 1e-3  # a score with a missing part counts if the rest bounds it this tightly
TINY = 5e-324


class RemoteScorer:
    """Sends one request per path, from many threads: a rejected request is an error of that path only."""

    computed = 0

    def __init__(self, table: PrmTable, reading: ProcessReading | OutcomeReading | None) -> None:
        """`reading` is None if texts are sent unchanged, to /score."""
        assert isinstance(table.url, str)
        self.table, self.reading = table, reading
        self.whole = not isinstance(reading, ProcessReading)
        kind = "orm" if isinstance(table, OrmTable) else "prm"
        self._server = ModelServer(
            table.url, "scores", kind, key_env=table.key_env, timeout=table.timeout, concurrency=table.concurrency
        )
        self._send: Callable[[Work], np.ndarray]
        if isinstance(reading, ProcessReading):
            self._send = {"vllm": self._pooled, "sglang": self._labelled, "openai": self._likely}[table.protocol]
            if table.protocol != "vllm" and (reading.columns is None or reading.format.activation != "softmax"):
                raise ConfigError(
                    f"{kind}.protocol = {table.protocol!r} reads token probabilities, but {table.path} is not a causal "
                    'LM with two of them ("+", "-"): serve it by vLLM (protocol = "vllm") or by `plaudit serve`'
                )
        else:
            self._send = self._classified if table.protocol == "vllm" else self._encoded

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        if hidden:
            raise ConfigError('a server returns no hidden states: set search.clusters to "text", "encoder" or "served"')
        replies = self._server.each(self._one, list(zip(paths, items_of(paths), strict=True)))
        return [Scored(error=str(each)) if isinstance(each, RequestRefused) else each for each in replies]

    def release(self, places: Sequence[Any]) -> None:
        """Does nothing: the server evicts unused entries itself."""

    def close(self) -> None:
        self._server.close()

    def _one(self, pair: tuple[Path, Item]) -> Scored:
        path, item = pair
        if self.reading is None:
            return self._pair(item)
        try:
            work = self.reading.prepare(item)
        except Refused as error:
            return Scored(error=f"{error.type}: {error}")
        if self.whole:
            return whole_score(
                self.reading.finish(structs.replace(work, positions=(len(work.tokens) - 1,)), self._send(work))
            )
        if work.steps != len(path.steps):
            return Scored(error=mismatch(work.steps, len(path.steps)))
        # Earlier steps were scored when they were the last.
        return whole_score(
            self.reading.finish(structs.replace(work, positions=work.positions[-1:], steps=1), self._send(work))
        )

    def _reply(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Any]) -> Any:
        named = {} if self.table.model is None else {"model": self.table.model}
        reply = self._server.post(path, {**body, **named})
        try:
            return read(reply)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadReply(
                f"{self._server.url}{path} returned no scores in the format of {self.table.protocol} "
                f"({type(error).__name__}: "
                f"{error})"
            ) from None

    def _row(self, path: str, values: Any) -> np.ndarray:
        """One row, with the width of the head in the model's directory."""
        reading = self.reading
        assert reading is not None
        wide = len(reading.columns or reading.facts.labels) if isinstance(reading, ProcessReading) else 0
        row = np.asarray(values, dtype=np.float64).reshape(1, -1)
        if row.size != (wide or len(reading.facts.labels)):
            raise BadReply(
                f"{self._server.url}{path} returned {row.size} numbers, but {self.table.path} has "
                f"{wide or len(reading.facts.labels)}: check that it serves this model, with a head"
                + (" and returned_token_ids of the format's columns" if wide and reading.facts.causal else "")
            )
        return row

    # vLLM

    def _pooled(self, work: Work) -> np.ndarray:
        body = {"input": work.tokens, "task": "token_classify", "use_activation": False}
        rows = self._reply("/pooling", body, lambda reply: reply["data"][0]["data"])
        if not isinstance(rows, list) or len(rows) not in (len(work.tokens), work.steps):
            raise BadReply(
                f"{self._server.url}/pooling returned {len(rows) if isinstance(rows, list) else 'no'} rows for "
                f"{len(work.tokens)} tokens and {work.steps} steps: pool by ALL, or by STEP with the format's tag"
            )
        return self._row("/pooling", rows[work.positions[-1] if len(rows) == len(work.tokens) else -1])

    def _classified(self, work: Work) -> np.ndarray:
        body = {"input": work.tokens, "use_activation": False}
        return self._row("/classify", self._reply("/classify", body, lambda reply: reply["data"][0]["probs"]))

    def _pair(self, item: Item) -> Scored:
        if not isinstance(item.prompt, str):
            return Scored(error="bad_messages: /score accepts a text and its answer, but the prompt is a conversation")
        body = {"text_1": item.prompt, "text_2": item.response, "use_activation": False}
        value = float(self._reply("/score", body, lambda reply: float(reply["data"][0]["score"])))
        if not math.isfinite(value):
            return Scored(error=f"nonfinite_score: {self._server.url}/score returned {value}")
        return Scored(value)

    # SGLang

    def _encoded(self, work: Work) -> np.ndarray:
        return self._row("/classify", self._reply("/classify", {"input_ids": work.tokens}, lambda r: r["embedding"]))

    def _labelled(self, work: Work) -> np.ndarray:
        *before, last = work.tokens[: work.positions[-1] + 1]
        body = {
            "query": before, "items": [[last]], "label_token_ids": list(work.columns or ()), "apply_softmax": True,
        }  # fmt: skip
        row = self._row("/v1/score", self._reply("/v1/score", body, lambda reply: reply["scores"][0]))
        if abs(row.sum() - 1) > KNOWN_TO:
            raise BadReply(f"{self._server.url}/v1/score returned probabilities with the sum {row.sum():g}; expected 1")
        logs: np.ndarray = np.log(np.maximum(row, TINY))
        return logs

    # OpenAI

    def _likely(self, work: Work) -> np.ndarray:
        """For tokens that are not among the likeliest the log-prob is bounded by that of the least likely one
        returned."""
        body = {
            "prompt": work.tokens[: work.positions[-1] + 1], "max_tokens": 1, "temperature": 0.0, "logprobs": TOP,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        shown = self._reply(
            "/v1/completions", body, lambda reply: dict(reply["choices"][0]["logprobs"]["top_logprobs"][0])
        )
        assert isinstance(self.reading, ProcessReading)
        tokenizer, columns = self.reading.tokenizer, work.columns or ()
        logprobs = []
        for column in columns:
            names = (f"token_id:{column}", tokenizer.decode([column]), tokenizer.convert_ids_to_tokens(column))
            logprobs.append(next((float(shown[name]) for name in names if name in shown), None))
        known = [value for value in logprobs if value is not None]
        least = min(map(float, shown.values()), default=0.0)
        if not known or (len(known) < len(logprobs) and math.exp(least - max(known)) > KNOWN_TO):
            raise RequestRefused(
                422, "", f"{self._server.url}/v1/completions returned {sorted(shown)} as the likeliest tokens after a "
                f"step instead of {[tokenizer.convert_ids_to_tokens(c) for c in columns]}: check that it serves a "
                "process model",
            )  # fmt: skip
        return self._row("/v1/completions", [least if value is None else value for value in logprobs])


def open_remote(table: PrmTable) -> RemoteScorer:
    if isinstance(table, OrmTable) and table.pairs:
        return RemoteScorer(table, None)
    assert table.path is not None, "the table must have a path with the tokenizer"
    keys = {"path": table.path, **({} if table.format is None else {"format": table.format})}
    own = complete(keys, f"path {table.path}")
    if not isinstance(own, OutcomeTable | ProcessTable):
        raise ConfigError(f"{table.path} is a reward of kind {own.kind!r}; a search needs a process or outcome model")
    return RemoteScorer(table, new_reading(own, load_tokenizer(resolve(table.path)), _facts(table.path, own)))


def _facts(path: str, own: OutcomeTable | ProcessTable) -> ModelInfo:
    """The model's information, from its directory without the weights."""
    config = read_json(resolve(path) / "config.json")
    name = str((config.get("architectures") or ["the model"])[0])
    causal = isinstance(own, ProcessTable) and bool(own.format.columns)
    lone = isinstance(own, OutcomeTable) or own.format.activation != "softmax"
    labels = tuple(str(label) for _, label in sorted((config.get("id2label") or {}).items(), key=lambda e: int(e[0])))
    labels = labels or (("value",) if lone else ("wrong", "right"))
    return ModelInfo(
        name, int(config["vocab_size"]), int(config.get("max_position_embeddings", 1 << 30)),
        () if causal else labels, causal,
    )  # fmt: skip
