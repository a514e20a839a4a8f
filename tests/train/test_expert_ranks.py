"""Experts of a mixture sharded over ranks: gradients, runs and checkpoints equal those of one rank."""

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plaudit.errors import ConfigError
from plaudit.models import load_tokenizer, resolve, save
from plaudit.train.policy.rl_models import check_ranks
from tests.core.mixtures import mixture
from tests.train.rl_world import recipe
from tests.train.test_ranks import (
    ENV,
    GRPO,
    LIMIT,
    PPO,
    Shape,
    back_to_step_2,
    close,
    command,
    fork_ranks,
    run_alone,
    steps,
    written,
)

SLOW = pytest.mark.slow
# A reward model's scores differ between responses, while a rule rejects every response of random weights. At a learning
# rate of 3e-5 the entropy of the third step is 3.20492 on one rank and 3.20450 over two on x86-64, for any sharding:
# probably a tie between experts.
LEARNS: dict[str, Any] = {**GRPO, "reward": {"path": "sums"}, "train": {"prompts_per_step": 5, "lr": 1e-5}}
DATA, CONTEXT, FOUR, PAIRS, STAGES = (2, 1, 1), (1, 2, 1), (4, 1, 1), (2, 2, 1), (2, 1, 1, 2)
TENSOR = (1, 1, 2)


@SLOW
@pytest.mark.parametrize(
    ("data", "context", "expert", "tensor"),
    [(2, 1, 2, 1), (4, 1, 2, 1), (1, 2, 2, 1), (2, 2, 2, 1), (2, 2, 4, 1), (1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 4, 2)],
    ids=str,
)
def test_expert_parallel_ranks_match_transformers_and_one_rank(
    data: int, context: int, expert: int, tensor: int, tmp_path: Path
) -> None:
    words = ["-m", "tests.train.rank_experts", *map(str, (data, context, expert, tensor))]
    fork_ranks(data * context * tensor, words, tmp_path)


@SLOW
def test_pipeline_stages_with_expert_parallel_ranks_match_transformers(tmp_path: Path) -> None:
    fork_ranks(4, ["-m", "tests.train.rank_pipeline", "2", "2"], tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("mixture") / "m"
    save(mixture("qwen3_moe"), load_tokenizer(resolve("sums-policy")), directory)
    return str(directory)


def expert_option(expert: int) -> tuple[str, str]:
    return "--set", f"resources.expert_parallel={expert}"


@SLOW
@pytest.mark.parametrize(
    ("tables", "shape", "expert"),
    [
        pytest.param(LEARNS, DATA, 2, id="grpo-2"),
        pytest.param(PPO, FOUR, 2, id="ppo-4-by-2"),
        pytest.param(LEARNS, PAIRS, 4, id="grpo-context"),
        pytest.param({**LEARNS, "model": {"lora": {"rank": 4}}}, DATA, 2, id="lora-2"),
        pytest.param(PPO, STAGES, 2, id="ppo-stages"),
        pytest.param(LEARNS, (1, 2, 1, 2), 2, id="grpo-context-stages"),
        pytest.param(LEARNS, TENSOR, 2, id="grpo-tensor"),
        pytest.param(PPO, (2, 1, 2), 2, id="ppo-data-tensor-by-2"),
        pytest.param({**LEARNS, "model": {"lora": {"rank": 4}}}, (1, 2, 2), 4, id="lora-context-tensor"),
        pytest.param(PPO, (1, 1, 2, 2), 2, id="ppo-tensor-stages"),
    ],
)
def test_expert_parallel_run_equals_that_of_one_rank_which_can_resume_it(
    tables: dict[str, Any], shape: Shape, expert: int, model: str, tmp_path: Path
) -> None:
    tables = {**tables, "model": {**tables.get("model", {}), "path": model}}
    run_alone(tmp_path / "one", tables)
    assert min(values["policy/grad_norm"] for values in steps(tmp_path / "one")) > 0
    file = written(tmp_path / "recipe.toml", tables)
    fork_ranks(math.prod(shape), command(file, tmp_path / "many", shape, *expert_option(expert))[3:], tmp_path)
    close(tmp_path / "many", tmp_path / "one")
    back_to_step_2(tmp_path / "many")
    run_alone(tmp_path / "many", tables, resume=True)
    close(tmp_path / "many", tmp_path / "one")


@SLOW
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((DATA, 2), (FOUR, 2)),
        ((FOUR, 4), (CONTEXT, 1)),
        ((STAGES, 2), (DATA, 2)),
        ((DATA, 1), (STAGES, 2)),
        ((TENSOR, 2), (FOUR, 4)),
    ],
    ids=str,
)
def test_run_resumes_with_another_expert_layout(
    before: tuple[Shape, int], after: tuple[Shape, int], model: str, tmp_path: Path
) -> None:
    tables = {**LEARNS, "model": {"path": model}}
    run_alone(tmp_path / "one", tables)
    file, run = written(tmp_path / "recipe.toml", tables), tmp_path / "many"
    fork_ranks(math.prod(before[0]), command(file, run, before[0], *expert_option(before[1]))[3:], tmp_path)
    back_to_step_2(run)
    fork_ranks(math.prod(after[0]), command(file, run, after[0], *expert_option(after[1]), "--resume")[3:], tmp_path)
    close(run, tmp_path / "one")


@SLOW
@pytest.mark.parametrize(
    ("channel", "shape"),
    [
        ("shared", DATA), ("disk", DATA), ("collective", DATA), ("reshard", DATA), ("reshard", STAGES),
        ("reshard", TENSOR),
    ],
)  # fmt: skip
def test_disaggregated_engines_receive_the_experts_of_all_ranks(
    channel: str, shape: Shape, model: str, tmp_path: Path
) -> None:
    tables = {**LEARNS, "model": {"path": model}}
    run_alone(tmp_path / "one", tables)
    disaggregated = {**tables, "placement": {"name": "disaggregated", "channel": channel}}
    file = written(tmp_path / "recipe.toml", disaggregated)
    words = command(file, tmp_path / "many", shape, *expert_option(2))
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "many" / "checkpoints")
    close(tmp_path / "many", tmp_path / "one")


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"data_parallel": 3, "expert_parallel": 2}, r"data_parallel × context_parallel = 3 × 1 ranks form groups "
         r"of expert_parallel = 2, and 3 / 2 = 1.5 is not a whole number"),
        ({"data_parallel": 3, "expert_parallel": 4, "tensor_parallel": 2}, r"data_parallel × context_parallel × "
         r"tensor_parallel = 3 × 1 × 2 ranks .* 6 / 4 = 1.5 is not a whole number"),
        ({"data_parallel": 2, "expert_parallel": 2, "tensor_parallel": 4}, r"all tensor_parallel = 4 ranks .* the "
         r"same expert_parallel = 2 group, and 2 / 4 = 0.5 is not a whole number"),
    ],
)  # fmt: skip
def test_invalid_expert_parallel_sizes_are_rejected_with_the_recipe(resources: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(resources=resources)


def test_models_that_expert_parallel_cannot_shard_are_rejected_before_loading(model: str) -> None:
    three_ranks = {"data_parallel": 3, "expert_parallel": 3}
    message = r"/m: 8 experts are not divisible by expert_parallel = 3: 8 / 3 = 2.66667; set a divisor of 8"
    with pytest.raises(ConfigError, match=message):
        check_ranks(recipe(model={"path": model}, resources=three_ranks))
    with pytest.raises(ConfigError, match="sums-policy: it has no experts for expert_parallel = 3 ranks"):
        check_ranks(recipe(resources=three_ranks))
    expert_adapters = {"path": model, "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}}
    two_ranks = {"data_parallel": 2, "expert_parallel": 2}
    with pytest.raises(ConfigError, match=r"lora.targets names layers of experts, which resources.expert_parallel = 2"):
        check_ranks(recipe(model=expert_adapters, resources=two_ranks))
    check_ranks(recipe(model={"path": model, "lora": {"rank": 4}}, resources=two_ranks))
