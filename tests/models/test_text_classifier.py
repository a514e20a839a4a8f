"""Encoders with a class head: the scores of plain transformers, alone and padded together."""

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
def test_rows_are_those_of_transformers_alone_and_together(tmp_path: Path, family: str) -> None:
    directory = encoder(tmp_path, family, labels=3)
    expected = plain(directory, PAIRS).numpy()
    assert np.abs(expected[0] - expected[3]).max() > 1e-3  # it tells texts apart
    loaded = load_any(directory)
    assert looks_ahead(loaded.module)
    model = TextClassifier(loaded)
    assert model.typed == (family in TYPED)
    assert model.limit == 64
    rows = [loaded.tokenizer(*pair) for pair in PAIRS]
    ids = [row["input_ids"] for row in rows]
    types = [bytes(row["token_type_ids"]) if model.typed else b"" for row in rows]
    assert np.abs(model.logits(ids, types) - expected).max() < 1e-5
    for place in range(len(PAIRS)):
        assert np.abs(model.logits([ids[place]], [types[place]])[0] - expected[place]).max() < 1e-5
    longest = model.logits([[5] * model.limit], [b""])
    assert np.isfinite(longest).all()
    if family in DOUBLED:  # one more token and transformers itself has no position for it
        with pytest.raises((IndexError, RuntimeError)):
            model.logits([[5] * (model.limit + 1)], [b""])


def test_decoders_do_not_look_ahead() -> None:
    assert not any(looks_ahead(tiny.model(family, kind="sequence")) for family in ("llama", "gemma2", "gpt_neox"))


def test_one_whose_padding_counts_is_refused(tmp_path: Path) -> None:
    loaded = load_any(encoder(tmp_path, "bert"))
    plain_forward = loaded.module.forward

    def without_mask(input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor) -> object:
        return plain_forward(input_ids=input_ids, token_type_ids=token_type_ids)

    loaded.module.forward = without_mask  # type: ignore[assignment]
    with pytest.raises(ModelError, match="gives other scores beside longer texts than alone"):
        TextClassifier(loaded)
