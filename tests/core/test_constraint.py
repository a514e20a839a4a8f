"""Responses that match a schema or a regular expression: alone, batched, preempted and resumed in another engine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.errors import RequestError
from plaudit.records import Sample
from tests.models.builders import byte_tokenizer, causal

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["sum", "add"]}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
REGEX = r"(yes|no)(, [a-f]{2,4}){1,3}\."
PROMPTS = ["hello", "7+8=", "a", "judge: "]
OPTIONS = [
    SamplingParams(n=2, json_schema=SCHEMA, seed=1, max_tokens=150),
    SamplingParams(regex=REGEX, seed=2, max_tokens=60, temperature=1.5, top_k=200),
    SamplingParams(seed=3, max_tokens=12),
    SamplingParams(regex=REGEX, temperature=0, max_tokens=60, repetition_penalty=1.1),
]
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.manual_seed(3)
    # Float64, so that rounding, which differs between batch shapes, cannot change a sampled token.
    module = causal(vocab_size=len(TOKENIZER), max_position_embeddings=256, hidden_size=32).double()
    return Engine(module, TOKENIZER, look_every=8)


def results_of(samples: list[Sample]) -> list[tuple[object, ...]]:
    return [(s.token_ids, s.text, s.finish_reason) for s in samples]


def test_constrained_samples_match_alone_batched_preempted_and_resumed(engine: Engine) -> None:
    batched = engine.generate(PROMPTS, OPTIONS)
    for sample in batched:
        option = OPTIONS[sample.group]
        if option.json_schema is not None:
            assert sample.finish_reason == "stop", sample
            jsonschema.validate(json.loads(sample.text), SCHEMA)
        elif option.regex is not None:
            assert re.fullmatch(REGEX, sample.text), sample
        if option.constrained and option.temperature:
            assert sample.tempered_logprobs is not None
            assert all(
                full <= constrained + 1e-6 for full, constrained in zip(sample.behaviour, sample.logprobs, strict=True)
            )
    assert len({s.text for s in batched[:2]}) == 2
    alone = [s for prompt, option in zip(PROMPTS, OPTIONS, strict=True) for s in engine.generate([prompt], option)]
    assert results_of(alone) == results_of(batched)

    finished: dict[tuple[int, int], Sample] = {}
    engine.submit_all(PROMPTS, OPTIONS)
    while engine.busy:  # a preemption after every eighth token
        finished |= {(u.request, u.index): u.sample for u in engine.step() if u.sample is not None}
        engine.sleep()
        engine.wake()
    assert results_of([finished[key] for key in sorted(finished)]) == results_of(batched)

    partial = engine.generate(PROMPTS[:1], replace(OPTIONS[0], max_tokens=7))
    assert {s.finish_reason for s in partial} == {"length"}
    assert results_of(engine.generate(PROMPTS[:1], OPTIONS[0], [partial])) == results_of(batched[:2])
    chunks = list(engine.stream(PROMPTS[1], OPTIONS[1]))
    assert "".join(chunk.text for chunk in chunks) == batched[2].text


def test_invalid_constraints_are_rejected(engine: Engine) -> None:
    for options, words in (
        ({"regex": "(["}, "regex cannot be used as a constraint"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema cannot be used as a constraint"),
        ({"json_schema": "{"}, "json_schema cannot be used as a constraint"),
        ({"json_schema": {}, "regex": "a"}, "regex cannot be combined with json_schema"),
        ({"regex": "a", "min_tokens": 2}, "min_tokens cannot be combined with regex"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.generate(PROMPTS[:1], SamplingParams(**options))
    with pytest.raises(RequestError, match="regex needs a tokenizer and an end token"):
        Engine(engine.decoder.module).generate([[5]], SamplingParams(regex="a"))
