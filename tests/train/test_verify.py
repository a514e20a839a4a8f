"""`plaudit verify` reproduces a run bit for bit, and names any change."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from plaudit.core import Engine
from plaudit.rl.loop import RlTraining
from plaudit.train.run.checkpoint import sha256
from plaudit.train.run.proof import weights_digest
from plaudit.train.run.run import Run
from tests.command import plaudit_here
from tests.train.rl_world import Silent, recipe

SMALL = {
    "train.steps": 3, "train.prompts_per_step": 4, "train.samples_per_prompt": 4, "train.eval_every": 2,
    "train.checkpoint.every": 1, "train.dump": "true", "data.eval_items": 8, "sampling.max_tokens": 32,
}  # fmt: skip

MISSING_RULE = 'rule = "function"\nfunction = "no_such_module:right"'


def trained(directory: Path, name: str = "sums-grpo", **keys: Any) -> Path:
    sets = [word for key, value in {**SMALL, **keys}.items() for word in ("--set", f"{key}={value}")]
    done = plaudit_here("train", name, "--out", str(directory), *sets)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("verify") / "grpo")


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "grpo")
    return tmp_path / "grpo"


@pytest.mark.slow
def test_verify_recomputes_from_the_previous_checkpoint_or_from_the_start(run: Path) -> None:
    done = plaudit_here("verify", str(run))
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(
        "grpo: equal to the bit: step 3, recomputed from step-000002: samples, log-probs, rewards, weights, "
    )
    done = plaudit_here("verify", str(run), "--step", "2")
    assert done.returncode == 0, done.stdout
    assert "equal to the bit: steps 1 to 2, recomputed from the start: " in done.stdout


@pytest.mark.slow
def test_without_a_dump_rewards_are_computed_again(run: Path) -> None:
    shutil.rmtree(run / "rollouts")
    done = plaudit_here("verify", str(run))
    assert done.returncode == 0, done.stdout


def test_evaluation_leaves_no_kv_for_training(tmp_path: Path) -> None:
    """Its cached KV would save the next step some prompts, and change the last bits of log-probs."""
    tree = recipe(train={"steps": 2, "eval_every": 1}, data={"eval_items": 30})
    with Run(tmp_path, tree) as run:
        training = RlTraining(tree, run, Silent())
        training.rollouts.heldout(training.heldout, 1, "heldout")
        assert isinstance(training.engine, Engine)
        assert training.engine.stats().tokens_resident > 0
        training.evaluate()
        assert training.engine.stats().tokens_resident == 0
        training.close()


def change_reward(run: Path) -> None:
    _change_first(run / "rollouts" / "step-000003.jsonl", lambda sample: {**sample, "reward": 1 - sample["reward"]})


def change_token(run: Path) -> None:
    def other(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "token_ids": [sample["token_ids"][0] ^ 1, *sample["token_ids"][1:]]}

    _change_first(run / "rollouts" / "step-000003.jsonl", other)


def change_logprob(run: Path) -> None:
    def other(sample: dict[str, Any]) -> dict[str, Any]:
        first = torch.tensor(sample["logprobs"][0], dtype=torch.float32)
        return {**sample, "logprobs": [torch.nextafter(first, torch.tensor(1.0)).item(), *sample["logprobs"][1:]]}

    _change_first(run / "rollouts" / "step-000003.jsonl", other)


def change_final_weight(run: Path) -> None:
    _nudge(run / "final" / "model.safetensors")


def change_checkpoint(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step-000002"
    _nudge(checkpoint / "model" / "model.safetensors")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["model/model.safetensors"] = sha256(checkpoint / "model" / "model.safetensors")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def change_metric(run: Path) -> None:
    def other(event: dict[str, Any]) -> dict[str, Any]:
        if event["kind"] == "metric" and event["step"] == 3 and "policy/loss" in event["values"]:
            event["values"]["policy/loss"] += 1e-9
        return event

    _change_lines(run / "events.jsonl", other)


def change_seed(run: Path) -> None:
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("seed = 1\n", "seed = 2\n", 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_reward, "rollouts/step-000003.jsonl: the rewards are not those that the run learned from"),
        (change_token, "rollouts/step-000003.jsonl: the samples are not those that the run learned from"),
        (change_logprob, "rollouts/step-000003.jsonl: the log-probs are not those that the run learned from"),
        (change_final_weight, "final/model.safetensors: the weights are not those after step 3"),
        (change_checkpoint, "step-000002/model/model.safetensors: the weights are not those after step 2"),
        (change_metric, "step 3: policy/loss was "),
        (change_seed, "step 3: the samples differ; "),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_changed_data_is_named(run: Path, change: Callable[[Path], None], message: str) -> None:
    change(run)
    done = plaudit_here("verify", str(run))
    assert done.returncode == 1, done.stdout
    assert message in done.stdout
    assert done.stdout.count("\n") == 1


def test_different_samples_are_named_also_without_the_reward(run: Path) -> None:
    """As in a run whose reward was a function of a script."""
    change_seed(run)
    recipe = run / "recipe.toml"
    text = re.sub(r'^rule = "exact"\nanswer = .*$', MISSING_RULE, recipe.read_text(), flags=re.MULTILINE)
    assert MISSING_RULE in text
    recipe.write_text(text)
    done = plaudit_here("verify", str(run))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"step 3: \d+ samples are not in the run's dump, and cannot be scored again: ", done.stdout)


@pytest.mark.slow
def test_ppo_with_a_critic_and_lora(tmp_path: Path) -> None:
    for name, keys in (("ppo", {"algorithm.name": "ppo", "critic": "{}"}), ("lora", {"model.lora": "{rank=4}"})):
        done = plaudit_here("verify", str(trained(tmp_path / name, **keys)))
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "9"], "has steps 1 to 3; there is no step 9 to verify"),
        (["--step", "0"], "has steps 1 to 3; there is no step 0 to verify"),
    ],
)
def test_missing_steps_are_rejected(run: Path, words: list[str], message: str) -> None:
    done = plaudit_here("verify", str(run), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_run_that_cannot_be_reproduced_is_rejected_with_the_reason(run: Path) -> None:
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('name = "colocated"', 'name = "async"'))
    done = plaudit_here("verify", str(run))
    assert done.returncode != 0
    assert "cannot be reproduced to the bit: its placement is async" in done.stderr


def test_weights_digest_detects_last_place_changes_and_swapped_rows() -> None:
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    swapped = weights.flip(0)
    nudged = torch.nextafter(weights, torch.tensor(9.0))
    digests = {weights_digest([("a", each)]) for each in (weights, swapped, nudged, weights.view(4))}
    assert len(digests) == 4
    assert weights_digest([("a", weights), ("b", swapped)]) == weights_digest([("b", swapped), ("a", weights)])
    assert weights_digest([("a", weights)]) != weights_digest([("b", weights)])


def _change_first(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = path.read_text().splitlines()
    lines[0] = json.dumps(change(json.loads(lines[0])))
    path.write_text("\n".join(lines) + "\n")


def _change_lines(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = [json.dumps(change(json.loads(line))) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")


def _nudge(file: Path) -> None:
    """Changes one weight by one unit in the last place."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    flat = tensors[min(tensors)].view(-1)
    flat[0] = torch.nextafter(flat[0], flat[0] + 1)
    save_file(tensors, file, metadata)
