"""The shipped constants against the published measurements in the repository; a change must not make them worse."""

import csv
import importlib
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plaudit.plan import Constants

ROOT = Path(__file__).parent.parent.parent


def test_the_shipped_constants_reach_the_targets() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks/planner_validation.py", "--shipped"], capture_output=True, text=True, cwd=ROOT,
        timeout=240, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    table = run.stdout.split("\nmetric")[0]
    for target in ("step time", "TPOT, dense", "training", "weight sync", "memory", "order"):
        assert re.search(rf"^{target} .*%", table, re.MULTILINE), table
    assert "MISSED" not in table, table
    assert "could not be planned" in run.stdout


OTHERS = """\
system,model,gpu,n_gpus,architecture,prompt_len,response_len,batch,metric,value,unit,notes,gen_tp,dtype
sglang 0.5.7,DeepSeek-R1-0528,NVIDIA H200 141GB,8,serving,1024,1024,8,tpot,12.8,ms,TP8 EP1,8,fp8
sglang 0.5.7,DeepSeek-R1-0528,H200,8,serving,1024,1024,32,tpot,25.6,ms,,8,fp8
vllm,Qwen/Qwen3-30B-A3B,A100,1,serving,128,"1,024",1,tpot,9.7,ms,,1,bf16
vllm 0.17,gpt-oss-120b,MI300X,1,serving,1024,1024,64,tpot,31.4,ms,,1,fp4
vllm,Nope-9B,H100,1,serving,1024,1024,8,tpot,5,ms,,1,bf16
vllm,Qwen3-8B,Z80,1,serving,1024,1024,8,tpot,5,ms,,1,bf16
vllm,Qwen3-8B,H100,1,serving,1024,1024,8,smell,5,ms,,1,bf16
vllm,Qwen3-8B,H100,1,serving,1024,1024,8,tpot,,ms,,1,bf16
vllm,Qwen3-8B,H100,1,serving,1024,1,8,tpot,9,ms,,1,bf16
verl,Qwen3-8B,H100,8,async 4:9,512,1024,256,step_time,40,s,,,bf16
"""  # measurements that the constants have not seen; columns are missing, and some rows cannot be planned


def test_rows_of_another_file_are_predicted_or_rejected_with_a_reason(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text(OTHERS)
    run = subprocess.run(
        [sys.executable, "benchmarks/planner_validation.py", "--csv", str(own)], capture_output=True,
        text=True, cwd=ROOT, timeout=120, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "with the constants of the package" in run.stdout
    assert re.search(r"TPOT, experts.* 4 ", run.stdout)
    assert "MISSED" not in run.stdout, run.stdout
    for reason in ("no shape known for 'Nope-9B'", "unknown accelerator 'Z80'", "nothing about 'smell'", "value = ''"):
        assert reason in run.stdout
    assert "a response of 1 tokens has no time between tokens" in run.stdout
    assert "4 + 9 devices are more than the 8 there are" in run.stdout


def test_a_training_run_without_a_layout_is_predicted_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    row, rows = importlib.import_module("planner.row"), importlib.import_module("planner.rows")
    fields = {"system": "s", "model": "llama-3.1-8b", "gpu": "H100", "n_gpus": "8", "architecture": "train only",
            "response_len": "8192", "batch": "16", "metric": "train_throughput", "value": "9000"}  # fmt: skip
    answer = rows.answer(row.whole(fields), Constants())
    assert answer.target == ""
    assert 4000 < answer.predicted < 14000
    with pytest.raises(row.Unplannable, match=r"none fits for llama-3.1-405b on 1x8xH100"):
        rows.answer(row.whole({**fields, "model": "llama-3.1-405b"}), Constants())


def test_malformed_rows_raise_only_unplannable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    row, rows = importlib.import_module("planner.row"), importlib.import_module("planner.rows")
    with (ROOT / "benchmarks/data/validation.csv").open(newline="") as file:
        known = [row.whole(line) for line in csv.DictReader(file)]
    junk = [
        "",
        "?",
        "0",
        "-1",
        "1e9",
        "7",
        "3.5",
        "nan",
        "8xH100",
        "GH200",
        "4,1,1,1,1,1",
        "int4",
        "max",
        "PPO",
        "TP3 EP5",
        "a,b,c,d,e",
        "async 900:900",
        "w4a16_mxfp4",
    ]
    rng, fixed, planned = random.Random(1), Constants(), 0
    for _ in range(600):
        changed = dict(rng.choice(known))
        for name in rng.sample([name for name in row.COLUMNS if name != "metric"], 3):
            changed[name] = rng.choice(junk)
        try:
            answer = rows.answer(changed, fixed)
        except row.Unplannable:
            continue
        planned += 1
        assert answer.predicted >= 0
    assert planned > 100
