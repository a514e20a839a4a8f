"""One server that all client tests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.serve.process import ServerProcess
from tests.serve.test_native import chains

END = 2


@dataclass(frozen=True)
class Chains:
    """Right and wrong answers in the forms in which clients send them, and their scores by the native protocol.

    rendered  texts with their control tokens written out
    open      texts without begin and end tokens, as NeMo-Aligner reads sentences; `open_scores` are their scores
    """

    pairs: list[tuple[str, str]]
    rows: list[list[int]]
    rendered: list[str]
    open: list[str]
    scores: list[float]
    open_scores: list[float]


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(None, "--grpc-port", "0") as server:
        yield server


@pytest.fixture(scope="session")
def answers(server: ServerProcess) -> Chains:
    from plaudit.models import load_tokenizer

    tokenizer = load_tokenizer("sums")
    pairs = chains(40)
    rows = [[*tokenizer.encode(p + r), END] for p, r in pairs]
    opened = [tokenizer.encode(p + r, add_special_tokens=False) for p, r in pairs]
    scored = server.rewards([{"tokens": ids} for ids in [*rows, *opened]]).json()["items"]
    scores = [item["scores"][0] for item in scored]
    texts = [p + r for p, r in pairs]
    return Chains(pairs, rows, [f"<bos>{t}<eos>" for t in texts], texts, scores[:40], scores[40:])
