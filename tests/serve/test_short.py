"""Short works, which a worker computes without KV: their scores are those of the engine's queue, and errors stay with
their item. The real worker on a socket pair."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from plaudit.core import Engine
from plaudit.process.framing import FrameReader
from plaudit.serve.workers import frames
from plaudit.serve.workers.worker import SHORT, Worker

BROKEN = 63  # a token whose embedding is not a number


@pytest.fixture(scope="module")
def model() -> LlamaForSequenceClassification:
    return made_model()


def made_model() -> LlamaForSequenceClassification:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_labels=1, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    made = LlamaForSequenceClassification(config).eval()
    with torch.no_grad():
        made.model.embed_tokens.weight[BROKEN] = float("nan")
    return made


def computed(model: LlamaForSequenceClassification, rows: Sequence[list[int]]) -> tuple[Worker, list[frames.Results]]:
    """The results of a worker that receives these rows in one frame."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(theirs, FrameReader(frames.DECODER), Engine(model))
        count = len(rows)
        last = frames.as_bytes([[len(row) - 1] for row in rows])
        worker.take(
            frames.Works(
                list(range(count)), [len(row) for row in rows], frames.as_bytes(rows), [1] * count, last,
                [None] * count, [False] * count, [""] * count,
            )
        )  # fmt: skip
        while worker.busy:
            worker.step()
        reader = FrameReader(frames.DECODER)
        return worker, [frame for frame in reader.feed(ours.recv(1 << 20)) if isinstance(frame, frames.Results)]


def values(results: Sequence[frames.Results]) -> dict[int, np.ndarray]:
    return {
        id: value for each in results for id, value in zip(each.ids, np.frombuffer(each.values, "<f4"), strict=True)
    }


def test_short_and_long_works_have_the_scores_of_a_plain_forward(model: LlamaForSequenceClassification) -> None:
    rows = [[2 + (7 * i + n) % 60 for n in range(length)] for i, length in enumerate((1, 3, SHORT, SHORT + 1, 40))]
    worker, results = computed(model, rows)
    assert [sorted(each.ids) for each in results] == [[0, 1, 2], [3, 4]]
    scores, plain = values(results), made_model()
    with torch.inference_mode():
        for id, row in enumerate(rows):
            assert scores[id] == pytest.approx(plain(input_ids=torch.tensor([row])).logits.item(), abs=1e-6)
    assert worker.engine.stats().tokens_resident == sum(map(len, rows[3:]))  # no KV of the short ones
    assert (results[-1].tokens_computed, results[-1].steps) == (sum(map(len, rows)), 2)


def test_a_short_work_gives_the_bits_of_the_engine_s_queue(model: LlamaForSequenceClassification) -> None:
    rows = [[2 + (11 * i + n * n) % 60 for n in range(8)] for i in range(6)]
    engine = Engine(model)
    numbers = [engine.submit_score(row) for row in rows]
    queued = {}
    while engine.busy:
        queued.update({update.request: update.values for update in engine.step()})
    scores = values(computed(model, rows)[1])
    assert [scores[id] for id in range(6)] == [queued[number].item() for number in numbers]  # type: ignore[union-attr]


def test_one_short_work_that_fails_does_not_fail_the_others(model: LlamaForSequenceClassification) -> None:
    rows = [[2, 3, 4], [5, BROKEN, 6], [7, 8]]
    _, results = computed(model, rows)
    assert values(results).keys() == {0, 2}
    ((id, kind, _),) = [error for each in results for error in each.errors]
    assert (id, kind) == (1, "nonfinite_score")
