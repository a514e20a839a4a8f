"""Every invalid input is rejected with its value and the limit before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    MambaConfig,
    RecurrentGemmaConfig,
)

from plaudit.core import Engine, SamplingParams
from plaudit.core.proof.support import inspect
from plaudit.errors import ModelError, RequestError
from plaudit.models import new_llama
from tests.core import tiny

ENGINE = Engine(tiny.model("llama"), kv_bytes=16 * 4 * 256 * 2)
REWARD = Engine(tiny.model("llama", "sequence"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0, and must be at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1, and must be from 0 to 100"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0, and must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 2.0}, "min_p is 2.0, and must be from 0 to 1"),
        ({"max_tokens": 0}, "max_tokens is 0, and must be at least 1"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens 5 is above max_tokens 4"),
        ({"temperature": 0, "top_p": 0.9}, r"temperature 0 takes the most likely token, so top_p=0.9 has no effect"),
        ({"deadline": 0.0}, "deadline is 0.0, and must be above 0 seconds"),
        ({"seed": -1}, "seed is -1"),
        ({"logit_bias": {3: float("-inf")}}, r"logit_bias\[3\] is -inf, and must be finite"),
        ({"stop": ("x", "")}, "stop has an empty string"),
    ],
)
def test_invalid_sampling_params_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ENGINE.generate([[]]), "the prompt is empty"),
        (lambda: ENGINE.generate([[3, 89]]), r"token id 89 at 1 is outside the vocabulary 0..88 of LlamaForCausalLM"),
        (lambda: ENGINE.generate([[-1]]), "token id -1 at 0"),
        (lambda: ENGINE.generate([[3] * 257]), "257 tokens are more than the 256 positions"),
        (lambda: ENGINE.generate([[3] * 256]), "the prompt has 256 tokens and LlamaForCausalLM 256 positions"),
        (lambda: ENGINE.generate(["text"]), "the engine has no tokenizer"),
        (lambda: ENGINE.generate([[3]], SamplingParams(stop=("x",))), "stop strings need a tokenizer"),
        (lambda: ENGINE.generate([[3]], SamplingParams(stop_token_ids=(89,))), "stop_token_ids has token id 89"),
        (lambda: ENGINE.generate([[3]], SamplingParams(logit_bias={-2: 1.0})), "logit_bias has token id -2"),
        (
            lambda: ENGINE.generate([[3]], SamplingParams(top_logprobs=90)),
            "top_logprobs 90 is more than the vocabulary of 89",
        ),
        (lambda: ENGINE.generate([[3], [4]], [SamplingParams()]), "2 prompts and 1 SamplingParams"),
        (
            lambda: ENGINE.generate([[3] * 40], SamplingParams(max_tokens=100)),
            "need KV for 139 tokens and the pool holds",
        ),
        (lambda: ENGINE.score([[3]]), "no class head: set columns"),
        (lambda: ENGINE.score([[3]], columns=[89]), "column 89 is outside the vocabulary"),
        (
            lambda: ENGINE.score([[3, 4]], positions=[[2]], columns=[1]),
            r"positions \[2\] must be ascending and within 0..1",
        ),
        (lambda: ENGINE.score([[3, 4]], positions=[[1, 0]], columns=[1]), "must be ascending"),
        (lambda: ENGINE.score([[3, 4]], columns=[-1], logprobs=True), "position 1 is the last: no token follows"),
        (lambda: ENGINE.score([[3, 4]], positions=[[0]], columns=[-1]), "column -1 is outside the vocabulary"),
        (lambda: ENGINE.score([[3]], positions=[], columns=[1]), "1 sequences and 0 lists of positions"),
        (lambda: ENGINE.new_version(keep="both"), "keep is 'both'"),  # type: ignore[arg-type]
        (lambda: REWARD.generate([[3]]), "has no vocabulary head: it can score but not generate"),
        (lambda: REWARD.logprobs([[3, 4]]), "has no vocabulary head"),
        (lambda: REWARD.score([[3]], columns=[1]), "leave out columns"),
        (lambda: Engine(tiny.model("llama"), kv_bytes=10), "kv_bytes gives 10 bytes, but one block of 16 tokens needs"),
        (lambda: Engine(tiny.model("llama"), kv_bytes=-0.5), "kv_bytes is -0.5"),
        (
            lambda: Engine(tiny.model("llama"), budget=8, max_running=9),
            "max_running 9 must be from 1 to the budget of 8",
        ),
    ],
)
def test_invalid_requests_are_rejected_without_side_effects(act: Callable[[], object], message: str) -> None:
    before = ENGINE.stats()
    with pytest.raises(RequestError, match=message):
        act()
    assert ENGINE.stats() == before
    assert not ENGINE.busy


def test_one_invalid_prompt_rejects_the_whole_call() -> None:
    with pytest.raises(RequestError, match="token id 200"):
        ENGINE.generate([[3], [200]], SamplingParams(max_tokens=5))
    assert not ENGINE.busy


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2),
            r"\(mamba\) has recurrent layers that the core does not support: MambaMixer",
        ),
        (
            RecurrentGemmaConfig(
                vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, lru_width=16
            ),
            r"\(recurrent_gemma\) has recurrent layers .* RecurrentGemmaDecoderLayer",
        ),
    ],
)
def test_unsupported_recurrent_models_are_rejected_by_name(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        inspect(AutoModelForCausalLM.from_config(config))


def test_encoders_are_rejected_by_name() -> None:
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(ModelError, match=r"\(bert\) attends in both directions"):
        inspect(BertForSequenceClassification(config))


def test_model_that_mixes_tokens_outside_attention_is_rejected() -> None:
    module = tiny.model("llama")
    norm = module.model.norm
    plain = norm.forward  # type: ignore[union-attr]
    norm.forward = lambda x: plain(x + x.mean(dim=1, keepdim=True))  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="mixes tokens outside attention"):
        inspect(module)


def test_head_with_an_unknown_transformation_of_logits_is_rejected() -> None:
    module = tiny.model("llama")
    forward = module.forward

    def forward_with_relu(**options: Any) -> Any:
        out = forward(**options)
        out.logits = torch.relu(out.logits)
        return out

    module.forward = forward_with_relu
    with pytest.raises(ModelError, match="changes its logits in a way"):
        inspect(module)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_non_finite_weights_are_rejected_by_name(name: str) -> None:
    module = new_llama(
        "policy", vocab_size=24, hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64, max_positions=64,
        seed=3, tie_embeddings=False,
    )  # fmt: skip
    with torch.no_grad():
        module.get_parameter(name)[0, :3] = float("nan")
    with pytest.raises(ModelError, match=rf"weights are damaged: 3 of \d+ in {name} are not finite: copy the model"):
        inspect(module)
