"""SFT, reward models and preferences over ranks train as on one rank: real processes, gloo, tiny models."""

import json
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from plaudit.config import parse_recipe, to_toml
from plaudit.config.placement import RanksTable
from plaudit.config.supervised import ModelTable
from plaudit.errors import ConfigError
from plaudit.events import read_events
from plaudit.models import load_tokenizer, resolve, save
from plaudit.train.policy.rl_models import check_layout
from tests.command import plaudit_here
from tests.core.mixtures import mixture
from tests.train.test_ranks import ENV, LIMIT, STAGES, TWO, Shape, command, fork_ranks, ranks_of

SLOW = pytest.mark.slow
CONTEXT, TENSOR = (1, 2, 1), (1, 1, 2)
# There are many micro-batches of different sizes; one problem exceeds the token budget of a micro-batch.
TRAIN = {
    "steps": 10, "schedule": "constant", "batch": 7, "lr": 1e-3, "warmup": 2, "micro_batch_tokens": 150, "threads": 1,
    "eval_every": 50, "checkpoint": {"every": 5},
}  # fmt: skip
WORLD = {"world": "sums", "eval_items": 3}
NEW = {"new": {"hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "layers": 2}}
POLICY = {"path": "sums-policy"}
ANSWERED = {**WORLD, "problems": 16, "samples": 4}
# With an already trained policy a high learning rate would amplify rounding errors.
LOW_RATE = {**TRAIN, "lr": 3e-5}
TASKS: dict[str, dict[str, Any]] = {
    "sft": {"task": "sft", "model": NEW, "data": WORLD, "train": TRAIN},
    "lora": {"task": "sft", "model": {**POLICY, "lora": {"rank": 4}}, "data": WORLD, "train": TRAIN},
    "reward": {"task": "reward", "model": POLICY, "data": WORLD, "train": LOW_RATE},
    "steps": {"task": "prm", "model": POLICY, "data": WORLD, "train": LOW_RATE},
    "judge": {"task": "prm", "model": NEW, "data": WORLD, "train": TRAIN},
    "dpo": {"task": "preference", "model": POLICY, "data": ANSWERED, "train": LOW_RATE},
    "kto": {"task": "preference", "model": POLICY, "data": ANSWERED, "train": LOW_RATE, "algorithm": {"name": "kto"}},
    "orpo": {"task": "preference", "model": POLICY, "data": ANSWERED, "train": LOW_RATE, "algorithm": {"name": "orpo"}},
}  # fmt: skip
CLASSES: dict[str, Any] = {
    "sft": AutoModelForCausalLM, "preference": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification,
    "prm": AutoModelForTokenClassification,
}  # fmt: skip


@pytest.fixture(scope="module")
def generated_tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Tasks with generated files: ratings, some of them missing, and a mixture of experts."""
    root = tmp_path_factory.mktemp("data")
    rows = [
        {
            "prompt": f"{i}+7=",
            "response": f"#{i + 7 - i % 3}",
            "right": 1.0 - i % 3 / 2,
            "low": i / 10 if i % 4 else None,
        }
        for i in range(1, 40)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save(mixture("qwen3_moe"), load_tokenizer(resolve("sums-policy")), root / "mixture")
    rated = {"name": "regression", "attributes": ["right", "low"]}
    return {
        "ratings": {
            "task": "reward", "model": POLICY, "data": {"path": str(root / "rows.jsonl")}, "train": LOW_RATE,
            "algorithm": rated,
        },
        "mixture": {"task": "sft", "model": {"path": str(root / "mixture")}, "data": WORLD, "train": LOW_RATE},
        "mixture-judge": {"task": "reward", "model": {"path": str(root / "mixture")}, "data": WORLD, "train": LOW_RATE},
    }  # fmt: skip


@pytest.fixture(scope="module")
def of_one(
    generated_tasks: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Returns the run of one rank, which is trained once; its recipe is in the same directory."""
    root = tmp_path_factory.mktemp("one")

    def run(name: str) -> Path:
        if not (root / name).exists():
            tree = parse_recipe({**TASKS, **generated_tasks}[name], name)
            (root / f"{name}.toml").write_text(to_toml(tree))
            train_on_one_rank(root / name, root / f"{name}.toml", resume=False)
        return root / name

    return run


def train_on_one_rank(run: Path, file: Path, resume: bool = True) -> None:
    """Trains or resumes the run on one rank."""
    done = plaudit_here("train", str(file), "--out", str(run), *(["--resume"] if resume else []))
    assert done.returncode == 0, done.stderr


def metrics(run: Path, key: str) -> list[dict[str, float]]:
    return [e["values"] for e in read_events(run) if e["kind"] == "metric" and key in e["values"]]


def weights(run: Path) -> dict[str, torch.Tensor]:
    files = sorted((run / "final").glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check(actual: Path, expected: Path) -> None:
    """Ten steps have equal losses and metrics, the weights are equal, and transformers loads the model."""
    steps = metrics(expected, "loss")
    assert len(metrics(actual, "loss")) == len(steps) == 10
    for values, reference in zip(metrics(actual, "loss"), steps, strict=True):
        assert values["loss"] == pytest.approx(reference["loss"], abs=1e-5)
        assert values["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)
        assert values == pytest.approx(reference, rel=2e-3, abs=1e-4)
    held_out = metrics(expected, "heldout/heldout_loss")
    assert len(metrics(actual, "heldout/heldout_loss")) == len(held_out) >= 1
    for values, reference in zip(metrics(actual, "heldout/heldout_loss"), held_out, strict=True):
        assert values == pytest.approx(reference, rel=2e-3, abs=1e-4, nan_ok=True)
    own_weights, expected_weights = weights(actual), weights(expected)
    assert own_weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        assert torch.allclose(own_weights[name], tensor, atol=2e-5), name
    task = json.loads((expected / "summary.json").read_text())["task"]
    model, expected_model = (CLASSES[task].from_pretrained(run / "final") for run in (actual, expected))
    assert model.config.id2label == expected_model.config.id2label
    for name in ("config.json", "tokenizer.json", "reward.toml"):
        assert (actual / "final" / name).exists() == (expected / "final" / name).exists()
        if (expected / "final" / name).exists():
            assert (actual / "final" / name).read_text() == (expected / "final" / name).read_text()


@SLOW
@pytest.mark.parametrize(
    ("name", "shape", "expert"),
    [("reward", TWO, 1), ("lora", TWO, 1), ("dpo", STAGES, 1), ("mixture", TWO, 2)],
    ids=str,
)
def test_host_optimizer_takes_the_same_steps_over_ranks(
    name: str, shape: Shape, expert: int, of_one: Callable[[str], Path], tmp_path: Path
) -> None:
    """One rank with the optimizer on its device resumes from the saved state."""
    expected = of_one(name)
    file, run = expected.with_suffix(".toml"), tmp_path / "run"
    words = ("--set", f"resources.expert_parallel={expert}", "--set", "train.offload_optimizer=true")
    fork_ranks(math.prod(shape), command(file, run, shape, *words)[3:], tmp_path)
    check(run, expected)
    back_to_step_5(run)
    train_on_one_rank(run, file)
    check(run, expected)


def back_to_step_5(run: Path) -> None:
    """Removes the last checkpoint, as if the run had ended at step 5."""
    shutil.rmtree(run / "checkpoints" / "step-000010")


@SLOW
@pytest.mark.parametrize(
    ("name", "shape", "expert"),
    [
        ("sft", TWO, 1), ("sft", TENSOR, 1), ("sft", CONTEXT, 1), ("sft", STAGES, 1), ("sft", (2, 1, 2), 1),
        ("reward", TWO, 1), ("reward", TENSOR, 1), ("reward", CONTEXT, 1), ("reward", STAGES, 1), ("ratings", TWO, 1),
        ("ratings", STAGES, 1), ("steps", TWO, 1), ("steps", CONTEXT, 1), ("judge", TENSOR, 1), ("judge", STAGES, 1),
        ("dpo", TWO, 1), ("dpo", TENSOR, 1), ("dpo", CONTEXT, 1), ("dpo", STAGES, 1), ("kto", TWO, 1),
        ("kto", STAGES, 1), ("orpo", (2, 2, 1), 1), ("lora", TWO, 1), ("lora", CONTEXT, 1), ("lora", STAGES, 1),
        ("lora", TENSOR, 1), ("mixture", TWO, 2), ("mixture-judge", (4, 1, 1), 2),
    ],
    ids=str,
)  # fmt: skip
def test_ten_steps_over_ranks_equal_those_of_one_rank_which_can_resume_them(
    name: str, shape: Shape, expert: int, of_one: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = of_one(name)
    file, run = expected.with_suffix(".toml"), tmp_path / "run"
    expert_option = ("--set", f"resources.expert_parallel={expert}")
    fork_ranks(math.prod(shape), command(file, run, shape, *expert_option)[3:], tmp_path)
    check(run, expected)
    back_to_step_5(run)
    train_on_one_rank(run, file)
    check(run, expected)


@SLOW
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("sft", TWO, (3, 1, 1)), ("reward", TENSOR, TWO), ("steps", STAGES, CONTEXT), ("dpo", CONTEXT, STAGES),
        ("lora", STAGES, TWO),
    ],
    ids=str,
)  # fmt: skip
def test_run_resumes_over_ranks_of_another_number_and_shape(
    name: str, before: Shape, after: Shape, of_one: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = of_one(name)
    file, run = expected.with_suffix(".toml"), tmp_path / "run"
    fork_ranks(math.prod(before), command(file, run, before)[3:], tmp_path)
    back_to_step_5(run)
    fork_ranks(math.prod(after), command(file, run, after, "--resume")[3:], tmp_path)
    check(run, expected)


def wait_for_steps(run: Path, child: "subprocess.Popen[str]", count: int) -> None:
    """Waits until the run has logged `count` steps."""
    deadline = time.monotonic() + LIMIT
    while not (run / "events.jsonl").exists() or len(metrics(run, "loss")) < count:
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@SLOW
@pytest.mark.parametrize(
    ("name", "shape", "sent", "after"),
    [
        ("sft", TWO, signal.SIGKILL, STAGES), ("reward", STAGES, signal.SIGKILL, TWO),
        ("dpo", TENSOR, signal.SIGSTOP, CONTEXT),
    ],
    ids=str,
)  # fmt: skip
def test_lost_rank_ends_the_command_which_resumes_over_other_ranks(
    name: str, shape: Shape, sent: signal.Signals, after: Shape, of_one: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = of_one(name)
    file, run = expected.with_suffix(".toml"), tmp_path / "run"
    # More steps than can run in the meantime; the learning rate does not depend on their number.
    words = command(file, run, shape, "--set", "train.checkpoint.every=2", "--set", "train.steps=100000")
    child = subprocess.Popen(words, env=ENV, stderr=subprocess.PIPE, text=True)
    wait_for_steps(run, child, 4)
    ranks = ranks_of(child.pid)
    ranks[1].send_signal(sent)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode not in (0, None)
    assert ("rank 1 was ended by SIGKILL" if sent == signal.SIGKILL else "rank 1 was stopped (SIGSTOP)") in stderr
    assert not any(rank.is_running() for rank in ranks.values())
    step = int((run / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert step >= 2
    fork_ranks(2, command(file, run, after, "--resume", "--set", f"train.steps={step + 2}")[3:], tmp_path)
    curve = metrics(run, "loss")
    assert len(curve) == step + 2
    straight = tmp_path / "straight"
    done = plaudit_here("train", str(file), "--out", str(straight), "--set", f"train.steps={step + 2}")
    assert done.returncode == 0, done.stderr
    for values, reference in zip(curve, metrics(straight, "loss"), strict=True):
        assert values["loss"] == pytest.approx(reference["loss"], abs=1e-5)


def rejection(table: dict[str, Any], **resources: int) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_recipe({**table, "resources": {f"{name}_parallel": size for name, size in resources.items()}}, "recipe")
    return str(raised.value)


def test_invalid_layouts_are_rejected_before_anything_loads() -> None:
    sft = TASKS["sft"]
    muon = {**sft, "train": {**TRAIN, "optimizer": "muon"}}
    assert 'set optimizer = "adamw"' in rejection(muon, data=2)
    assert "3 / 2 = 1.5 is not a whole number" in rejection(sft, data=3, expert=2)
    with pytest.raises(ConfigError, match="2 layers over pipeline_parallel = 3 stages"):
        check_layout(RanksTable(pipeline_parallel=3), ModelTable(path="sums"))
    with pytest.raises(ConfigError, match="it has no experts for expert_parallel = 2"):
        check_layout(RanksTable(data_parallel=2, expert_parallel=2), ModelTable(path="sums-steps"))


def test_rl_keys_are_rejected_where_nothing_is_generated() -> None:
    with pytest.raises(ConfigError, match="rollout"):
        parse_recipe({**TASKS["sft"], "resources": {"rollout": {"processes": 1}}}, "recipe")
