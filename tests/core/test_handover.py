"""One engine reads the prompts, another continues: the tokens and log-probs equal those of one engine."""

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
    """Around the borders of a block of 16, and two that share a beginning."""
    draw = np.random.default_rng(4)
    made = [draw.integers(3, tiny.VOCAB, n).tolist() for n in (1, 7, 15, 16, 17, 40, 64)]
    return [*made, [*made[-1][:50], 5, 6, 7]]


def params(index: int, **options: object) -> SamplingParams:
    return SamplingParams(**{"n": 3, "max_tokens": 20, "temperature": 0.8, "seed": 100 + index, **options})  # type: ignore[arg-type]


def split(first: Engine, second: Engine, asked: list[list[int]], options: list[SamplingParams]) -> list[Sample]:
    begun = first.generate(asked, [replace(o, max_tokens=1, min_tokens=min(1, o.min_tokens)) for o in options])
    for prompt in asked:
        second.import_kv(first.export_kv(prompt))
    open_ = [[s for s in begun if s.group == g and s.finish_reason == "length"] for g in range(len(asked))]
    done = {(s.group, s.index): s for s in begun}
    done |= {(s.group, s.index): s for s in second.generate(asked, options, begun=open_)}
    return [done[key] for key in sorted(done)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_prefill_and_decode_apart_give_the_tokens_of_one_engine(family: str) -> None:
    asked = prompts()
    options = [params(i) for i in range(len(asked))]
    whole = Engine(tiny.model(family)).generate(asked, options)
    first, second = Engine(tiny.model(family)), Engine(tiny.model(family))
    found = split(first, second, asked, options)
    assert [s.token_ids for s in found] == [s.token_ids for s in whole]
    assert [s.finish_reason for s in found] == [s.finish_reason for s in whole]
    for ours, theirs in zip(found, whole, strict=True):
        # Two roundings of a log-prob of -9, whose batches may have had other shapes.
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=5e-6, rtol=0)
        assert np.allclose(ours.raw_logprobs, theirs.raw_logprobs, atol=5e-6, rtol=0)
        assert ours.versions == theirs.versions
    # The second engine computed one token of a sample at a time, and of the prompts nothing.
    drawn = sum(len(s.token_ids) for s in found)
    assert second.stats().tokens_computed <= drawn
    first.check()
    second.check()


def test_where_blocks_are_short_the_rest_is_computed_and_the_result_is_the_same() -> None:
    asked = prompts()
    options = [params(i) for i in range(len(asked))]
    whole = Engine(tiny.model("llama")).generate(asked, options)
    first = Engine(tiny.model("llama"))
    block = first.decoder.token_bytes() * first.backend.block_size
    second = Engine(tiny.model("llama"), kv_bytes=7 * block)
    assert [s.token_ids for s in split(first, second, asked, options)] == [s.token_ids for s in whole]
    second.check()


def test_stop_strings_and_least_lengths_go_on_from_where_they_were() -> None:
    engine = Engine.load("sums-policy", device="cpu")
    asked = [engine.tokenizer.encode(text) for text in ("3+4+5=", "9+1=", "2+2+2+2=")]
    options = [params(i, stop=(";",), temperature=1.0, min_tokens=2) for i in range(3)]
    whole = engine.generate(asked, options)
    found = split(Engine.load("sums-policy", device="cpu"), Engine.load("sums-policy", device="cpu"), asked, options)
    assert [(s.token_ids, s.text, s.finish_reason) for s in found] == [
        (s.token_ids, s.text, s.finish_reason) for s in whole
    ]


def test_what_cannot_be_taken_is_refused() -> None:
    first, second = Engine(tiny.model("llama")), Engine(tiny.model("llama"))
    prompt = prompts()[5]
    first.generate([prompt], [params(0, max_tokens=1)])
    given = first.export_kv(prompt)
    assert len(given.tokens) == len(prompt)
    second.new_version(1)
    with pytest.raises(RequestError, match="version 0, but the engine has version 1"):
        second.import_kv(given)
    other = Engine(tiny.model("qwen3"))
    with pytest.raises(RequestError, match="same model"):
        other.import_kv(given)
    sample = first.generate([prompt], [params(0, max_tokens=1)])
    with pytest.raises(RequestError, match="seed"):
        first.generate([prompt], [SamplingParams()], begun=[sample])
    with pytest.raises(RequestError, match="fewer than max_tokens"):
        first.generate([prompt], [params(0, max_tokens=1)], begun=[sample])


def test_what_the_tree_does_not_have_is_not_given() -> None:
    engine = Engine(tiny.model("llama"))
    assert engine.export_kv(prompts()[3]) == Handover((), 0, [], [])


def test_nothing_can_be_handed_over() -> None:
    first, second = Engine(tiny.model("llama")), Engine(tiny.model("llama"))
    assert second.import_kv(first.export_kv([3, 4, 5])) == 0
