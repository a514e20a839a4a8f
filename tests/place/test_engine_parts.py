"""Engines of several ranks on the training ranks match one rank, and no rank has the full policy."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from plaudit.config import to_toml
from plaudit.errors import ConfigError
from plaudit.models import load_tokenizer, resolve, save
from plaudit.place.engines.engine_server import free_port
from tests.core.mixtures import mixture
from tests.train.rl_world import recipe
from tests.train.test_ranks import (
    ENV,
    KINDS,
    PPO,
    STAGES,
    STEPS,
    TWO,
    Shape,
    back_to_step_2,
    close,
    command,
    fork_ranks,
    ranks_of,
    run_alone,
    wait_for_first_step,
    written,
)

SLOW = pytest.mark.slow
# A reward model's scores differ between samples; a rule would give every sample of random weights 0.
GRPO: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": {"coef": 0.05}}, "reward": {"path": "sums"},
    "train": {"prompts_per_step": 5, "lr": 3e-5},
}  # fmt: skip
# Experts that received few tokens have gradients near zero, and Adam's first steps amplify their rounding error.
MIXTURE = {**GRPO, "train": {"prompts_per_step": 5, "lr": 1e-5}}
TENSOR_ENGINE, STAGE_ENGINE = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
# Half of a matrix never has the shape of another matrix.
SIZES = {
    "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 20, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root, tokenizer = tmp_path_factory.mktemp("models"), load_tokenizer(resolve("sums-policy"))
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES)).float().eval()
    qwen3 = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **SIZES)).float().eval()
    made = {"llama": llama, "qwen3": qwen3, "mixture": mixture("qwen3_moe")}

    def path(name: str) -> str:
        if name in made and not (root / name).exists():
            save(made[name], tokenizer, root / name)
        return str(root / name) if name in made else name

    return path


def ranks_that_generate(rollout: dict[str, int]) -> tuple[str, ...]:
    return tuple(word for key, size in rollout.items() for word in ("--set", f"resources.rollout.{key}={size}"))


@SLOW
@pytest.mark.parametrize(("model", "shape"), [("llama", (1, 1, 2)), ("qwen3", TWO)], ids=["llama-1x2", "qwen3-2x1"])
def test_ranks_keep_no_full_matrix_after_a_step_and_at_most_one_during_an_update(
    model: str, shape: Shape, models: Callable[[str], str], tmp_path: Path
) -> None:
    tables = {**GRPO, "model": {"path": models(model)}}
    run_alone(tmp_path / "one", tables)
    resources = {f"{name}_parallel": size for name, size in zip(KINDS, shape, strict=False)}
    tree = recipe(**{
        **tables, "train": {**tables["train"], **STEPS}, "resources": {**resources, "rollout": TENSOR_ENGINE}
    })  # fmt: skip
    (tmp_path / "recipe.toml").write_text(to_toml(tree))
    fork_ranks(2, ["-m", "tests.place.rank_parts", str(tmp_path / "recipe.toml"), str(tmp_path / "two")], tmp_path)
    close(tmp_path / "two", tmp_path / "one")


@SLOW
@pytest.mark.parametrize(
    ("tables", "model", "shape", "rollout", "more"),
    [
        pytest.param(PPO, "sums-policy", TWO, STAGE_ENGINE, (), id="ppo-2x1-stages"),
        pytest.param(GRPO, "qwen3", STAGES, TENSOR_ENGINE, (), id="stages-tensor"),
        pytest.param(GRPO, "llama", (1, 2, 1), STAGE_ENGINE, (), id="context-stages"),
        pytest.param(MIXTURE, "mixture", TWO, STAGE_ENGINE, ("resources.expert_parallel=2",), id="experts-stages"),
        pytest.param(MIXTURE, "mixture", TWO, TENSOR_ENGINE, ("resources.expert_parallel=2",), id="experts-tensor"),
        pytest.param(MIXTURE, "mixture", TWO, TENSOR_ENGINE, ("placement.name=swapped",), id="experts-swapped"),
        pytest.param(
            MIXTURE,
            "mixture",
            (1, 1, 2),
            TENSOR_ENGINE,
            ("resources.expert_parallel=2", "placement.name=hybrid"),
            id="experts-hybrid",
        ),
        pytest.param(PPO, "sums-policy", (1, 1, 2), TENSOR_ENGINE, ("placement.name=hybrid",), id="hybrid"),
        pytest.param(GRPO, "qwen3", (2, 1, 2), TENSOR_ENGINE, (), id="four-two-engines"),
        pytest.param(GRPO, "llama", (4, 1, 1), {**TENSOR_ENGINE, **STAGE_ENGINE}, (), id="four-one-engine"),
        pytest.param(PPO, "qwen3", (2, 1, 1, 2), STAGE_ENGINE, ("placement.name=hybrid",), id="four-hybrid"),
    ],
)
def test_a_run_matches_one_rank_and_its_checkpoint_resumes_elsewhere(
    tables: dict[str, Any], model: str, shape: Shape, rollout: dict[str, int], more: tuple[str, ...],
    models: Callable[[str], str], tmp_path: Path,
) -> None:  # fmt: skip
    """Five prompts a step give two engines unequal shares. One rank, or two with an engine each, resume the run."""
    tables = {**tables, "model": {"path": models(model)}}
    run_alone(tmp_path / "one", tables)
    file, run, world = written(tmp_path / "recipe.toml", tables), tmp_path / "many", math.prod(shape)
    words = [*ranks_that_generate(rollout), *(word for key in more for word in ("--set", key))]
    fork_ranks(world, command(file, run, shape, *words)[3:], tmp_path)
    close(run, tmp_path / "one")
    back_to_step_2(run)
    if world == 2:
        run_alone(run, tables, resume=True)
    else:
        fork_ranks(2, command(file, run, TWO, "--resume")[3:], tmp_path)
    close(run, tmp_path / "one")


@SLOW
def test_a_one_rank_run_resumes_on_ranks_that_share_an_engine(models: Callable[[str], str], tmp_path: Path) -> None:
    tables = {**PPO, "model": {"path": models("qwen3")}}
    run_alone(tmp_path / "one", tables)
    file, run = written(tmp_path / "recipe.toml", tables), tmp_path / "many"
    shutil.copytree(tmp_path / "one", run)
    back_to_step_2(run)
    fork_ranks(2, command(file, run, TWO, "--resume", *ranks_that_generate(TENSOR_ENGINE))[3:], tmp_path)
    close(run, tmp_path / "one")


@pytest.mark.slow
def test_ranks_on_two_machines_form_an_engine(tmp_path: Path) -> None:
    """Each machine has its own torchrun; in the test both run on one machine."""
    run_alone(tmp_path / "one", GRPO)
    file, run, port = written(tmp_path / "recipe.toml", GRPO), tmp_path / "many", str(free_port())
    words = command(file, run, TWO, *ranks_that_generate(TENSOR_ENGINE))[1:]
    torchrun = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    place = ["--master-addr", "127.0.0.1", "--master-port", port]
    machines = [
        subprocess.Popen([sys.executable, "-m", *torchrun, "--node-rank", node, *place, *words]) for node in ("0", "1")
    ]
    try:
        assert [machine.wait(300) for machine in machines] == [0, 0]
    finally:
        for machine in machines:
            machine.kill()
    close(run, tmp_path / "one")


@SLOW
@pytest.mark.parametrize(
    ("victim", "placement", "tables"),
    [
        (0, "colocated", GRPO), (1, "colocated", GRPO), (1, "swapped", GRPO),
        (0, "swapped", {**GRPO, "model": {"lora": {"rank": 4}}}),
    ],
    ids=["main", "other", "swapped", "swapped-lora"],
)  # fmt: skip
def test_a_killed_rank_of_an_engine_ends_the_command_with_its_name(
    victim: int, placement: str, tables: dict[str, Any], tmp_path: Path
) -> None:
    file, run = written(tmp_path / "recipe.toml", tables, steps=100_000), tmp_path / "run"
    sets = ("--set", f"placement.name={placement}")
    words = command(file, run, TWO, *ranks_that_generate(TENSOR_ENGINE), *sets)
    child = subprocess.Popen(words, env=ENV, stderr=subprocess.PIPE, text=True)
    wait_for_first_step(run, child)
    ranks = ranks_of(child.pid)
    ranks[victim].kill()
    _, stderr = child.communicate(timeout=60)
    assert child.returncode not in (0, None)
    assert f"rank {victim} was ended by SIGKILL; --resume continues from the last checkpoint" in stderr
    assert not any(rank.is_running() for rank in ranks.values())


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, r"the training ranks, resources.data_parallel × tensor_parallel = 1 × 1 = 1, are not a whole number of "
         r"engines: 1 / 2 = 0.5"),
        ({"resources": {"data_parallel": 3}}, r"3 × 1 = 3, are not a whole number of engines: 3 / 2 = 1.5"),
        ({"resources": {"data_parallel": 2}, "placement": {"name": "hybrid"}, "processes": 1}, "separate process maps"),
    ],
)  # fmt: skip
def test_rank_counts_that_form_no_whole_engine_are_rejected(tables: dict[str, Any], message: str) -> None:
    rollout = {"tensor_parallel": 2, **({"processes": 1} if tables.pop("processes", 0) else {})}
    tree = {**tables, "resources": {**tables.get("resources", {}), "rollout": rollout}}
    with pytest.raises(ConfigError, match=f"tensor_parallel = 2 × pipeline_parallel = 1 is an engine of 2 .*{message}"):
        recipe(**tree)
