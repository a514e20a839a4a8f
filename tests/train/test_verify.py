"""`plaudit verify` reproduces a run bit for bit, and names any change."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plaudit.config import load_recipe, to_toml
from plaudit.core import Engine
from plaudit.errors import RunError
from plaudit.models import resolve
from plaudit.models.digest import tensors_digest
from plaudit.rl.loop import RlTraining
from plaudit.train.rollouts.scorer import RewardFailed
from plaudit.train.run.proof import weights_digest
from plaudit.train.run.run import Run
from tests.command import plaudit_here
from tests.train.forged import forge, into_shards, log, nudge, tensors
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
    assert "final/ (weights, config, tokenizer and template), evaluation; only compared with" in done.stdout
    assert "only compared with their hashes: steps 1 to 2, step-000002; " in done.stdout
    done = plaudit_here("verify", str(run), "--step", "2")
    assert done.returncode == 2, done.stdout  # step 3 and what it delivers are not recomputed
    assert "equal to the bit: steps 1 to 2, recomputed from the start, sums-policy (SHA-256" in done.stdout
    assert "only compared with their hashes: step-000003, step 3, final/; " in done.stdout


@pytest.mark.slow
def test_all_steps_from_the_start_name_the_source_and_nothing_that_is_only_compared(run: Path) -> None:
    done = plaudit_here("verify", str(run), "--from-start")
    assert done.returncode == 0, done.stdout
    source = tensors_digest(resolve("sums-policy"))
    assert f"steps 1 to 3, recomputed from the start, sums-policy (SHA-256 of its tensors {source}): " in done.stdout
    assert "these weights come from this recipe: " in done.stdout
    assert "only compared" not in done.stdout
    kept = json.loads((run / "verified.json").read_text())
    assert (kept["code"], kept["text"]) == (0, done.stdout.removeprefix("grpo: ").strip())


@pytest.mark.slow
def test_a_final_model_in_shards_is_equal(run: Path) -> None:
    into_shards(run / "final")
    for words in (("verify", str(run)), ("verify", str(run / "final"), "--manifest", str(run / "manifest.json"))):
        done = plaudit_here(*words)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_without_checkpoints_all_steps_are_recomputed(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    done = plaudit_here("verify", str(run))
    assert done.returncode == 0, done.stdout
    assert "these weights come from this recipe" in done.stdout
    assert "not there: checkpoints/" in done.stdout


@pytest.mark.slow
def test_without_a_dump_rewards_are_computed_again(run: Path) -> None:
    shutil.rmtree(run / "rollouts")
    done = plaudit_here("verify", str(run))
    assert done.returncode == 0, done.stdout
    assert "not there: rollouts/" in done.stdout


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


def without_rule(run: Path) -> None:
    """As in a run whose reward was a function of a script."""
    recipe = run / "recipe.toml"
    text = re.sub(r'^rule = "exact"\nanswer = .*$', MISSING_RULE, recipe.read_text(), flags=re.MULTILINE)
    assert MISSING_RULE in text
    recipe.write_text(text)
    forge(run)


def test_rewards_that_cannot_be_computed_again_are_read_from_the_dump_and_named(run: Path) -> None:
    without_rule(run)
    done = plaudit_here("verify", str(run))
    assert done.returncode == 2, done.stdout
    assert "equal to the bit: step 3, recomputed from step-000002: " in done.stdout
    assert re.search(r"only compared with their hashes: .*, rewards and evaluation \(reward: .*no_such_m", done.stdout)


def test_different_samples_are_named_also_without_the_reward(run: Path) -> None:
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("seed = 1\n", "seed = 2\n", 1))
    without_rule(run)
    done = plaudit_here("verify", str(run))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"step 3: \d+ samples are not in the run's dump, and cannot be scored again: ", done.stdout)


HONEST: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("sums-grpo", {"model.lora": "{rank=4}"}),
    "critic": ("sums-grpo", {"algorithm.name": "ppo", "critic": "{}"}),
    "critic on the trunk": ("sums-grpo", {"algorithm.name": "ppo", "critic": "{shared=true}"}),
    "critic and lora": ("sums-grpo", {"algorithm.name": "ppo", "critic": "{}", "model.lora": "{rank=4}"}),
    "dynamic sampling": ("sums-grpo", {"algorithm.name": "dapo"}),
    "no dump": ("sums-grpo", {"train.dump": "false"}),
    "swapped": ("sums-grpo", {"placement.name": "swapped"}),
    "disaggregated": ("sums-grpo", {"placement.name": "disaggregated"}),
    "async without staleness": ("sums-grpo", {"placement.name": "async", "placement.staleness": 0}),
    "agent": ("sums-agent", {}),
    "tool": ("sums-tool", {}),
    "tree": ("sums-tree-grpo", {"train.samples_per_prompt": 8}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_run_is_verified_from_a_checkpoint_and_from_the_start(name: str, tmp_path: Path) -> None:
    source, keys = HONEST[name]
    run = trained(tmp_path / "run", source, **{"train.checkpoint.every": 2, **keys})
    done = plaudit_here("verify", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3, recomputed from step-000002" in done.stdout
    done = plaudit_here("verify", str(run), "--from-start")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "these weights come from this recipe: " in done.stdout


@pytest.mark.slow
def test_a_run_with_a_reward_model_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    text = to_toml(load_recipe(Path("sums-grpo")))
    path.write_text(re.sub(r'^rule = "exact"\nanswer = .*$', 'path = "sums"', text, flags=re.MULTILINE))
    done = plaudit_here("verify", str(trained(tmp_path / "run", str(path))))
    assert done.returncode == 0, done.stdout
    assert "dumps, rewards to 0.0001, as models compute them, final/" in done.stdout


@pytest.mark.slow
def test_a_resumed_and_extended_run_is_verified(tmp_path: Path) -> None:
    """Its log has an evaluation and samples of what was its last step, at which the recipe has none."""
    keys = {"train.schedule": "constant", "train.eval_every": 3}
    run = trained(tmp_path / "run", **{**keys, "train.steps": 2})
    sets = {**SMALL, **keys, "train.steps": 4}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    done = plaudit_here("train", "sums-grpo", "--out", str(run), "--resume", *words)
    assert done.returncode == 0, done.stderr
    for option in ([], ["--from-start"]):
        done = plaudit_here("verify", str(run), *option)
        assert done.returncode == 0, done.stdout


class Crashing(Silent):
    """Ends the process, as far as the run can tell, after a step."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.at = at
        self.error = error

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            raise self.error


@pytest.mark.slow
def test_a_crashed_and_resumed_run_is_verified(tmp_path: Path) -> None:
    """Its log has steps that were repeated."""
    train = {"steps": 4, "eval_every": 1, "checkpoint": {"every": 2}, "dump": True}
    tree = recipe(train=train, model={"path": "sums-policy", "lora": {"rank": 2}})
    with pytest.raises(ZeroDivisionError), Run(tmp_path / "run", tree) as run:
        RlTraining(tree, run, Crashing(3, ZeroDivisionError)).fit()
    with Run(tmp_path / "run", tree, resume=True) as run:
        RlTraining(tree, run, Silent()).fit()
    log = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert sum(event["kind"] == "proof" and event["step"] == 3 and "samples" in event["hashes"] for event in log) == 2
    for option in ([], ["--from-start"]):
        done = plaudit_here("verify", str(tmp_path / "run"), *option)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_checkpoint_of_a_stopped_run_is_recomputed_too(tmp_path: Path) -> None:
    """It is at a step at which the recipe saves none."""
    tree = recipe(train={"steps": 4, "checkpoint": {"every": 2}})
    with Run(tmp_path / "run", tree) as run:
        training = RlTraining(tree, run, Silent())
        training.rollouts = Failing(training.rollouts, 3)
        with pytest.raises(RunError, match="--resume continues"):
            training.fit()
    with Run(tmp_path / "run", tree, resume=True) as run:
        RlTraining(tree, run, Silent()).fit()
    done = plaudit_here("verify", str(tmp_path / "run"), "--from-start")
    assert done.returncode == 0, done.stdout
    assert "checkpoint step-000003, checkpoint step-000004, final/" in done.stdout


class Failing:
    """Rollouts whose reward fails at a step."""

    def __init__(self, rollouts: Any, at: int) -> None:
        self.rollouts = rollouts
        self.at = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollouts, name)

    def next(self, step: int, version: int) -> Any:
        if step == self.at:
            raise RewardFailed("no reward")
        return self.rollouts.next(step, version)


@pytest.mark.slow
def test_from_the_start_needs_one_recipe(run: Path) -> None:
    words = [word for key, value in {**SMALL, "train.steps": 4}.items() for word in ("--set", f"{key}={value}")]
    done = plaudit_here("train", "sums-grpo", "--out", str(run), "--resume", *words, "--set", "train.lr=1e-4")
    assert done.returncode == 0, done.stderr
    done = plaudit_here("verify", str(run))
    assert done.returncode == 0, done.stdout
    done = plaudit_here("verify", str(run), "--from-start")
    assert done.returncode == 1, done.stdout
    assert "cannot be verified: the run was resumed with another train.lr at step 3, so no one recipe" in done.stdout


def test_an_unfinished_run_has_steps_and_no_final_model(run: Path) -> None:
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("steps = 3\n", "steps = 5\n", 1))
    shutil.rmtree(run / "final")
    forge(run)
    done = plaudit_here("verify", str(run))
    assert done.returncode == 1, done.stdout
    assert "has 3 of 5 steps, and with them no final model; --step 3 verifies the steps" in done.stdout


def test_a_run_of_an_earlier_version_is_named(run: Path) -> None:
    def older(event: dict[str, Any]) -> dict[str, Any] | None:
        if event["kind"] == "proof":
            if "metrics" not in event["hashes"]:
                return None
            kept = ("samples", "logprobs", "rewards", "weights", "by")
            event["hashes"] = {"whole": "yes", **{name: event["hashes"][name] for name in kept}}
        return event

    log(run, older)
    (run / "manifest.json").unlink()
    done = plaudit_here("verify", str(run))
    assert done.returncode == 1, done.stdout
    assert "cannot be verified: " in done.stdout
    assert "was written by an earlier version of plaudit" in done.stdout
    assert done.stdout.count("\n") == 1


def test_the_source_model_must_be_the_one_with_which_the_run_began(tmp_path: Path) -> None:
    source = shutil.copytree(resolve("sums-policy"), tmp_path / "source")
    run = trained(tmp_path / "run", **{"model.path": source, "train.steps": 1})
    tensors(source / "model.safetensors", nudge)
    done = plaudit_here("verify", str(run), "--from-start")
    assert done.returncode == 1, done.stdout
    assert f"{source} is not the model with which the run began: " in done.stdout


def test_delivered_files_are_compared_with_the_manifest_alone(run: Path, tmp_path: Path) -> None:
    """As someone does who has the model and the manifest, and not the run."""
    model = shutil.copytree(run / "final", tmp_path / "model")
    manifest = shutil.copy(run / "manifest.json", tmp_path / "given.json")
    words = ("verify", str(model), "--manifest", manifest)
    done = plaudit_here(*words)
    assert done.returncode == 0, done.stdout
    assert "6 files are those of the manifest, whose SHA-256 is" in done.stdout
    assert "; only compared: " in done.stdout
    assert not (model / "verified.json").exists()
    for name, digest in json.loads(Path(manifest).read_text())["files"].items():
        assert hashlib.sha256((model / name).read_bytes()).hexdigest() == digest
    tensors(model / "model.safetensors", nudge)
    done = plaudit_here(*words)
    assert done.returncode == 1, done.stdout
    assert "model.safetensors was changed: its tensors have SHA-256" in done.stdout
    for option in ("--from-start", "--step=2"):
        done = plaudit_here(*words, option)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--manifest recomputes nothing" in done.stderr


def test_the_hash_of_tensors_can_be_computed_without_plaudit(run: Path) -> None:
    lines = [
        f"{name} F32 [{','.join(map(str, each.shape))}] {hashlib.sha256(each.numpy().tobytes()).hexdigest()}\n"
        for name, each in sorted(load_file(run / "final" / "model.safetensors").items())
    ]
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["tensors"] == {"model.safetensors": hashlib.sha256("".join(lines).encode()).hexdigest()}


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


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('name = "colocated"', 'name = "async"', "its placement is async with staleness = 1: which weights"),
        (
            "\ncontext_parallel = 1\ntensor_parallel = 1",
            "\ntensor_parallel = 2",
            "it is over 2 ranks, whose summation order differs",
        ),
    ],
)
def test_what_cannot_be_reproduced_is_compared_and_the_reason_given(run: Path, old: str, new: str, why: str) -> None:
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(old, new, 1))
    forge(run)
    done = plaudit_here("verify", str(run))
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"files intact, training not recomputed: {why}" in done.stdout
    assert done.stdout.count("\n") == 1
    tensors(run / "final" / "model.safetensors", nudge)
    done = plaudit_here("verify", str(run))
    assert done.returncode == 1, done.stdout
    assert "final/model.safetensors was changed" in done.stdout


def test_weights_digest_detects_last_place_changes_and_swapped_rows() -> None:
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    swapped = weights.flip(0)
    nudged = torch.nextafter(weights, torch.tensor(9.0))
    digests = {weights_digest([("a", each)]) for each in (weights, swapped, nudged, weights.view(4))}
    assert len(digests) == 4
    assert weights_digest([("a", weights), ("b", swapped)]) == weights_digest([("b", swapped), ("a", weights)])
    assert weights_digest([("a", weights)]) != weights_digest([("b", weights)])
