"""Encoders with a class head: scores equal plain transformers, alone and in padded batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from plaudit.errors import ModelError
from plaudit.models import load_any
from plaudit.models.text_classifier import TextClassifier, looks_ahead
from tests.core import tiny
from tests.models.encoders import DOUBLED, FAMILIES, TYPED, encoder, plain

PAIRS: list[tuple[str, str | None]] = [
    ("who?", "he"), ("what is that?", "a longer text, of which nobody knows the end"), ("one text", None), ("x", "y"),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers_alone_and_batched(tmp_path: Path, family: str) -> None:
    directory = encoder(tmp_path, family, labels=3)
    expected = plain(directory, PAIRS).numpy()
    assert np.abs(expected[0] - expected[3]).max() > 1e-3  # different texts get different scores
    loaded = load_any(directory)
    assert looks_ahead(loaded.module)
    model = TextClassifier(loaded)
    assert model.typed == (family in TYPED)
    assert model.limit == 64
    rows = [loaded.tokenizer(*pair) for pair in PAIRS]
    ids = [row["input_ids"] for row in rows]
    types = [bytes(row["token_type_ids"]) if model.typed else b"" for row in rows]
    assert np.abs(model.logits(ids, types) - expected).max() < 1e-5
    for i in range(len(PAIRS)):
        assert np.abs(model.logits([ids[i]], [types[i]])[0] - expected[i]).max() < 1e-5
    longest = model.logits([[5] * model.limit], [b""])
    assert np.isfinite(longest).all()
    if family in DOUBLED:  # transformers itself has no position for one more token
        with pytest.raises((IndexError, RuntimeError)):
            model.logits([[5] * (model.limit + 1)], [b""])


def test_decoders_are_detected_as_causal() -> None:
    assert not any(looks_ahead(tiny.model(family, kind="sequence")) for family in ("llama", "gemma2", "gpt_neox"))


def test_model_that_ignores_the_attention_mask_is_rejected(tmp_path: Path) -> None:
    loaded = load_any(encoder(tmp_path, "bert"))
    plain_forward = loaded.module.forward

    def without_mask(input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor) -> object:
        return plain_forward(input_ids=input_ids, token_type_ids=token_type_ids)

    loaded.module.forward = without_mask  # type: ignore[assignment]
    with pytest.raises(ModelError, match="gives other scores beside longer texts than alone"):
        TextClassifier(loaded)
