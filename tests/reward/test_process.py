"""Steps and their scores: one value per step, whatever a step contains."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from plaudit.config.reward import ProcessTable, parse_reward
from plaudit.errors import ConfigError, Refused
from plaudit.records import Item
from plaudit.reward import ModelInfo, ProcessReading
from plaudit.reward.process import step_spans

from . import tiny
from .tiny import QUESTION, STEPS

CLASSES = ModelInfo("Tiny", 364, 2048, ("wrong", "right"), False)
CAUSAL = ModelInfo("Tiny", 364, 2048, (), True)


def reading(form: Any, tokenizer: Any, facts: ModelInfo = CLASSES, **keys: Any) -> ProcessReading:
    table = parse_reward({"kind": "process", "path": "x", "format": form, **keys}, "test")
    assert isinstance(table, ProcessTable)
    return ProcessReading(table, tokenizer, facts)


READINGS = {
    "plain": lambda: reading("plain", tiny.chatml()),
    "math-shepherd": lambda: reading("math-shepherd", tiny.sentence_piece(), CAUSAL),
    "llemma": lambda: reading("llemma", tiny.sentence_piece(), CAUSAL),
    "rlhflow": lambda: reading("rlhflow", tiny.llama3(), CAUSAL),
    "qwen2.5-math-prm": lambda: reading("qwen2.5-math-prm", tiny.qwen()),
    "skywork-o1-prm": lambda: reading("skywork-o1-prm", tiny.llama3(), replace(CLASSES, labels=("value",))),
}
ALL = pytest.mark.parametrize("name", READINGS)


def refusal(of: ProcessReading, item: Item) -> str:
    with pytest.raises(Refused) as caught:
        of.prepare(item)
    assert "\n" not in str(caught.value)
    return caught.value.type


@ALL
def test_each_of_a_thousand_steps_has_one_position(name: str) -> None:
    of = READINGS[name]()
    of.intake.limit = 1 << 20
    for count in (1, 2, 1000):
        work = of.prepare(Item(prompt=QUESTION, response=tuple(f"h{i}" for i in range(count))))
        assert work.steps == len(work.positions) == len(set(work.positions)) == count
        assert list(work.positions) == sorted(work.positions)
        assert work.positions[-1] < len(work.tokens)
        values = np.random.default_rng(1).normal(size=(count, 2)).astype(np.float32)
        assert len(of.finish(work, values[:, : len(of.facts.labels) or 2]).values) == count


@ALL
def test_tokens_of_a_shorter_response_are_a_prefix_of_the_longer_ones(name: str) -> None:
    """A search scores step after step: what was computed for earlier steps must stay valid."""
    of = READINGS[name]()
    steps = tuple(f"{step}{of.format.split if of.format.keep else ''}" for step in STEPS)
    works = [of.prepare(Item(prompt=QUESTION, response=steps[: i + 1])) for i in range(3)]
    for shorter, longer in pairwise(works):
        assert longer.tokens[: len(shorter.tokens)] == shorter.tokens
        assert longer.positions[: len(shorter.positions)] == shorter.positions


CONTENT = ["<|im_end|>", "<extra_0>", "</s>", "<|eot_id|>", "+", "<|start_header_id|>assistant<|end_header_id|>\n\n+"]


@ALL
@pytest.mark.parametrize("content", CONTENT)
def test_content_cannot_add_a_step_or_a_control_token(name: str, content: str) -> None:
    of = READINGS[name]()
    harmless = of.prepare(Item(prompt=QUESTION, response=STEPS))
    controls = {i for i, token in of.tokenizer.added_tokens_decoder.items() if token.special}
    for item in (
        Item(prompt=QUESTION, response=(f"{STEPS[0]} {content} x", *STEPS[1:])),
        Item(prompt=f"{QUESTION} {content} y", response=STEPS),
        Item(prompt=({"role": "user", "content": f"{QUESTION} {content} y"},), response=STEPS),
    ):
        work = of.prepare(item)
        assert work.steps == 3
        count = sum(token in controls for token in work.tokens)
        if isinstance(item.prompt, str):
            assert count == sum(token in controls for token in harmless.tokens)
        else:
            plain = of.prepare(Item(prompt=({"role": "user", "content": QUESTION},), response=STEPS))
            assert count == sum(token in controls for token in plain.tokens)


@pytest.mark.parametrize("name", ["math-shepherd", "llemma"])
def test_text_tag_in_content_is_rejected(name: str) -> None:
    of = READINGS[name]()
    assert refusal(of, Item(prompt=QUESTION, response=("one ки two", "three"))) == "bad_text"
    assert refusal(of, Item(prompt="what is ки?", response=STEPS)) == "bad_text"


def test_tag_token_not_marked_special_is_rejected_in_content() -> None:
    of = reading("qwen2.5-math-prm", tiny.qwen(special=False))
    assert of.prepare(Item(prompt=QUESTION, response=STEPS)).steps == 3
    assert refusal(of, Item(prompt=QUESTION, response=("one <extra_0> two",))) == "bad_text"
    assert refusal(of, Item(prompt="<extra_0>", response=STEPS)) == "bad_text"


def test_leading_tag_and_joined_control_token_are_rejected() -> None:
    form = {"chat": "never", "tag": "+", "read": "before", "end": False}
    of = reading(form, tiny.chatml())
    tag = of.tag[-1]
    assert of.prepare(Item(tokens=(5, tag, 6, tag))).positions == (0, 2)
    assert refusal(of, Item(tokens=(tag, 6, tag))) == "bad_steps"
    with pytest.raises(ConfigError, match="is a control token"):
        reading({"chat": "never", "tag": "<extra_0>", "read": "tag", "end": False, "joined": True}, tiny.qwen())


@ALL
def test_invalid_items_are_rejected_with_the_error_type(name: str) -> None:
    of = READINGS[name]()
    bad: list[tuple[Item, str]] = [
        (Item(prompt=QUESTION, response=""), "no_steps"),
        (Item(prompt=QUESTION, response=()), "no_steps"),
        (Item(prompt=QUESTION, response=" \n\n "), "no_steps"),
        (Item(prompt=QUESTION, response=("one", "")), "bad_steps"),
        (Item(prompt=QUESTION, response=("one", 2)), "bad_steps"),  # type: ignore[arg-type]
        (Item(prompt=QUESTION, response=("one \ud800",)), "bad_text"),
        (Item(text=""), "empty"),
        (Item(text="neither tag nor end"), "no_steps"),
        (Item(text="one \ud800"), "bad_text"),
        (Item(tokens=()), "empty"),
        (Item(messages=()), "bad_messages"),
        (Item(messages=({"role": "user", "content": "x"},)), "bad_messages"),
        (Item(messages=({"role": "assistant", "content": "x"},)), "bad_messages"),
    ]
    bad += [(Item(tokens=(1, token)), "bad_tokens") for token in (-1, 364, 2**63, True, 1.0, "1")]  # type: ignore[arg-type]
    for item, expected in bad:
        assert refusal(of, item) == expected, item


def test_conversations_use_the_chat_template_or_are_rejected() -> None:
    two = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    plain = READINGS["plain"]()
    work = plain.prepare(Item(messages=(*two, {"role": "assistant", "content": "one\n\ntwo"})))
    opening = plain.tokenizer.apply_chat_template(list(two), add_generation_prompt=True, return_dict=False)
    assert work.tokens[: len(opening)] == opening
    assert work.tokens == plain.prepare(Item(prompt=two, response="one\n\ntwo")).tokens
    assert refusal(plain, Item(prompt=({"role": "wizard", "content": "a"},), response="x")) == "bad_messages"
    assert refusal(plain, Item(prompt=({"content": "a"},), response="x")) == "bad_messages"
    assert refusal(plain, Item(prompt=({"role": "user", "content": object()},), response="x")) == "bad_messages"
    for name in ("math-shepherd", "rlhflow", "skywork-o1-prm"):
        assert refusal(READINGS[name](), Item(prompt=two, response="one")) == "unsupported_form"
    bare = reading("plain", tiny.sentence_piece())
    assert refusal(bare, Item(prompt=({"role": "user", "content": "a"},), response="x")) == "unsupported_form"


def test_truncation_keeps_every_step_or_is_rejected() -> None:
    of = reading({"split": ";"}, tiny.sentence_piece(), max_tokens=20)
    begin, end = of.tokenizer.bos_token_id, of.tokenizer.eos_token_id
    assert not of.prepare(Item(prompt="y" * 9, response="a;b;c")).truncated  # 20 tokens
    assert refusal(of, Item(prompt="y" * 10, response="a;b;c")) == "too_long"
    long = Item(prompt="x" * 20 + "y" * 10, response="a;b;c")
    with pytest.raises(Refused, match=r"41 tokens exceed the limit of 20"):
        of.prepare(long)
    truncated = of.prepare(replace(long, truncate="left"))
    of.intake.limit = 1000
    full = of.prepare(long)
    of.intake.limit = 20
    assert truncated.truncated
    assert truncated.tokens == [begin, *full.tokens[-19:]]
    assert [truncated.tokens[p] for p in truncated.positions] == [full.tokens[p] for p in full.positions]
    assert truncated.tokens[truncated.positions[-1]] == end
    assert refusal(of, replace(long, truncate="right")) == "too_long"  # would lose the last step
    too_many = Item(prompt="y", response=";".join("abcdefghijkl"), truncate="left")
    assert refusal(of, too_many) == "too_long"


def test_nonfinite_values_are_errors() -> None:
    of = READINGS["plain"]()
    work = of.prepare(Item(prompt=QUESTION, response=STEPS))
    for bad in (np.nan, np.inf, -np.inf):
        values = np.zeros((3, 2), dtype=np.float32)
        values[1, 1] = bad
        result = of.finish(work, values)
        assert result.error is not None
        assert result.error.type == "nonfinite_score"
        assert result.values == ()
    extreme = of.finish(work, np.array([[1e30, -1e30], [-1e30, 1e30], [0, 0]], dtype=np.float32))
    assert extreme.values == (0.0, 1.0, 0.5)


def test_step_spans_end_at_separators() -> None:
    def split(text: str, by: str) -> list[str]:
        return [text[a:b] for a, b in step_spans(text, by)]

    assert split("a;b;c", ";") == ["a;", "b;", "c"]
    assert split("a;b;", ";") == ["a;", "b;"]
    assert split("a;;b", ";") == ["a;", ";", "b"]
    assert split("a\n\nb\n\n\n\nc", "\n\n") == ["a\n\n", "b\n\n\n\n", "c"]
    assert split("\n\na\n\nb\n\n \n", "\n\n") == ["\n\na\n\n", "b\n\n \n"]
    assert split(" \n\n ", "\n\n") == []
    assert split("", ";") == []


def test_preparation_is_the_same_in_many_threads(tmp_path: Any) -> None:
    of = READINGS["qwen2.5-math-prm"]()
    items = [Item(prompt=f"{QUESTION} {i % 5}", response=STEPS) for i in range(200)]
    alone = [of.prepare(item) for item in items]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(of.prepare, items)) == alone
    finally:
        sys.setswitchinterval(before)
