"""The loops of trainers that cannot be installed, with the HTTP libraries they use; and TRL itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.interop.conftest import Chains
from tests.interop.environments import ROOT, run_client
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.interop
POLICY = ROOT / "plaudit" / "embedded" / "sums-policy"


def test_openrlhf(server: ServerProcess, answers: Chains) -> None:
    urls = [f"{server.url}/get_reward"] * 3
    found = run_client(".venv-interop", "openrlhf_loops", {"urls": urls, "texts": answers.rendered})
    assert [sample["reward"] for sample in found["samples"]] == pytest.approx(answers.scores, abs=5e-5)
    assert all(sample["score"] == sample["reward"] and sample["logs"] == {} for sample in found["samples"])
    assert found["shards"] == pytest.approx(answers.scores, abs=5e-5)


def test_slime(server: ServerProcess, answers: Chains) -> None:
    given = {"url": f"{server.url}/remote_rm", "pairs": answers.pairs}
    found = run_client(".venv-interop", "slime_loop", given)
    assert found["bare"] == found["keyed"] == pytest.approx(answers.scores, abs=5e-5)


def test_verl(server: ServerProcess, answers: Chains) -> None:
    """It strips the begin token, which the server's tokenizer adds again."""
    texts = [text.removeprefix("<bos>") for text in answers.rendered]
    given = {"url": server.url, "model": "sums", "texts": texts}
    found = run_client(".venv-interop", "verl_loop", given)
    assert 400 <= found.pop("refused") < 500
    assert set(found) == {"use_activation", "activation", "embeddings"}
    for way, scores in found.items():
        assert scores == pytest.approx(answers.scores, abs=5e-5), way


@pytest.mark.parametrize(("trainer", "asynchronous"), [("grpo", False), ("grpo", True), ("rloo", False)])
def test_trl(server: ServerProcess, answers: Chains, trainer: str, asynchronous: bool) -> None:
    assert Path(POLICY).is_dir()
    before = server.metric("plaudit_items_total", model="sums")
    prompts = [prompt for prompt, _ in answers.pairs]
    given = {
        "url": server.url, "trainer": trainer, "asynchronous": asynchronous, "policy": str(POLICY), "prompts": prompts,
    }  # fmt: skip
    found = run_client(".venv-interop", "trl_training", given)
    assert found["steps"] == len(found["means"]) == len(found["losses"]) == 2
    assert all(math.isfinite(value) for value in [*found["means"], *found["losses"]])
    assert server.metric("plaudit_items_total", model="sums") - before == 2 * 8
