"""Engines of several ranks in a run: the samples and losses of one rank; each rank receives its own shard of new
weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from plaudit.config import RlRecipe
from plaudit.core.model.split import keep_part
from plaudit.core.model.stages import RankPosition
from plaudit.errors import ConfigError, WeightsRefused
from plaudit.models import load_policy, load_tokenizer, resolve, save
from plaudit.models.part import fill, outline
from plaudit.place.channels.delta import changes
from plaudit.place.channels.target import DeltaTarget, PartTarget
from plaudit.place.channels.weights import Weights, named_tensors
from plaudit.place.workers.rank import check_engine_ranks
from plaudit.rl.loop import RlTraining
from tests.core.mixtures import CONFIGS, SIZES, mixture
from tests.place.rollout_host import RolloutHost
from tests.place.runs import numbers, samples, train
from tests.train.rl_world import recipe

TINY = {
    "train": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "eval_every": 50, "dump": True},
    "data": {"world": "sums", "eval_items": 1},
    "sampling": {"max_tokens": 8},
    "algorithm": {"name": "grpo", "entropy": 0.1},  # a gradient even if all rewards are equal
}  # fmt: skip
DISAGGREGATED = {"name": "disaggregated"}
MIXTURES = ("mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3")


def tiny_run(**tables: Any) -> RlRecipe:
    return recipe(**{**TINY, **tables})


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with norms per head, which every rank has in full, and an untied output head."""
    tokenizer = load_policy("sums-policy").tokenizer
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("qwen3") / "model"
    save(Qwen3ForCausalLM(config).float().eval(), tokenizer, directory)
    return str(directory)


@pytest.fixture(scope="module")
def models(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The path of a model by its name; a mixture of experts is created on demand."""
    root = tmp_path_factory.mktemp("mixtures")

    def path(name: str) -> str:
        if name not in MIXTURES:
            return qwen3 if name == "qwen3" else name
        if not (root / name).exists():
            save(mixture(name), load_tokenizer(resolve("sums-policy")), root / name)
        return str(root / name)

    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_loads_its_part_of_published_weights(qwen3: str, tied: bool) -> None:
    check_loading("sums-policy" if tied else qwen3)


def check_loading(path: str) -> None:
    """The loaded part equals, bit for bit, what is read from files of the weights, for full updates and for deltas."""
    full_model, policy = outline(path), load_policy(path).module
    published = Weights.of(policy)
    before = {name: torch.where(torch.rand(t.shape) < 0.1, t + 1e-3, t) for name, t in published.tensors.items()}
    for rank in range(4):
        part = deepcopy(full_model.module)
        cuts = keep_part(part, RankPosition(rank, 2, 2))
        fill(part, full_model.read, cuts, "cpu")
        expected = {name: tensor.clone() for name, tensor in named_tensors(part).items()}
        target = PartTarget(part, full_model.module, cuts)
        for sent in (Weights(before), changes(published, before, since=0)):
            if sent.layout.packed:
                assert not all(torch.equal(tensor, expected[name]) for name, tensor in named_tensors(part).items())
                assert sent.nbytes < 0.7 * published.nbytes
            layout = replace(sent.layout, aliases=published.layout.aliases)
            target.check(layout)
            DeltaTarget(target, layout).load(sent)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in named_tensors(part).items())
    other = Weights({name: tensor[:1] for name, tensor in named_tensors(policy).items()})
    with pytest.raises(WeightsRefused, match=r"in the engine and .* in the weights"):
        target.check(other.layout)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"placement": {"name": "swapped"}}, "are not a whole number of engines: 1 / 2 = 0.5"),
        ({"placement": DISAGGREGATED, "engine": {"name": "vllm", "python": "python"}}, "its own options"),
    ],
)
def test_configurations_without_multi_rank_engines_are_rejected(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel = 2 × pipeline_parallel = 1 is an engine of 2 .*{message}"):
        tiny_run(**tables, resources={"rollout": {"tensor_parallel": 2}})


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            {"tensor_parallel": 8},
            r"2 key-value heads are not divisible by tensor_parallel = 8 \(4 / 8 = 0.5, 2 / 8 = 0.25",
        ),
        ({"tensor_parallel": 3}, r"4 attention heads .* tensor_parallel = 3 \(4 / 3 = 1.33333, 2 / 3 = 0.66"),
        ({"pipeline_parallel": 3}, r"2 layers over pipeline_parallel = 3 stages: 2 / 3 = 0.666667"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_rejected_with_the_arithmetic(
    ranks: dict[str, int], message: str
) -> None:
    tree = tiny_run(placement=DISAGGREGATED, resources={"rollout": ranks})
    with pytest.raises(ConfigError, match=f"resources.rollout: .*{message}"):
        check_engine_ranks(tree)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_rank_of_a_mixture_loads_its_experts_from_published_weights(
    family: str, models: Callable[[str], str]
) -> None:
    check_loading(models(family))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_that_do_not_divide_are_rejected_with_the_arithmetic(family: str, tmp_path: Path) -> None:
    other: Any = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    count = {"num_local_experts": 4} if family == "gpt_oss" else {"num_experts": 4, "moe_intermediate_size": 24}
    config = type(CONFIGS[family])(**{**SIZES, **other, **count}, head_dim=8)
    save(AutoModelForCausalLM.from_config(config), load_tokenizer(resolve("sums-policy")), tmp_path / "model")
    tables: dict[str, Any] = {"model": {"path": str(tmp_path / "model")}, "placement": DISAGGREGATED}
    says = r"resources\.rollout: 4 experts are not divisible by tensor_parallel = 3: 4 / 3 = 1\.33333"
    with pytest.raises(ConfigError, match=says):
        check_engine_ranks(tiny_run(**tables, resources={"rollout": {"tensor_parallel": 3}}))
    two = {"resources": {"rollout": {"tensor_parallel": 2}}}
    check_engine_ranks(tiny_run(**tables, **two))
    adapter = {"rank": 4, "targets": ["q_proj", "gate_up_proj"]}
    tables["model"]["lora"] = adapter
    with pytest.raises(
        ConfigError, match=r"lora.targets names layers of experts, which resources.rollout.tensor_paral"
    ):
        check_engine_ranks(tiny_run(**tables, **two))


def tokens(directory: Path) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in step] for step in samples(directory)]


def engine_ranks() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if each.name() == "plaudit-rank"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "rollout", "model"),
    [
        ({"name": "disaggregated", "channel": "disk", "delta": True}, {"tensor_parallel": 2}, "sums-policy"),
        ({"name": "disaggregated"}, {"pipeline_parallel": 2}, "qwen3"),
        ({"name": "async", "staleness": 0, "channel": "collective"}, {"tensor_parallel": 2}, "qwen3"),
        ({"name": "disaggregated"}, {"pipeline_parallel": 2}, "mixtral"),
        ({"name": "disaggregated", "channel": "disk", "delta": True}, {"pipeline_parallel": 2}, "gpt_oss"),
        ({"name": "disaggregated", "channel": "reshard"}, {"pipeline_parallel": 2}, "deepseek_v3"),
        ({"name": "disaggregated", "channel": "collective"}, {"pipeline_parallel": 2}, "qwen3_moe"),
        ({"name": "disaggregated"}, {"tensor_parallel": 2}, "qwen3_moe"),
        ({"name": "async", "staleness": 0, "channel": "collective"}, {"tensor_parallel": 2}, "mixtral"),
        ({"name": "disaggregated", "channel": "disk", "delta": True}, {"tensor_parallel": 2}, "gpt_oss"),
        ({"name": "disaggregated", "channel": "reshard"}, {"tensor_parallel": 2}, "deepseek_v3"),
    ],
    ids=[
        "disk",
        "shared, stages",
        "async, collective",
        "mixtral, stages",
        "gpt-oss, stages",
        "deepseek-v3, stages",
        "qwen3-moe, stages",
        "qwen3-moe",
        "mixtral",
        "gpt-oss",
        "deepseek-v3",
    ],
)
def test_an_engine_of_two_ranks_matches_the_samples_and_losses_of_one(
    tmp_path: Path, models: Callable[[str], str], placement: dict[str, Any], rollout: dict[str, int], model: str
) -> None:
    """Including a weight update and, with async, a rank that is killed after the first step."""
    tables = {"model": {"path": models(model)}}
    expected = train(tmp_path / "one", tiny_run(**tables), RolloutHost())
    tree = tiny_run(**tables, placement=placement, resources={"rollout": rollout})
    kills = placement["name"] == "async"

    def look(_: RlTraining, step: int) -> None:
        if kills and step == 1:
            (rank,) = engine_ranks()
            os.kill(rank.pid, signal.SIGKILL)

    actual = train(tmp_path / "two", tree, RolloutHost(), look)
    assert tokens(tmp_path / "two") == tokens(tmp_path / "one")
    changed = dict(load_policy(tmp_path / "one" / "final").module.named_parameters())
    policy = load_policy(tables["model"]["path"]).module
    assert all(not torch.equal(changed[name], p) for name, p in policy.named_parameters() if p.ndim > 1)
    for mine, theirs in zip(numbers(actual), numbers(expected), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    if placement.get("delta"):
        assert all(0.5 < seen["publish/share"] <= 1 for seen in actual.seen), "of float32 nearly all changes in a step"
    assert len(actual.warnings) == kills
    assert all("it is restarted" in warning for warning in actual.warnings)
    psutil.wait_procs(engine_ranks(), timeout=60)
    assert not engine_ranks(), "they end with the run"
