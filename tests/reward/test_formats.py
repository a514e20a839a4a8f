"""Every process format against plain transformers on tokens built by hand, as its authors' code builds them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from plaudit.config.formats import FORMATS
from plaudit.config.reward import parse_reward
from plaudit.errors import ConfigError, ModelError
from plaudit.models.heads.mlp_head import Qwen2ForProcessRewardModel, Qwen2ForRewardModel
from plaudit.records import Item, StepScores
from plaudit.reward import ModelInfo, ProcessReading, complete, load_reward

from . import tiny
from .tiny import QUESTION, STEPS

TOLERANCE = 1e-5
QWEN_FACTS = ModelInfo("Qwen2ForProcessRewardModel", 400, 512, ("LABEL_0", "LABEL_1"), False)


def scored(path: str, item: Item, **keys: Any) -> StepScores:
    (result,) = load_reward(complete({"path": path, **keys}, "test")).score([item])
    assert isinstance(result, StepScores)
    return result


def check(result: StepScores, ids: list[int], expected: np.ndarray) -> None:
    assert result.error is None
    assert result.tokens == len(ids)
    assert result.values == pytest.approx(expected.tolist(), abs=TOLERANCE)
    assert result.aggregate == pytest.approx(expected[-1], abs=TOLERANCE)


def test_math_shepherd(tmp_path: Path) -> None:
    tokenizer = tiny.sentence_piece()
    module = tiny.model("causal", tokenizer)
    path = tiny.write(tmp_path, module, tokenizer)
    ids = tokenizer.encode(f"{QUESTION} " + "\n".join(f"{step} ки" for step in STEPS))
    good, bad = tokenizer.encode("+ -")[1:]
    tag = tokenizer.encode("ки")[-1]
    assert tokenizer.convert_ids_to_tokens([good, bad, tag]) == ["▁+", "▁-", "▁ки"]
    at = [i for i, token in enumerate(ids) if token == tag]
    expected = tiny.softmax(tiny.plain(module, ids)[at][:, [good, bad]])[:, 0]
    for item in (
        Item(prompt=QUESTION, response=STEPS),
        Item(prompt=QUESTION, response="\n".join(STEPS)),
        Item(tokens=tuple(ids)),
        Item(text=tokenizer.decode(ids[1:])),
        Item(messages=({"role": "user", "content": QUESTION}, {"role": "assistant", "content": "\n".join(STEPS)})),
    ):
        check(scored(path, item, format="math-shepherd"), ids, expected)


def test_llemma_score_is_the_mean_over_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = tiny.sentence_piece()
    module = tiny.model("causal", tokenizer)
    plain_path = tiny.write(tmp_path / "untiled", module, tokenizer)
    with pytest.raises(ModelError, match="do not repeat them"):
        load_reward(complete({"path": plain_path, "format": "llemma"}, "test"))
    with torch.no_grad():
        weight = module.lm_head.weight
        weight.copy_(weight[:2].repeat(len(weight) // 2, 1))
    path = tiny.write(tmp_path / "tiled", module, tokenizer)
    ids = tokenizer.encode(f"{QUESTION} " + "\n".join(f"{step} ки" for step in STEPS))
    at = [i for i, token in enumerate(ids) if token == tokenizer.encode("ки")[-1]]
    expected = tiny.sigmoid(tiny.plain(module, ids)[at].mean(axis=1))
    check(scored(path, Item(prompt=QUESTION, response=STEPS), format="llemma"), ids, expected)


def test_rlhflow_in_one_pass_equals_one_pass_per_step(tmp_path: Path) -> None:
    tokenizer = tiny.llama3()
    module = tiny.model("causal", tokenizer)
    path = tiny.write(tmp_path, module, tokenizer)
    good, bad = tokenizer.encode("+")[-1], tokenizer.encode("-")[-1]
    conversation: list[dict[str, str]] = []
    expected, ids = [], []
    for index, step in enumerate(STEPS):
        conversation.append({"role": "user", "content": step if index else f"{QUESTION} {step}"})
        conversation.append({"role": "assistant", "content": "+"})
        ids = tokenizer.apply_chat_template(conversation, return_dict=False)
        # "... <|end_header_id|> \n\n + <|eot_id|>": the third token from the end predicts the answer
        expected.append(tiny.softmax(tiny.plain(module, ids)[-3][[good, bad]])[0])
    for item in (
        Item(prompt=QUESTION, response=STEPS),
        Item(prompt=QUESTION, response="\n\n".join(STEPS) + "\n\n"),
        Item(prompt=({"role": "user", "content": QUESTION},), response=STEPS),
        Item(tokens=tuple(ids[:-1])),
    ):
        check(scored(path, item, format="rlhflow", aggregate="last"), ids[:-1], np.array(expected))


def test_qwen_math_prm(tmp_path: Path) -> None:
    tokenizer = tiny.qwen()
    module = tiny.model("steps", tokenizer, labels=("bad", "good"))
    path = tiny.write(tmp_path, module, tokenizer)
    system = "Please reason step by step, and put your final answer within \\boxed{}."
    conversation = [
        {"role": "system", "content": system},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "<extra_0>".join(STEPS) + "<extra_0>"},
    ]
    full = tokenizer.apply_chat_template(conversation, return_dict=False)
    tag = tokenizer.encode("<extra_0>")[0]
    at = [i for i, token in enumerate(full) if token == tag]
    expected = tiny.softmax(tiny.plain(module, full)[at])[:, 1]
    ids = full[: at[-1] + 1]  # tokens after the last tag cannot change its score
    for item in (
        Item(prompt=QUESTION, response=STEPS),
        Item(prompt=QUESTION, response="\n\n".join(STEPS)),
        Item(prompt=(conversation[0], conversation[1]), response=STEPS),
        Item(tokens=tuple(ids)),
    ):
        check(scored(path, item, format="qwen2.5-math-prm"), ids, expected)
    check(scored(path, Item(tokens=tuple(full)), format="qwen2.5-math-prm"), full, expected)


def test_qwen_reward_architectures_load_without_remote_code(tmp_path: Path) -> None:
    """As published: a head of two layers, no num_labels in the config, an unused vocabulary head."""
    tokenizer = tiny.qwen()
    keys = {**tiny.shape(tokenizer).to_dict(), "model_type": "qwen2"}
    config = Qwen2Config(**{k: v for k, v in keys.items() if k not in ("architectures", "rope_parameters")})
    for model_class in (Qwen2ForProcessRewardModel, Qwen2ForRewardModel):
        torch.manual_seed(7)
        module = model_class(config).eval()
        path = tiny.write(tmp_path / model_class.__name__, module, tokenizer)
        weights = Path(path) / "model.safetensors"
        save_file({**load_file(weights), "lm_head.weight": torch.zeros(4, 4)}, weights, {"format": "pt"})
        item = Item(prompt=QUESTION, response=STEPS)
        (result,) = load_reward(path).score([item])
        assert result.error is None
        if isinstance(result, StepScores):
            ids = ProcessReading(complete({"path": path}, ""), tokenizer, QWEN_FACTS).prepare(item).tokens
            at = [i for i, token in enumerate(ids) if token == tokenizer.encode("<extra_0>")[0]]
            check(result, ids, tiny.softmax(tiny.plain(module, ids)[at])[:, 1])
        else:
            ids = [*tokenizer.encode(QUESTION), *tokenizer.encode("".join(STEPS)), tokenizer.eos_token_id]
            assert result.value == pytest.approx(tiny.plain(module, ids)[-1][0], abs=TOLERANCE)


def test_skywork_o1_prm(tmp_path: Path) -> None:
    tokenizer = tiny.chatml()
    tokenizer.bos_token = "<|endoftext|>"
    module = tiny.model("value", tokenizer)
    path = tiny.write(tmp_path, module, tokenizer)
    newline = tokenizer.encode("\n")[-1]
    ids = tokenizer.encode("<|endoftext|>" + QUESTION + "\n")
    at = []
    for step in STEPS:
        ids += [*tokenizer.encode(step), newline]
        at.append(len(ids) - 1)
    expected = tiny.sigmoid(tiny.plain(module, ids)[at])
    for item in (
        Item(prompt=QUESTION, response=STEPS),
        Item(prompt=QUESTION, response="\n".join(STEPS)),
        Item(prompt=QUESTION, response="\n\n".join(STEPS) + "\n"),
    ):
        check(scored(path, item, format="skywork-o1-prm"), ids, expected)


@pytest.mark.parametrize("split", ["\n\n", "\n"])
def test_plain_format_with_a_tokenizer_that_merges_across_steps(tmp_path: Path, split: str) -> None:
    """ "\\nh" is one token: in a text tokenised as a whole, a step's end and the next step's start would merge."""
    tokenizer = tiny.chatml()
    module = tiny.model("steps", tokenizer, labels=("wrong", "right"))
    path = tiny.write(tmp_path, module, tokenizer)
    steps = [f"hello 1{split}", f"hell 2{split}", "he 3"]
    ids = tokenizer.encode("hello?")
    at = []
    for step in steps:
        ids += tokenizer.encode(step)
        at.append(len(ids) - 1)
    ids.append(tokenizer.eos_token_id)
    at[-1] = len(ids) - 1
    expected = tiny.softmax(tiny.plain(module, ids)[at])[:, 1]
    for item in (
        Item(prompt="hello?", response=tuple(steps)),
        Item(prompt="hello?", response="".join(steps)),
        Item(tokens=tuple(ids)),
    ):
        check(scored(path, item, format={"split": split}), ids, expected)
    # A response that ends with a separator is unfinished, so no end token is added.
    unfinished = scored(path, Item(prompt="hello?", response="".join(steps[:2])), format={"split": split})
    assert unfinished.values == pytest.approx(expected[:2].tolist(), abs=TOLERANCE)
    assert unfinished.tokens == at[1] + 1


def test_an_inline_format(tmp_path: Path) -> None:
    """OpenR's Math-psa: five newlines as the tag, " +" and " -" as the columns."""
    tokenizer = tiny.chatml()
    module = tiny.model("causal", tokenizer)
    path = tiny.write(tmp_path, module, tokenizer)
    form = {
        "chat": "never", "prompt": "{prompt} ", "keep": False, "step": "{step} ", "tag": "\n\n\n\n\n", "end": False,
        "read": "tag", "columns": ["+", "-"],
    }  # fmt: skip
    ids = tokenizer.encode(f"{QUESTION} ")
    at = []
    for step in STEPS:
        ids += [*tokenizer.encode(f"{step} "), *tokenizer.encode("\n" * 5)]
        at.append(len(ids) - 1)
    columns = [tokenizer.encode("+")[-1], tokenizer.encode("-")[-1]]
    expected = tiny.softmax(tiny.plain(module, ids)[at][:, columns])[:, 0]
    check(scored(path, Item(prompt=QUESTION, response=STEPS), format=form), ids, expected)


def test_aggregates_equal_values_computed_by_hand(tmp_path: Path) -> None:
    tokenizer = tiny.chatml()
    path = tiny.write(tmp_path, tiny.model("steps", tokenizer, labels=("wrong", "right")), tokenizer)
    item = Item(prompt=QUESTION, response=STEPS)
    results = {aggregate: scored(path, item, aggregate=aggregate) for aggregate in ("last", "min", "mean", "prod")}
    a, b, c = results["last"].values
    assert results["last"].aggregate == c
    assert results["min"].aggregate == min(a, b, c)
    assert results["mean"].aggregate == pytest.approx((a + b + c) / 3)
    assert results["prod"].aggregate == pytest.approx(a * b * c)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"tag": "x"}, "with a tag, read must be"),
        ({"read": "tag"}, "with a tag, read must be"),
        ({"tag": "x", "read": "tag"}, "end = false"),
        ({"joined": True}, "joined = true needs"),
        ({"chat": "turns"}, 'chat = "turns" needs'),
        ({"columns": ["+"], "label": "good"}, "give one of them"),
        ({"prompt": "no place"}, "must contain {prompt}"),
        ({"split": ""}, "split is empty"),
        ({"splt": ";"}, "did you mean 'split'"),
        ("math-sheperd", "did you mean 'math-shepherd'"),
        (3, "expected a table"),
    ],
)
def test_invalid_format_is_rejected(form: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_reward({"kind": "process", "path": "x", "format": form}, "test")


def test_format_that_does_not_fit_the_model_is_rejected(tmp_path: Path) -> None:
    tokenizer = tiny.chatml()
    classes = tiny.write(tmp_path / "steps", tiny.model("steps", tokenizer, labels=("wrong", "right")), tokenizer)
    causal = tiny.write(tmp_path / "causal", tiny.model("causal", tokenizer), tokenizer)
    value = tiny.write(tmp_path / "value", tiny.model("value", tokenizer), tokenizer)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"path": classes, "format": "math-shepherd"}, "has a classification head"),
        ({"path": classes, "format": {"label": "rihgt"}}, "did you mean 'right'"),
        ({"path": causal, "kind": "process"}, "set the process format"),
        ({"path": causal}, 'kind = "process" and a format'),
        ({"path": causal, "kind": "outcome"}, "is a causal LM"),
        ({"path": value}, "is always 1"),
        ({"path": value, "format": "skywork-o1-prm"}, "has no BOS token"),
    ]
    for tree, message in cases:
        with pytest.raises((ConfigError, ModelError), match=message):
            load_reward(complete(tree, "test"))


def test_formats_survive_serialisation() -> None:
    for name, form in FORMATS.items():
        table = parse_reward({"kind": "process", "path": "x", "format": name}, "test")
        assert parse_reward(table.model_dump(mode="json"), "again") == table
        assert table.format == form  # type: ignore[union-attr]
