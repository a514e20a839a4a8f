"""A policy on a server: OpenAI's /v1/completions (vLLM and others), or SGLang's /generate.

Prompts are sent as token ids, so they are not tokenised again and hit the server's prefix cache. For servers that do
not return the sampled tokens text is sent instead, and tokens are only counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from plaudit.config.search import GenerationTable, StepsTable
from plaudit.errors import BadReply, RequestRefused
from plaudit.search.backends.model_server import ModelServer
from plaudit.search.backends.policy import Ended, Step, StepRequest


class RemotePolicy:
    def __init__(self, table: GenerationTable, steps: StepsTable) -> None:
        assert table.url is not None, "the table must have a url"
        self.table = table
        self.steps = steps
        self._path = "/generate" if table.name == "sglang" else "/v1/completions"
        self._server = ModelServer(
            table.url, "steps", "engine", key_env=table.key_env, timeout=table.timeout, concurrency=table.concurrency
        )

    def extend(self, requests: Sequence[StepRequest]) -> list[list[Step]]:
        return [
            [Step(error=str(steps))] * request.count if isinstance(steps, RequestRefused) else steps
            for request, steps in zip(requests, self._server.each(self._one, requests), strict=True)
        ]

    def release(self, places: Sequence[Any]) -> None:
        """Does nothing: the server evicts unused entries itself."""

    def close(self) -> None:
        self._server.close()

    def _one(self, request: StepRequest) -> list[Step]:
        body = self._sglang(request) if self.table.name == "sglang" else self._openai(request)
        reply = self._server.post(self._path, body)
        try:
            read = _read_sglang if self.table.name == "sglang" else _read_openai
            completions = [read(choice, self.steps.stop) for choice in _choices(reply, self.table.name)]
        except (LookupError, TypeError, ValueError) as error:
            raise BadReply(
                f"{self._server.url}{self._path} returned no completions ({type(error).__name__}: {error})"
            ) from None
        draws = self._draws(request)
        if len(completions) != draws:
            raise BadReply(
                f"{self._server.url}{self._path} returned {len(completions)} completions where {draws} were requested"
            )
        return completions * (request.count // draws)

    def _openai(self, request: StepRequest) -> dict[str, Any]:
        tokens, text = [*request.prompt, *request.response_ids], request.prompt_text + request.text
        body: dict[str, Any] = {
            "prompt": tokens if _named(request.response_ids) else text,
            "n": self._draws(request), "max_tokens": self._tokens_left(request),
            "temperature": self._temperature(request), "top_p": 1.0 if request.greedy else self.steps.top_p,
            "stop": [self.steps.stop], "seed": request.seed,
            "logprobs": 0, "include_stop_str_in_output": True, "return_token_ids": True,
        }  # fmt: skip
        if self.table.model is not None:
            body["model"] = self.table.model
        return body

    def _sglang(self, request: StepRequest) -> dict[str, Any]:
        return {
            "input_ids": [*request.prompt, *request.response_ids],
            "sampling_params": {
                "n": self._draws(request), "max_new_tokens": self._tokens_left(request),
                "temperature": self._temperature(request), "stop": [self.steps.stop], "no_stop_trim": True,
                "top_p": 1.0 if request.greedy else self.steps.top_p, "sampling_seed": request.seed % 2**31,
            },
        }  # fmt: skip

    def _temperature(self, request: StepRequest) -> float:
        return 0.0 if request.greedy else self.steps.temperature

    def _draws(self, request: StepRequest) -> int:
        """The number of samples to request: with greedy decoding all are the same, and vLLM rejects more than one."""
        return request.count if self._temperature(request) else 1

    def _tokens_left(self, request: StepRequest) -> int:
        return min(self.steps.max_step_tokens, max(1, self.steps.max_tokens - len(request.response_ids)))


def _named(tokens: Sequence[int]) -> bool:
    """Whether the server has returned the sampled tokens; -1 stands for a token that was only counted."""
    return all(token >= 0 for token in tokens)


def _choices(reply: Any, name: str) -> list[Any]:
    if name == "sglang":
        return reply if isinstance(reply, list) else [reply]
    return sorted(reply["choices"], key=lambda choice: choice["index"])


def _read_openai(choice: Mapping[str, Any], stop: str) -> Step:
    text, logprobs = str(choice["text"]), choice.get("logprobs") or {}
    reason = choice["finish_reason"]
    tokens = choice.get("token_ids")
    if tokens is None:
        tokens = [-1] * len(logprobs["tokens"])
    values = [value for value in logprobs.get("token_logprobs") or [] if value is not None]
    # Servers without include_stop_str_in_output omit the stop text and report only "stop".
    by_text = text.endswith(stop) or choice.get("stop_reason") == stop
    if by_text and not text.endswith(stop):
        text += stop
    return _step(tokens, text, reason, by_text, math.fsum(values) / len(values) if values else None)


def _read_sglang(choice: Mapping[str, Any], stop: str) -> Step:
    reason = choice["meta_info"]["finish_reason"]
    text = str(choice["text"])
    by_text = text.endswith(stop) or reason.get("matched") == stop
    return _step(choice["output_ids"], text, reason["type"], by_text, None)


def _step(tokens: Sequence[int], text: str, reason: str, by_text: bool, logprob: float | None) -> Step:
    if reason not in ("stop", "length"):
        return Step(error=f"the server ended the step with finish_reason {reason!r}")
    ended: Ended = "length" if reason == "length" else "step" if by_text else "end"
    return Step(tuple(int(token) for token in tokens), text, ended, logprob)
