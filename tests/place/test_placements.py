"""Every placement gives the same trajectory; impossible placements are rejected with the calculation."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.config import to_toml
from plaudit.errors import ConfigError
from plaudit.events import read_events
from plaudit.models import load_policy
from plaudit.place.channels.weights import Weights
from plaudit.rl.loop import RlTraining
from tests.place.rollout_host import RolloutHost
from tests.place.runs import DAPO, GRPO, PPO, assert_equal, samples, small, train
from tests.train.rl_world import Silent, recipe, weights

ONE = {"rollout": {"processes": 1}}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "hybrid": {"placement": {"name": "hybrid"}},
    "hybrid in two processes": {"placement": {"name": "hybrid"}, "resources": ONE},
    "disaggregated, shared": {"placement": {"name": "disaggregated"}},
    "disaggregated, disk": {"placement": {"name": "disaggregated", "channel": "disk"}},
    "disaggregated, collective": {"placement": {"name": "disaggregated", "channel": "collective"}},
    "async, staleness 0": {"placement": {"name": "async", "staleness": 0}},
}  # fmt: skip
Run = tuple[Path, Silent]


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory, rollout_host: RolloutHost) -> Run:
    directory = tmp_path_factory.mktemp("colocated") / "run"
    return directory, train(directory, small(3, GRPO), rollout_host)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_all_placements_give_the_same_samples_losses_and_weights(
    tmp_path: Path, colocated: Run, rollout_host: RolloutHost, name: str
) -> None:
    actual = train(tmp_path / "run", small(3, GRPO, **PLACEMENTS[name]), rollout_host)
    assert_equal((tmp_path / "run", actual), colocated)
    assert not actual.warnings
    if name.startswith("hybrid"):
        spans = [e["name"] for e in read_events(tmp_path / "run") if e["kind"] == "span"]
        assert spans.count("mode_switch") == 6, "into training and out of it, each step"
    else:
        assert all(seen["publish/seconds"] > 0 for seen in actual.seen)
    if name == "hybrid in two processes":
        assert all(seen["publish/extra_bytes"] == 0 for seen in actual.seen), "one set of weights for both processes"


LORA: dict[str, Any] = {**GRPO, "model": {"lora": {"rank": 2}}, "train": {"lr": 2e-2}}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, rollout_host: RolloutHost) -> Run:
    pytest.importorskip("peft")
    directory = tmp_path_factory.mktemp("adapted") / "run"
    return directory, train(directory, small(3, LORA), rollout_host)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "disaggregated, shared",
        "disaggregated, disk",
        "disaggregated, collective",
        "disaggregated, reshard",
        "async, staleness 0",
    ],
)
def test_a_lora_run_publishes_its_adapter_alone(
    tmp_path: Path, adapted: Run, rollout_host: RolloutHost, name: str
) -> None:
    """Same samples, losses and weights; base weights are sent to each worker once, also to a replacement."""
    base = load_policy("sums-policy").module
    full_bytes = Weights.of(base).nbytes
    assert any(not torch.equal(weights(adapted[0])[name], tensor) for name, tensor in base.named_parameters())
    sizes: list[int] = []

    def look(training: RlTraining, step: int) -> None:
        sizes.append(int(training.viewer.seen[-1]["publish/bytes"]))  # type: ignore[attr-defined]
        assert sizes[-1] == Weights.trained(training.loaded.module).nbytes
        if step == 2:
            os.kill(rollout_host.workers[-1].pid, signal.SIGKILL)

    reshard = {"placement": {"name": "disaggregated", "channel": "reshard"}}
    tables = reshard if name == "disaggregated, reshard" else PLACEMENTS[name]
    actual = train(tmp_path / "run", small(3, LORA, **tables), rollout_host, look)
    assert_equal((tmp_path / "run", actual), adapted)
    assert {len(sizes), len(set(sizes))} == {3, 1}
    assert sizes[0] * 4 < full_bytes
    assert [warning for warning in actual.warnings if "restarted" in warning]


@pytest.mark.slow
@pytest.mark.parametrize("tables", [GRPO, PPO, DAPO], ids=["grpo", "ppo", "dapo"])
def test_ten_steps_in_every_placement(tmp_path: Path, rollout_host: RolloutHost, tables: dict[str, Any]) -> None:
    expected = train(tmp_path / "colocated", small(10, tables), rollout_host)
    for name, placed in PLACEMENTS.items():
        actual = train(tmp_path / name, small(10, tables, **placed), rollout_host)
        assert_equal((tmp_path / name, actual), (tmp_path / "colocated", expected))


@pytest.mark.slow
def test_two_workers_split_the_prompts_and_keep_their_order(
    tmp_path: Path, colocated: Run, rollout_host: RolloutHost
) -> None:
    tree = small(2, GRPO, placement={"name": "disaggregated"}, resources={"rollout": {"processes": 2}})
    train(tmp_path / "run", tree, rollout_host)
    first, expected = samples(tmp_path / "run")[0], samples(colocated[0])[0]
    assert [(s.group, s.index, s.prompt_ids) for s in first] == [(s.group, s.index, s.prompt_ids) for s in expected]
    assert [s.token_ids for s in first] == [s.token_ids for s in expected], "what is sampled depends on the place alone"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"placement": {"name": "async"}, "resources": {"rollout": {"processes": 0}}}, "set 1 or more"),
        ({"resources": {"rollout": {"processes": 2}}}, "processes = 2: remove it"),
        ({"placement": {"name": "hybrid", "channel": "disk"}}, "are shared"),
        (
            {"placement": {"name": "disaggregated"}, "resources": {"rollout": {"devices": ("cuda:0", "cuda:1")}}},
            r"lists 2 for 1 process",
        ),
    ],
)  # fmt: skip
def test_invalid_placements_are_rejected(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**tables)


def test_correction_is_on_for_stale_samples_unless_the_recipe_disables_it() -> None:
    stale = {"placement": {"name": "async"}}
    assert recipe(**stale).algorithm.correction.mode == "truncate"
    assert recipe(**stale, algorithm={"correction": {"mode": "none"}}).algorithm.correction.mode == "none"
    assert recipe(placement={"name": "async", "staleness": 0}).algorithm.correction.mode == "none"
    assert recipe().algorithm.correction.mode == "none"
    capped = recipe(
        **stale, algorithm={"correction": {"cap": 3.0}}
    ).algorithm.correction  # setting cap does not set the mode
    assert (capped.mode, capped.cap) == ("truncate", 3.0)
    with pytest.raises(ConfigError, match=r"cap = 3.0 has no effect with mode = \"none\""):
        recipe(algorithm={"correction": {"cap": 3.0}})


def test_missing_resources_are_rejected_with_the_arithmetic(tmp_path: Path, rollout_host: RolloutHost) -> None:
    placed = {"placement": {"name": "disaggregated"}}
    with pytest.raises(ConfigError, match=r"resources\.rollout\.cores = \[4711\], and this process has the CPUs"):
        train(tmp_path / "a", small(1, GRPO, **placed, resources={"rollout": {"cores": (4711,)}}), rollout_host)
    tree = small(1, GRPO, **placed, engine={"kv_bytes": 4 * 10**12}, resources={"rollout": {"processes": 2}})
    with pytest.raises(ConfigError, match=r"processes = 2 × \(\d+ bytes of weights \+ 4000000000000 of engine\.kv_"):
        train(tmp_path / "b", tree, rollout_host)
    with pytest.raises(
        ConfigError, match=r"processes = 9999 × .* of Python and torch\) = \d+ bytes, and \d+ are available"
    ):
        train(tmp_path / "c", small(1, GRPO, **placed, resources={"rollout": {"processes": 9999}}), rollout_host)
    elsewhere = {"rollout": {"devices": ("cuda:99",)}}
    with pytest.raises(ConfigError, match=r"devices has 'cuda:99', and this machine has \d+ GPU\(s\): use one of cpu"):
        train(tmp_path / "d", small(1, GRPO, **placed, resources=elsewhere), rollout_host)


@pytest.mark.slow
def test_disaggregated_rollouts_over_two_training_ranks_match_one(tmp_path: Path, rollout_host: RolloutHost) -> None:
    train(tmp_path / "one", small(2, GRPO), rollout_host)
    placed = {"placement": {"name": "disaggregated"}, "resources": {"data_parallel": 2}}
    (tmp_path / "recipe.toml").write_text(to_toml(small(2, GRPO, **placed)))
    command = [sys.executable, "-m", "plaudit", "train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "two")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert samples(tmp_path / "two")[0] == samples(tmp_path / "one")[0]
    (step, _) = [e["values"] for e in read_events(tmp_path / "two") if "publish/gather_seconds" in e.get("values", {})]
    assert step["publish/gather_bytes"] == step["publish/bytes"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["hybrid in two processes", "disaggregated, shared", "disaggregated, disk"])
def test_rollouts_in_another_process_on_the_same_gpu_match(
    tmp_path: Path, rollout_host: RolloutHost, name: str
) -> None:
    device = {"model": {"device": "cuda:0"}, "engine": {"kv_bytes": 1 << 28}}
    placed = dict(PLACEMENTS[name])
    if name.startswith("disaggregated"):
        placed["resources"] = {"rollout": {"processes": 1, "devices": ("cuda:0",)}}
    expected = train(tmp_path / "colocated", small(3, GRPO, **device), rollout_host)
    actual = train(tmp_path / "run", small(3, GRPO, **device, **placed), rollout_host)
    for here, there in zip(actual.seen, expected.seen, strict=True):
        assert here["mismatch/abs_max"] < 1e-3, "the engine has the learner's weights"
        assert here["reward/mean"] == pytest.approx(there["reward/mean"], abs=0.1)
    assert not actual.warnings


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one CUDA device")
def test_more_gpus_than_available_are_rejected(tmp_path: Path, rollout_host: RolloutHost) -> None:
    tree = small(1, GRPO, model={"device": "cuda"}, placement={"name": "disaggregated"})
    with pytest.raises(ConfigError, match=r"1 GPU\(s\) to train and 1 to generate = 2, and there are 1"):
        train(tmp_path / "run", tree, rollout_host)
