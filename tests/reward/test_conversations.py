"""A conversation is read the same way in every form, as transformers renders it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from plaudit.config.reward import OutcomeTable, ProcessTable, RlRewardTable
from plaudit.errors import Refused
from plaudit.models.chat.chat import _encode_plain, render_chat
from plaudit.models.text import codec_of
from plaudit.records import Item, Prompt, Sample
from plaudit.reward import ModelInfo, OutcomeReading, load_reward
from plaudit.reward.process import ProcessReading
from plaudit.train.rollouts.scorer import Scorer

from . import tiny
from .conversations import ANSWERS, ASK, TEMPLATES, TURNS, answered, forms, tokenizer_of

FACTS = ModelInfo("Tiny", 400, 512, ("reward",), False)


def reading(name: str, **keys: object) -> OutcomeReading:
    return OutcomeReading(OutcomeTable.model_validate({"path": "x", **keys}), tokenizer_of(name), FACTS)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [(ASK,), TURNS], ids=["one turn", "turns"])
def test_every_form_has_the_tokens_of_transformers(name: str, prompt: tuple[dict[str, str], ...]) -> None:
    of = reading(name)
    items = [(form, answer, item) for answer in ANSWERS for form, item in forms(prompt, answer).items()]
    for prerendered in (False, True):
        if prerendered:
            of = reading(name)
            of.prerender([item for _, _, item in items])
        for form, answer, item in items:
            expected = of.intake.tokenizer.apply_chat_template(answered(prompt, answer), return_dict=False)
            work = of.prepare(item)
            assert work.tokens == expected, (form, answer)
            assert work.positions == (len(expected) - 1,)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_cut_answer_ends_with_its_text(name: str) -> None:
    of = reading(name)
    for answer in ("hell no", "hell no \n", "hell <|im_end|></s>"):
        messages = answered((ASK,), answer)
        whole = of.intake.tokenizer.apply_chat_template(
            answered((ASK,), answer.partition("<")[0]), continue_final_message=True, return_dict=False
        )
        for item in (Item(prompt=(ASK,), response=answer, cut=True), Item(messages=tuple(messages), cut=True)):
            tokens = of.prepare(item).tokens
            assert tokens[: len(whole)] == whole if "<" in answer else tokens == whole
            assert of.intake.tokenizer.decode(tokens).rstrip().endswith(answer.rstrip())
            assert tokens[-1] != of.end
    calls = [{"function": {"name": "add", "arguments": {}}}]
    with pytest.raises(Refused, match="no tool calls"):
        of.prepare(Item(messages=(ASK, {"role": "assistant", "content": "", "tool_calls": calls}), cut=True))


def test_a_cut_answer_has_no_end_token_in_any_reading() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    apart, end = reading("qwen2_5", answer="apart"), tokenizer.eos_token_id
    steps = ProcessReading(ProcessTable(path="x"), tokenizer, replace(FACTS, labels=("wrong", "right")))
    for of in (reading("qwen2_5"), apart, steps):
        finished = of.prepare(Item(prompt="hello", response="hell no"))
        cut = of.prepare(Item(prompt="hello", response="hell no", cut=True))
        assert finished.tokens == [*cut.tokens, end]
        assert cut.positions == (len(cut.tokens) - 1,)
    opening = apart.prepare(Item(prompt=(ASK,), response="", cut=True)).tokens
    assert opening == render_chat(tokenizer, [ASK], add_generation_prompt=True)
    with pytest.raises(ValueError, match="read as it is"):
        Item(text="hello", cut=True)


def test_answer_apart_is_read_at_the_end_token_in_every_form() -> None:
    of = reading("qwen3", answer="apart")
    opening = of.intake.tokenizer.apply_chat_template([ASK], add_generation_prompt=True, return_dict=False)
    expected = [*opening, *of.intake.content("hell no"), of.end]
    assert {form: of.prepare(item).tokens for form, item in forms((ASK,), "hell no").items()} == dict.fromkeys(
        forms((ASK,), "hell no"), expected
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_truncation_on_the_right_keeps_what_follows_the_answer(name: str) -> None:
    whole = reading(name).prepare(Item(prompt=(ASK,), response="hello " * 20)).tokens
    cut = reading(name).prepare(Item(prompt=(ASK,), response="hello " * 20, cut=True)).tokens
    of, end = reading(name, max_tokens=len(whole) - 9), whole[len(cut) :] if whole[: len(cut)] == cut else []
    assert end[:1] == [of.end]
    for item in forms((ASK,), "hello " * 20).values():
        right = OutcomeReading.prepare(of, Item(item.prompt, item.response, item.messages, truncate="right"))
        assert right.truncated
        assert right.tokens == [*whole[: len(whole) - 9 - len(end)], *end]


texts = st.text(st.sampled_from("hello <>|\n[]_imend▁é😀"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(TEMPLATES)), parts=st.lists(st.lists(texts, max_size=4), max_size=4), data=st.data())
def test_parts_between_control_tokens_are_encoded_as_in_the_whole_text(
    name: str, parts: list[list[str]], data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(name)
    codec = codec_of(tokenizer)
    assert codec.divides
    names = st.sampled_from([*codec.controls.values(), "<think>", ""])
    written = ["".join(part + data.draw(names) for part in each) for each in parts]
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in written]
    assert _encode_plain(tokenizer, codec, written) == expected
    assert _encode_plain(tokenizer, codec, written) == expected  # from the cache


def test_tokenizers_whose_control_tokens_take_in_their_surroundings_encode_whole_texts() -> None:
    for extra in (
        AddedToken("<s>", special=True, normalized=False, lstrip=True),
        AddedToken("<s>", special=True, normalized=True),
        AddedToken("x<|im_end|>", special=False, normalized=False),
        AddedToken("a<", special=False, normalized=False),
    ):
        tokenizer = tokenizer_of("qwen2_5")
        tokenizer.add_tokens([extra], special_tokens=extra.special)
        codec = codec_of(tokenizer)
        assert not codec.divides
        text = "<|im_start|>a<|im_end|> <s>x<|im_end|>"
        assert _encode_plain(tokenizer, codec, [text]) == [tokenizer.encode(text, add_special_tokens=False)]


def test_rollouts_score_samples_cut_at_their_limit_as_cut(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen2_5")
    path = tiny.write(tmp_path, tiny.model("outcome", tokenizer, ("reward",)), tokenizer)
    scorer = Scorer(RlRewardTable.model_validate({"path": path}))
    prompt = Prompt("hello", extra={"messages": (ASK,)})

    def sample(reason: str) -> Sample:
        return Sample((1,), (2,), "hell no", (0.0,), (0.0,), (0,), (1,), reason)  # type: ignore[arg-type]

    finished, cut = scorer.score([prompt, prompt], [sample("stop"), sample("length")])
    reward = load_reward(path)
    items = [Item(prompt=(ASK,), response="hell no"), Item(prompt=(ASK,), response="hell no", cut=True)]
    expected = [score.value for score in reward.score(items)]  # type: ignore[union-attr]
    assert [finished.reward, cut.reward] == expected
    assert expected[0] != expected[1]
