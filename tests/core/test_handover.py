"""One engine prefills, another decodes: the tokens and log-probs equal those of a single engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plaudit.core import Engine, SamplingParams
from plaudit.core.kv.handover import Handover
from plaudit.errors import RequestError
from plaudit.records import Sample
from tests.core import tiny


def prompts() -> list[list[int]]:
    """Prompt lengths around the borders of a block of 16, and two prompts that share a prefix."""
    rng = np.random.default_rng(4)
    random_prompts = [rng.integers(3, tiny.VOCAB, n).tolist() for n in (1, 7, 15, 16, 17, 40, 64)]
    return [*random_prompts, [*random_prompts[-1][:50], 5, 6, 7]]


def params(index: int, **options: object) -> SamplingParams:
    return SamplingParams(**{"n": 3, "max_tokens": 20, "temperature": 0.8, "seed": 100 + index, **options})  # type: ignore[arg-type]


def split(first: Engine, second: Engine, requested: list[list[int]], options: list[SamplingParams]) -> list[Sample]:
    begun = first.generate(requested, [replace(o, max_tokens=1, min_tokens=min(1, o.min_tokens)) for o in options])
    for prompt in requested:
        second.import_kv(first.export_kv(prompt))
    unfinished = [[s for s in begun if s.group == g and s.finish_reason == "length"] for g in range(len(requested))]
    done = {(s.group, s.index): s for s in begun}
    done |= {(s.group, s.index): s for s in second.generate(requested, options, begun=unfinished)}
    return [done[key] for key in sorted(done)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_separate_prefill_and_decode_engines_match_a_single_engine(family: str) -> None:
    requested = prompts()
    options = [params(i) for i in range(len(requested))]
    expected = Engine(tiny.model(family)).generate(requested, options)
    first, second = Engine(tiny.model(family)), Engine(tiny.model(family))
    actual = split(first, second, requested, options)
    assert [s.token_ids for s in actual] == [s.token_ids for s in expected]
    assert [s.finish_reason for s in actual] == [s.finish_reason for s in expected]
    for sample, reference in zip(actual, expected, strict=True):
        # Two rounding errors of a log-prob of -9; the batches may have had different shapes.
        assert np.allclose(sample.logprobs, reference.logprobs, atol=5e-6, rtol=0)
        assert np.allclose(sample.raw_logprobs, reference.raw_logprobs, atol=5e-6, rtol=0)
        assert sample.versions == reference.versions
    # The second engine computed at most one token per sampled token, and no prompt tokens.
    sampled_tokens = sum(len(s.token_ids) for s in actual)
    assert second.stats().tokens_computed <= sampled_tokens
    first.check()
    second.check()


def test_import_into_a_small_pool_recomputes_the_rest_with_equal_results() -> None:
    requested = prompts()
    options = [params(i) for i in range(len(requested))]
    expected = Engine(tiny.model("llama")).generate(requested, options)
    first = Engine(tiny.model("llama"))
    block = first.decoder.token_bytes() * first.backend.block_size
    second = Engine(tiny.model("llama"), kv_bytes=7 * block)
    assert [s.token_ids for s in split(first, second, requested, options)] == [s.token_ids for s in expected]
    second.check()


def test_stop_strings_and_min_tokens_continue_after_handover() -> None:
    engine = Engine.load("sums-policy", device="cpu")
    requested = [engine.tokenizer.encode(text) for text in ("3+4+5=", "9+1=", "2+2+2+2=")]
    options = [params(i, stop=(";",), temperature=1.0, min_tokens=2) for i in range(3)]
    expected = engine.generate(requested, options)
    actual = split(
        Engine.load("sums-policy", device="cpu"), Engine.load("sums-policy", device="cpu"), requested, options
    )
    assert [(s.token_ids, s.text, s.finish_reason) for s in actual] == [
        (s.token_ids, s.text, s.finish_reason) for s in expected
    ]


def test_invalid_handovers_are_rejected() -> None:
    first, second = Engine(tiny.model("llama")), Engine(tiny.model("llama"))
    prompt = prompts()[5]
    first.generate([prompt], [params(0, max_tokens=1)])
    handover = first.export_kv(prompt)
    assert len(handover.tokens) == len(prompt)
    second.new_version(1)
    with pytest.raises(RequestError, match="version 0, but the engine has version 1"):
        second.import_kv(handover)
    other = Engine(tiny.model("qwen3"))
    with pytest.raises(RequestError, match="same model"):
        other.import_kv(handover)
    sample = first.generate([prompt], [params(0, max_tokens=1)])
    with pytest.raises(RequestError, match="seed"):
        first.generate([prompt], [SamplingParams()], begun=[sample])
    with pytest.raises(RequestError, match="fewer than max_tokens"):
        first.generate([prompt], [params(0, max_tokens=1)], begun=[sample])


def test_export_of_an_uncached_prompt_is_empty() -> None:
    engine = Engine(tiny.model("llama"))
    assert engine.export_kv(prompts()[3]) == Handover((), 0, [], [])


def test_import_of_an_empty_handover_imports_nothing() -> None:
    first, second = Engine(tiny.model("llama")), Engine(tiny.model("llama"))
    assert second.import_kv(first.export_kv([3, 4, 5])) == 0
