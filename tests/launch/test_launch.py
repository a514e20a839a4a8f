"""`plaudit launch`: scripts that bash parses, manifests that Kubernetes' published schema accepts, a real start."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from plaudit.config import parse_recipe
from plaudit.events import read_events
from tests.command import plaudit_here

ROOT = Path(__file__).parents[2]
# The strict schema of Kubernetes 1.36 (unlisted properties are rejected), reduced to what these kinds use, without
# descriptions.
SCHEMA = json.loads((Path(__file__).parent / "kubernetes-1.36.json").read_text())
SEPARATE = (
    *(word for key, value in {
        "placement.name": "async", "resources.data_parallel": 4, "resources.rollout.nodes": 3,
        "resources.rollout.processes": 6, "resources.rollout.tensor_parallel": 2,
    }.items() for word in ("--set", f"{key}={value}")),
    "--nodes", "2",
)  # fmt: skip
FOUR = ("--set", "resources.data_parallel=4", "--nodes", "2")


def launch(*words: str) -> str:
    completed = plaudit_here("launch", *words)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def rejected(*words: str) -> str:
    completed = plaudit_here("launch", *words)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.count("\n") == 1
    return completed.stderr


def test_the_script_is_valid_for_bash_and_sbatch(tmp_path: Path) -> None:
    script = launch("sums-grpo", "--slurm", *FOUR, "--partition", "gpu", "--time", "2:00:00")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
    head, _, body = script.partition("set -euo pipefail\n")
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in head.splitlines() if line.startswith("#SBATCH")
    )
    assert head.startswith("#!/bin/bash\n")
    assert {key: options[key] for key in ("nodes", "ntasks-per-node", "gpus-per-node", "partition", "time")} == {
        "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "2", "partition": "gpu", "time": "2:00:00",
    }  # fmt: skip
    assert "account" not in options
    assert body.count("srun ") == 2
    assert "--nnodes 2 --nproc-per-node 2 " in body
    assert "-m plaudit doctor\n" in body
    assert "train sums-grpo --set resources.data_parallel=4 --out runs/sums-grpo --resume\n" in body
    file = tmp_path / "job.sbatch"
    output = launch("sums-grpo", "--slurm", *FOUR, "--set", "model.device=cpu", "--out", str(file))
    assert output == f"{file}: 2 machine(s) with 2 rank(s) each on the CPU; start it with sbatch {file}\n"
    assert "gpus-per-node" not in file.read_text()


def test_arguments_with_spaces_are_quoted(tmp_path: Path) -> None:
    recipe = tmp_path / "my recipe's.toml"
    recipe.write_text((ROOT / "plaudit" / "recipes" / "sums-grpo.toml").read_text())
    script = launch(str(recipe), "--slurm", "--run", "runs/a b")
    words = subprocess.run(
        ["bash"], input="srun() { printf '%s\\n' \"$@\"; }; scontrol() { echo node1; }; PYTHON=python SLURM_JOB_ID=7 "
        "SLURM_JOB_NODELIST=x SLURM_SUBMIT_DIR=.\n" + script, text=True, capture_output=True, check=True, timeout=60,
    ).stdout.splitlines()  # fmt: skip
    assert words[words.index("train") + 1] == str(recipe)
    assert words[words.index("--out") + 1] == "runs/a b"
    assert words[words.index("--rdzv-endpoint") + 1] == "node1:20007"


def test_the_last_machines_of_the_script_run_rollouts(tmp_path: Path) -> None:
    script = launch("sums-grpo", "--slurm", *SEPARATE, "--run", "runs/a b")
    assert "#SBATCH --nodes=5\n" in script
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "2 machine(s) with 2 rank(s) each and 3 that generate, with 4 each, on 4 GPU(s)" in script
    calls = tmp_path / "calls"
    srun = f"srun() {{ printf '%s|' \"$@\" >> '{calls}'; echo >> '{calls}'; }};"
    subprocess.run(
        ["bash"], input=f"{srun} scontrol() {{ echo one; }}; "
        "PYTHON=python SLURM_JOB_ID=7 SLURM_JOB_NODELIST=x SLURM_SUBMIT_DIR=.\n" + script, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    doctor, *both = (line.split("|") for line in calls.read_text().splitlines())
    assert doctor[doctor.index("--nnodes") + 1] == "5"
    train, generate = sorted(both, key=lambda words: "train" not in words)
    assert generate[:6] == ["--nodes", "3", "--ntasks", "3", "--relative", "2"]
    assert generate[7:-1] == ["python", "-m", "plaudit", "rollouts", "runs/a b"]
    assert train[:6] == ["--nodes", "2", "--ntasks", "2", "--relative", "0"]
    assert train[train.index("--nnodes") + 1] == "2"
    assert train[train.index("--out") + 1] == "runs/a b"


def documents(*words: str) -> dict[str, Any]:
    by_kind = {each["kind"]: each for each in yaml.safe_load_all(launch(*words))}
    for kind, document in by_kind.items():
        schema = {"definitions": SCHEMA["definitions"], **SCHEMA["kinds"][kind]}
        jsonschema.Draft7Validator(schema).validate(document)
    return by_kind


def test_the_schema_rejects_what_kubernetes_would_reject() -> None:
    job = documents("sums-grpo", "--kubernetes")["Job"]
    schema = jsonschema.Draft7Validator({"definitions": SCHEMA["definitions"], **SCHEMA["kinds"]["Job"]})
    job["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert [error.validator for error in schema.iter_errors(job)] == ["additionalProperties"]
    job["spec"]["template"]["spec"] = {"restartPolicy": "Never"}
    assert [error.message for error in schema.iter_errors(job)] == ["'containers' is a required property"]


def test_the_manifest_is_valid_and_its_documents_agree() -> None:
    by_kind = documents("sums-grpo", "--kubernetes", *FOUR, "--image", "registry/plaudit:1", "--storage", "5Gi")
    job, service, claim, config = (by_kind[kind] for kind in ("Job", "Service", "PersistentVolumeClaim", "ConfigMap"))
    name = job["metadata"]["name"]
    assert name == "plaudit-sums-grpo"
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (2, 2, "Indexed")
    template = job["spec"]["template"]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert service["metadata"]["name"] == template["spec"]["subdomain"], "pods have names only below the service's"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (container,) = template["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    script = container["command"][2]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
    assert f"--master-addr {name}-0.{name} " in script
    assert container["image"] == "registry/plaudit:1"
    assert "ReadWriteOnce" in documents("sums-grpo", "--kubernetes")["PersistentVolumeClaim"]["spec"]["accessModes"]
    volumes, mounts = ({each["name"] for each in of} for of in (template["spec"]["volumes"], container["volumeMounts"]))
    assert volumes == mounts
    recipe: Any = parse_recipe(tomllib.loads(config["data"]["recipe.toml"]), "the ConfigMap")
    assert recipe.resources.data_parallel == 4


def test_the_last_pods_run_rollouts() -> None:
    spec = documents("sums-grpo", "--kubernetes", *SEPARATE)["Job"]["spec"]
    assert (spec["completions"], spec["parallelism"]) == (5, 5)
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    calls = {}
    for index in ("1", "2"):
        stub = 'python() { printf \'%s \' python "$@"; echo; }; exec() { "$@"; exit; };'
        calls[index] = subprocess.run(
            ["bash"], input=f"{stub} JOB_COMPLETION_INDEX={index}\n{container['command'][2]}", text=True,
            capture_output=True, check=True, timeout=60,
        ).stdout.splitlines()  # fmt: skip
    assert calls["2"] == ["python -m plaudit doctor ", "python -m plaudit rollouts runs/sums-grpo "]
    assert ["plaudit doctor " in calls["1"][0], "--nnodes 2 " in calls["1"][1]] == [True, True]
    assert "-m plaudit train /etc/plaudit/recipe.toml " in calls["1"][1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sums-grpo"], "expected one of --slurm and --kubernetes"),
        (["sums-sft", "--slurm", *FOUR[:2], "--nodes", "3"], "= 4 × 1 = 4 ranks are not divisible by --nodes 3"),
        (["sums-grpo", "--slurm", *FOUR[:2], "--nodes", "3"], "= 4 × 1 = 4 ranks are not divisible by --nodes 3"),
        (["sums-grpo", "--slurm", *FOUR, "--gpus", "1"], "2 ranks on each machine need one GPU each, but --gpus is 1"),
        (
            ["sums-grpo", "--slurm", *FOUR, "--set", "placement.name=disaggregated"],
            "generate on rank 0's machine",
        ),
        (
            ["sums-grpo", "--slurm", *SEPARATE, "--gpus", "2"],
            "4 ranks on each machine need one GPU each, but --gpus is 2",
        ),
        (["sums-grpo", "--slurm", "--set", "resources.ray=local"], "starts the processes with Ray"),
        (["sums-grpo", "--kubernetes", "--run", "/runs"], "--run /runs is a path of this machine"),
    ],
)
def test_jobs_that_cannot_start_are_rejected_before_anything_is_written(words: list[str], message: str) -> None:
    assert message in rejected(*words)


def free_number() -> int:
    """A job number whose port, 20000 + the number, is free."""
    for number in random.sample(range(12000), 100):
        try:
            with socket.create_server(("127.0.0.1", 20000 + number)):
                return number
        except OSError:
            continue
    raise AssertionError("no free port among a hundred")


SMALL = {"train.steps": 2, "train.prompts_per_step": 4, "train.samples_per_prompt": 4, "data.eval_items": 8,
         "model.device": "cpu"}  # fmt: skip


def started(tmp_path: Path, script: str, srun: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as Slurm would, with stubs of srun and scontrol for one machine; torchrun connects over TCP."""
    for name, text in {"srun": srun, "scontrol": "echo 127.0.0.1"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(free_number()), "SLURM_JOB_NODELIST": "one", "SLURM_SUBMIT_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    completed = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=800
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    events = read_events(tmp_path / "runs" / "sums-grpo")
    assert {event["step"] for event in events if event["kind"] == "metric" and "reward/mean" in event["values"]} == {
        1,
        2,
    }
    return completed


@pytest.mark.slow
def test_the_script_starts_two_ranks_on_one_machine(tmp_path: Path) -> None:
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    script = launch("sums-grpo", "--slurm", "--set", "resources.data_parallel=2", *sets)
    completed = started(tmp_path, script, 'exec "${@:2}"')
    assert "gloo      2 rank(s) on 1 machine(s): 1 pair(s)" in completed.stdout


@pytest.mark.slow
def test_the_script_starts_a_rollout_machine(tmp_path: Path) -> None:
    """Commands for both machines run twice, commands for one of them run once."""
    keys = {**SMALL, "placement.name": "disaggregated", "resources.rollout.nodes": 1}
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    script = launch("sums-grpo", "--slurm", *sets)
    both = 'if [ "$1" = --nodes ]; then exec "${@:8}"; fi; "${@:2}" & other=$!; "${@:2}" && wait $other'
    completed = started(tmp_path, script, both)
    assert "gloo      2 rank(s) on 1 machine(s): 1 pair(s)" in completed.stdout
    assert "this machine generates for the run in " in completed.stderr
