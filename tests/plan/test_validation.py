"""The shipped constants against the published measurements that come with the repository: no change may lose them."""

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
"""
"""Published measurements that the constants have not seen, with columns missing, and rows that say too little."""


def test_a_file_of_other_rows_is_predicted_or_told_why_not(tmp_path: Path) -> None:
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
    for why in ("no shape known for 'Nope-9B'", "unknown accelerator 'Z80'", "nothing about 'smell'", "value = ''"):
        assert why in run.stdout


def test_no_row_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ]
    rng, fixed, planned = random.Random(1), Constants(), 0
    for _ in range(600):
        changed = dict(rng.choice(known))
        for name in rng.sample([name for name in row.COLUMNS if name != "metric"], 3):
            changed[name] = rng.choice(junk)
        try:
            found = rows.answer(changed, fixed)
        except row.Unplannable:
            continue
        planned += 1
        assert found.predicted >= 0
    assert planned > 100
