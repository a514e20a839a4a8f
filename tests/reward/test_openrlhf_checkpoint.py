"""Reward models saved by OpenRLHF: architecture RewardModel, a head with any name, normalisation in the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaModel, LlamaPreTrainedModel

from plaudit.config.reward import OutcomeTable
from plaudit.errors import ModelError
from plaudit.models import load_any
from plaudit.records import Item, Score
from plaudit.reward import complete, load_reward

from . import tiny

TOKENS = [(5, 6, 7, 8), (9, 10), (11,) * 40]


def checkpoint(directory: Path, head: str, **config: Any) -> tuple[str, Any]:
    """A directory and the module with its own forward: the head at the last token, normalised if the config says so."""

    class RewardModel(LlamaPreTrainedModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = LlamaModel(config)
            setattr(self, head, nn.Linear(config.hidden_size, 1, bias=False))
            self.post_init()

        @torch.inference_mode()
        def forward(self, ids: tuple[int, ...]) -> float:
            hidden = self.model(torch.tensor([ids])).last_hidden_state
            reward = float(getattr(self, head)(hidden)[0, -1, 0])
            normal = getattr(self.config, "normalize_reward", False)
            return (reward - self.config.mean) / self.config.std if normal else reward

    tokenizer = tiny.chatml()
    torch.manual_seed(3)
    module = RewardModel(tiny.shape(tokenizer, **config)).eval()
    return tiny.write(directory, module, tokenizer), module


@pytest.mark.parametrize("head", ["score", "value_head"])
@pytest.mark.parametrize("normalised", [False, True])
def test_scores_equal_those_of_the_modules_own_forward(tmp_path: Path, head: str, normalised: bool) -> None:
    path, module = checkpoint(tmp_path, head, normalize_reward=normalised, mean=0.7, std=2.5, value_head_prefix=head)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["RewardModel"]
    table = complete({"path": path}, "test")
    assert isinstance(table, OutcomeTable)
    scores = load_reward(table).score([Item(tokens=ids) for ids in TOKENS])
    for score, ids in zip(scores, TOKENS, strict=True):
        assert isinstance(score, Score)
        assert score.value == pytest.approx(module(ids), abs=1e-5)


def test_checkpoint_without_a_scalar_head_is_rejected(tmp_path: Path) -> None:
    path, module = checkpoint(tmp_path, "score")
    module.score = nn.Linear(32, 2, bias=False)
    module.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"one head NAME.weight of shape \(1, hidden\); got none"):
        load_any(path)
