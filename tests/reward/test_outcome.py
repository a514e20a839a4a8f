"""One score per response: its tokens, the position where the score is read, and how the score is transformed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plaudit.config.reward import OutcomeTable, parse_reward
from plaudit.errors import ConfigError, Refused
from plaudit.records import Item, Score
from plaudit.reward import ModelInfo, OutcomeReading, complete, load_reward

from . import tiny

FACTS = ModelInfo("Tiny", 300, 64, ("reward",), False)
CHAT = ({"role": "user", "content": "hello?"}, {"role": "assistant", "content": "hell no"})


def reading(tokenizer: Any = None, facts: ModelInfo = FACTS, **keys: Any) -> OutcomeReading:
    table = parse_reward({"kind": "outcome", "path": "x", **keys}, "test")
    assert isinstance(table, OutcomeTable)
    return OutcomeReading(table, tokenizer or tiny.chatml(), facts)


def refusal(of: OutcomeReading, item: Item) -> str:
    with pytest.raises(Refused) as caught:
        of.prepare(item)
    assert "\n" not in str(caught.value)
    return caught.value.type


def test_every_item_form_gives_the_expected_tokens() -> None:
    tokenizer = tiny.llama3()
    of = reading(tokenizer, replace(FACTS, vocab_size=400))
    bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    prompt, response = tokenizer.encode("hello?", add_special_tokens=False), tokenizer.encode("hell no")[1:]
    expected = [bos, *prompt, *response, end]
    assert of.prepare(Item(prompt="hello?", response="hell no")).tokens == expected
    assert of.prepare(Item(prompt="hello?", response=("hell", " no"))).tokens == expected
    assert of.prepare(Item(tokens=tuple(expected))).tokens == expected
    assert of.prepare(Item(text="hello?hell no<|eot_id|>")).tokens[0] == bos
    assert of.prepare(Item(text="<|begin_of_text|>x")).tokens == of.prepare(Item(text="x")).tokens
    rendered = tokenizer.apply_chat_template(list(CHAT), return_dict=False)
    assert of.prepare(Item(messages=CHAT)).tokens == rendered
    assert of.prepare(Item(prompt=CHAT[:1], response="hell no")).tokens == rendered
    work = of.prepare(Item(prompt="hello?", response="hell no"))
    assert work.positions == (len(expected) - 1,)
    assert work.columns is None
    assert work.steps == 0


@pytest.mark.parametrize("bad", [(), ({"role": "wizard", "content": "x"},)])
def test_conversations_rendered_in_a_batch_equal_those_rendered_alone(bad: tuple[dict[str, str], ...]) -> None:
    contents = ["hello?", "<|im_end|>", "hello?", "no", "h\ufdd0i"]
    items = [Item(prompt=({"role": "user", "content": each},), response="hell no") for each in contents]
    alone = [reading().prepare(item) for item in items]
    of = reading()
    of.prerender([*items, Item(prompt="plain", response="text"), Item(prompt=bad, response="x")])
    assert [of.prepare(item) for item in items] == alone
    assert refusal(of, Item(prompt=bad, response="x")) == "bad_messages"
    assert of.prepare(Item(messages=CHAT)) == reading().prepare(Item(messages=CHAT))


def test_messages_follow_the_template_or_the_training_format() -> None:
    tokenizer = tiny.chatml()
    rendered = tokenizer.apply_chat_template(list(CHAT), return_dict=False)
    newline = tokenizer.encode("\n")
    assert reading(tokenizer).prepare(Item(messages=CHAT)).tokens == rendered
    apart = reading(tokenizer, answer="apart").prepare(Item(messages=CHAT)).tokens
    assert [*apart, *newline] == rendered
    assert apart[-1] == tokenizer.eos_token_id


def test_content_never_becomes_a_control_token() -> None:
    of = reading()
    controls = {i for i, token in of.intake.tokenizer.added_tokens_decoder.items() if token.special}
    work = of.prepare(Item(prompt="<|im_end|>", response="no<|im_start|><|endoftext|>"))
    assert not controls.intersection(work.tokens[:-1])
    bad = ({"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "<|im_start|>"})
    assert sum(t in controls for t in of.prepare(Item(messages=bad)).tokens) == 4
    assert sum(t in controls for t in of.prepare(Item(text="<|im_end|>hello<|im_end|>")).tokens) == 2


def test_empty_prompts_responses_and_texts() -> None:
    with_bos = reading(tiny.llama3(), replace(FACTS, vocab_size=400))
    assert len(with_bos.prepare(Item(prompt="", response="")).tokens) == 2
    assert len(with_bos.prepare(Item(prompt="", response="hello")).tokens) == 3
    without = reading()
    assert refusal(without, Item(prompt="", response="hello")) == "empty"
    assert without.prepare(Item(prompt="hello", response="")).tokens[-1] == without.end
    assert refusal(reading(end=False), Item(prompt="hello", response="")) == "empty"
    assert refusal(without, Item(text="")) == "empty"
    assert refusal(without, Item(tokens=())) == "empty"


def test_invalid_items_are_rejected_with_the_error_type() -> None:
    of = reading()
    bad: list[tuple[Item, str]] = [
        (Item(prompt="\ud800", response="x"), "bad_text"),
        (Item(prompt="x", response="\udfff"), "bad_text"),
        (Item(text="\ud800"), "bad_text"),
        (Item(messages=({"role": "user", "content": "x"},)), "bad_messages"),
        (Item(messages=({"role": "wizard", "content": "x"}, CHAT[1])), "bad_messages"),
        (Item(messages=("x", CHAT[1])), "bad_messages"),  # type: ignore[arg-type]
        (Item(messages=(CHAT[0], {"role": "assistant", "content": None})), "bad_messages"),
        (Item(prompt=(), response="x"), "bad_messages"),
    ]
    bad += [(Item(tokens=(1, token)), "bad_tokens") for token in (-1, 300, 2**63, False, 1.5, None, "1")]  # type: ignore[arg-type]
    for item, expected in bad:
        assert refusal(of, item) == expected, item
    broken = tiny.chatml()
    broken.chat_template = "{{ raise_exception('only poems') }}"
    assert refusal(reading(broken), Item(messages=CHAT)) == "bad_messages"
    assert refusal(reading(tiny.sentence_piece()), Item(messages=CHAT)) == "unsupported_form"
    unusual = of.prepare(Item(prompt="\0\ufeff", response="e" + "\u0301" * 20))
    assert unusual.tokens[-1] == of.end


def test_truncation() -> None:
    of = reading(tiny.llama3(), replace(FACTS, vocab_size=400, max_positions=12), max_tokens=10)
    item = Item(prompt="abcdef", response="uvwxyz")
    full = [of.intake.begin[0], *of.intake.content("abcdef"), *of.intake.content("uvwxyz"), of.end]
    with pytest.raises(Refused, match="14 tokens exceed the limit of 10"):
        of.prepare(item)
    left, right = of.prepare(replace(item, truncate="left")), of.prepare(replace(item, truncate="right"))
    assert left.truncated
    assert left.tokens == [full[0], *full[-9:]]
    assert right.truncated
    assert right.tokens == [*full[:9], of.end]  # the response is truncated, but the position of the score is kept
    ids = Item(tokens=tuple(full), truncate="right")
    assert of.prepare(ids).tokens == full[:10]
    assert of.prepare(ids).positions == (9,)
    exact = of.prepare(Item(prompt="abcd", response="wxyz", truncate="left"))
    assert not exact.truncated
    assert len(exact.tokens) == 10


def test_weights_standardise_and_attributes_equal_values_computed_by_hand() -> None:
    facts = replace(FACTS, labels=("helpful", "kind", "long"))
    of = reading(facts=facts, weights={"helpful": 2.0, "long": -0.5}, standardise={"mean": 1.0, "std": 4.0})
    work = of.prepare(Item(prompt="hello", response="x"))
    score = of.finish(work, np.array([[3.0, 100.0, 2.0]], dtype=np.float32))
    assert score.value == (2 * 3 - 0.5 * 2 - 1) / 4
    assert score.attributes == {"helpful": 3.0, "kind": 100.0, "long": 2.0}
    assert score.tokens == len(work.tokens)
    with pytest.raises(ConfigError, match="set the weight of each"):
        reading(facts=facts)
    with pytest.raises(ConfigError, match="did you mean 'kind'"):
        reading(facts=facts, weights={"kinds": 1.0})


def test_mean_pool_equals_a_value_computed_by_hand() -> None:
    of = reading(pool="mean")
    work = of.prepare(Item(prompt="hello", response="x"))
    assert work.positions == tuple(range(len(work.tokens)))
    values = np.arange(len(work.tokens), dtype=np.float32)[:, None]
    assert of.finish(work, values).value == (len(work.tokens) - 1) / 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_value_is_an_error(bad: float) -> None:
    of = reading()
    score = of.finish(of.prepare(Item(prompt="hello", response="x")), np.array([[bad]], dtype=np.float32))
    assert score.value is None
    assert score.error is not None
    assert score.error.type == "nonfinite_score"


def test_scores_equal_plain_transformers(tmp_path: Path) -> None:
    tokenizer = tiny.chatml()
    module = tiny.model("outcome", tokenizer, labels=("a", "b"))
    path = tiny.write(tmp_path, module, tokenizer)
    keys = {"path": path, "weights": {"a": 1.0, "b": 3.0}}
    ids = [*tokenizer.encode("hello?"), *tokenizer.encode("hell"), tokenizer.eos_token_id]
    rows = tiny.plain_class(module, ids)
    for pool, expected in (("last", rows[-1]), ("mean", rows.mean(axis=0))):
        (score,) = load_reward(complete({**keys, "pool": pool}, "test")).score([Item(prompt="hello?", response="hell")])
        assert isinstance(score, Score)
        assert score.value == pytest.approx(expected[0] + 3 * expected[1], abs=1e-5)
        assert score.attributes == pytest.approx({"a": expected[0], "b": expected[1]}, abs=1e-5)
