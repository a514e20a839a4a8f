"""Request loops of trainers that cannot be installed, with the HTTP libraries they use; and TRL itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.interop.conftest import Chains
from tests.interop.environments import ROOT, run_client
from tests.reward import tiny
from tests.reward.conversations import TEMPLATES, tokenizer_of
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.interop
POLICY = ROOT / "plaudit" / "embedded" / "sums-policy"


def test_openrlhf(server: ServerProcess, answers: Chains) -> None:
    urls = [f"{server.url}/get_reward"] * 3
    result = run_client(".venv-interop", "openrlhf_loops", {"urls": urls, "texts": answers.rendered})
    assert [sample["reward"] for sample in result["samples"]] == pytest.approx(answers.scores, abs=5e-5)
    assert all(sample["score"] == sample["reward"] and sample["logs"] == {} for sample in result["samples"])
    assert result["shards"] == pytest.approx(answers.scores, abs=5e-5)


def test_slime(server: ServerProcess, answers: Chains) -> None:
    inputs = {"url": f"{server.url}/remote_rm", "pairs": answers.pairs}
    rewards = run_client(".venv-interop", "slime_loop", inputs)
    assert rewards["bare"] == rewards["keyed"] == pytest.approx(answers.scores, abs=5e-5)


def test_verl(server: ServerProcess, answers: Chains) -> None:
    """verl strips the begin token, which the server's tokenizer adds again."""
    texts = [text.removeprefix("<bos>") for text in answers.rendered]
    inputs = {"url": server.url, "model": "sums", "texts": texts}
    scores_by_route = run_client(".venv-interop", "verl_loop", inputs)
    assert 400 <= scores_by_route.pop("refused") < 500
    assert set(scores_by_route) == {"use_activation", "activation", "embeddings"}
    for route, scores in scores_by_route.items():
        assert scores == pytest.approx(answers.scores, abs=5e-5), route


@pytest.mark.parametrize(("trainer", "asynchronous"), [("grpo", False), ("grpo", True), ("rloo", False)])
def test_trl(server: ServerProcess, answers: Chains, trainer: str, asynchronous: bool) -> None:
    assert Path(POLICY).is_dir()
    before = server.metric("plaudit_items_total", model="sums")
    prompts = [prompt for prompt, _ in answers.pairs]
    inputs = {
        "url": server.url, "trainer": trainer, "asynchronous": asynchronous, "policy": str(POLICY), "prompts": prompts,
    }  # fmt: skip
    result = run_client(".venv-interop", "trl_training", inputs)
    assert result["steps"] == len(result["means"]) == len(result["losses"]) == 2
    assert all(math.isfinite(value) for value in [*result["means"], *result["losses"]])
    assert server.metric("plaudit_items_total", model="sums") - before == 2 * 8


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_trl_with_the_reward_model_in_its_process_has_the_same_rewards(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(name)
    reward = tiny.write(tmp_path / "reward", tiny.model("outcome", tokenizer, ("reward",)), tokenizer)
    policy = tiny.write(tmp_path / "policy", tiny.model("causal", tokenizer), tokenizer)
    with ServerProcess({"models": {"reward": {"path": reward}}}) as server:
        inputs = {"url": server.url, "policy": policy, "reward": reward, "prompts": ["hello", "\nhell "]}
        rewards = run_client(".venv-interop", "trl_conversations", inputs)
    assert len(set(rewards["remote"])) > 1
    assert rewards["remote"] == pytest.approx(rewards["in process"], abs=5e-5), rewards["completions"]
