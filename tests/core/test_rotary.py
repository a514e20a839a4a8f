"""Rotary embeddings that look at a sequence's length: as transformers while their angles stay, and no longer."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig

from plaudit.core import Engine, SamplingParams
from plaudit.core.model.packing import pack_tree
from plaudit.errors import RequestError
from plaudit.models.rotary import steady_positions
from plaudit.train.optim.sharding import packed_rows
from tests.core import tiny

BORDER = 40
CONFIGS: dict[str, PreTrainedConfig] = {
    "longrope": Phi3Config(
        **tiny.GROUPED, original_max_position_embeddings=BORDER,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": BORDER,
            "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0, 8.0, 16.0, 32.0],
        },
    ),
    "dynamic": LlamaConfig(
        **{**tiny.GROUPED, "max_position_embeddings": BORDER},
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    ),
}  # fmt: skip


def made(kind: str) -> Any:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]), attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_sequences_up_to_the_border_are_those_of_transformers(kind: str) -> None:
    module, own = made(kind), made(kind)
    engine = Engine(module)
    assert engine.decoder.max_positions == BORDER
    ids = tiny.sequences(1, 6, 5, BORDER)
    for cache in (False, True, True):
        for got, each in zip(engine.logprobs(ids, cache=cache), ids, strict=True):
            np.testing.assert_allclose(got, tiny.plain_logprobs(own, each), atol=1e-4)
    prompts = [each[: BORDER - 12] for each in ids]
    samples = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    assert [list(s.token_ids) for s in samples] == [tiny.plain_greedy(own, p, 12) for p in prompts]
    tree = pack_tree(sorted(ids), lone=False)
    rows = packed_rows(module, tree.packed)
    for each, at in zip(sorted(ids), tree.rows, strict=True):
        expected = own.model(input_ids=torch.tensor([each]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(rows[torch.from_numpy(at)], expected, atol=1e-5, rtol=1e-5)


def test_longer_sequences_are_refused_with_the_reason() -> None:
    engine = Engine(made("longrope"))
    with pytest.raises(
        RequestError,
        match=rf"41 tokens are more than the {BORDER} positions of Phi3ForCausalLM \(longrope turns all positions of a "
        rf"sequence of more than {BORDER} by other angles\): shorten the text",
    ):
        engine.logprobs([[5] * (BORDER + 1)])
    sample = engine.generate([[5] * (BORDER - 3)], SamplingParams(max_tokens=50, ignore_eos=True, seed=1))[0]
    assert (len(sample.token_ids), sample.finish_reason) == (3, "length")


def test_the_border_of_one_kind_of_layer_is_that_of_the_model() -> None:
    tables = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 64},
        "sliding_attention": {"rope_type": "default"},
    }
    config = LlamaConfig(**tiny.GROUPED)
    assert steady_positions(config) is None
    config.rope_parameters = tables
    assert steady_positions(config) == 64
