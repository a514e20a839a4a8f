"""`plaudit plan --settings`: the plan in the configuration formats of other projects."""

import subprocess
from pathlib import Path

import pytest
import yaml

from plaudit.plan.options import PlanOptions
from plaudit.plan.question import ask
from plaudit.plan.settings.choice import PROJECTS, settings_for
from tests.command import plaudit_here

WORDS = ("--model", "llama-3.1-8b", "--hardware", "2x8xH100", "--placement", "hybrid")


def plaudit(*words: str) -> subprocess.CompletedProcess[str]:
    return plaudit_here("plan", *words)


def options_of(text: str) -> dict[str, str]:
    """The options of a shell command with one option per line."""
    lines = [line.strip(" \\") for line in text.splitlines() if line and not line.startswith("#")][1:]
    join = " " if lines[0].startswith("--") else "="
    return {line.split(join, 1)[0]: line.split(join, 1)[1] if join in line else "" for line in lines}


@pytest.mark.parametrize("name", PROJECTS)
def test_settings_express_the_chosen_plan(name: str) -> None:
    question = ask(PlanOptions(model="llama-3.1-8b", hardware="2x8xH100", placement=["hybrid"], batch=512, samples=4))
    text, chosen = settings_for(PROJECTS[name], question)
    plan = chosen.plan
    assert f"# Planned: {plan}" in text
    assert PROJECTS[name].checked in text
    assert plan.placement == "hybrid"
    engine, cut = str(plan.generation.tp), plan.training
    share = chosen.phase("generation").memory.value / plan.cluster.accelerator.memory
    if name == "nemo-rl":
        tree = yaml.safe_load(text)
        assert tree["cluster"] == {"num_nodes": 2, "gpus_per_node": 8}
        assert tree["policy"]["generation"]["vllm_cfg"]["tensor_parallel_size"] == plan.generation.tp
        assert tree["policy"]["megatron_cfg"]["enabled"] is (cut.zero < 3)
        assert tree["grpo"] == {"num_prompts_per_step": 128, "num_generations_per_prompt": 4}
        assert 0 < tree["policy"]["generation"]["vllm_cfg"]["gpu_memory_utilization"] <= share + 0.01
        return
    if name == "trl":
        tree = yaml.safe_load(text)
        assert tree["per_device_train_batch_size"] * tree["gradient_accumulation_steps"] * plan.cluster.devices == 512
        assert (tree["num_generations"], tree["generation_batch_size"]) == (4, 512)
        assert tree["vllm_tensor_parallel_size"] == plan.generation.tp
        return
    options = options_of(text)
    expected = {
        "verl": {"actor_rollout_ref.rollout.tensor_model_parallel_size": engine, "data.train_batch_size": "128",
                 "actor_rollout_ref.rollout.n": "4", "trainer.nnodes": "2", "trainer.n_gpus_per_node": "8",
                 "actor_rollout_ref.rollout.free_cache_engine": "True"},
        "openrlhf": {"--vllm.tensor_parallel_size": engine, "--vllm.num_engines": str(plan.replicas),
                     "--ds.zero_stage": str(cut.zero), "--train.colocate_all": "", "--rollout.batch_size": "128"},
        "slime": {"--rollout-num-gpus-per-engine": engine, "--pipeline-model-parallel-size": str(cut.pp),
                  "--tensor-model-parallel-size": str(cut.tp), "--colocate": "", "--global-batch-size": "512"},
        "vllm": {"--tensor-parallel-size": engine, "--enable-sleep-mode": "", "--max-model-len": "3072"},
        "sglang": {"--tp-size": engine, "--enable-memory-saver": "", "--context-length": "3072"},
    }[name]  # fmt: skip
    assert expected.items() <= options.items()


def test_settings_of_disaggregated_pools_list_their_devices() -> None:
    words = ("--model", "llama-3.1-8b", "--hardware", "2x8xH100", "--placement", "async", "--settings")
    verl = options_of(plaudit(*words, "verl").stdout)
    assert verl["rollout.nnodes"] == verl["trainer.nnodes"] == "1"
    nemo = yaml.safe_load(plaudit(*words, "nemo-rl").stdout)
    assert nemo["policy"]["generation"]["colocated"]["enabled"] is False
    assert nemo["policy"]["generation"]["colocated"]["resources"] == {"num_nodes": 1, "gpus_per_node": 8}
    assert nemo["grpo"]["async_grpo"] == {"enabled": True, "max_trajectory_age_steps": 1}
    assert nemo["cluster"] == {"num_nodes": 2, "gpus_per_node": 8}


def test_settings_are_written_to_a_file_and_invalid_ones_rejected(tmp_path: Path) -> None:
    out = tmp_path / "verl.sh"
    assert plaudit(*WORDS, "--settings", "verl", "--out", str(out)).returncode == 0
    assert subprocess.run(["bash", "-n", str(out)]).returncode == 0
    cases = {
        (*WORDS, "--settings", "verlx"): "unknown project 'verlx' for --settings; did you mean 'verl'?",
        (*WORDS[:4], "--placement", "async", "--settings", "trl"): "can be expressed in its settings; the fastest",
        (*WORDS, "--settings", "verl", "--json"): "remove --for, --json",
        ("--model", "llama-3.1-70b", "--hardware", "1x1xH100", "--settings", "verl"): "fits on 1x1xH100 SXM in no plan",
    }
    for words, message in cases.items():
        run = plaudit(*words)
        assert run.returncode, words
        assert message in run.stderr.replace("\n", " "), (words, run.stderr)
