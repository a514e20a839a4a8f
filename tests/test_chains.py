"""The scripts recipes/*.sh from end to end: the real commands in order, with a tiny model instead of SmolLM2."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plaudit.config import SftRecipe, parse_recipe
from plaudit.errors import ModelError
from plaudit.train.run.progress import Progress
from plaudit.train.run.run import Run
from plaudit.train.supervised.supervised import SupervisedTraining

pytestmark = pytest.mark.slow

# Settings that make a chain small. The tiny model is rarely right, so a first digit below 5 counts as right (RULE).
SMALL = {
    "dtype": '"float32"', "device": '"cpu"', "kv_bytes": "67108864", "processes": "1", "steps": "2",
    "prompts_per_step": "8", "samples_per_prompt": "3", "minibatches": "2", "eval_items": "4", "batch": "4",
    "limit": "2", "width": "4", "warmup": "0", "eval_every": "1", "micro_batch_tokens": "2048", "max_tokens": "24",
}  # fmt: skip
SHOTS = re.compile(r"^shots = \[\n(?:  .*\n)*\]\n", re.MULTILINE)  # the tiny model was trained without shots
RULE = re.compile(r'^rule = "gym"\nanswer = .*$', re.MULTILINE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: make slow installs it")
    from plaudit.models import load_tokenizer, new_llama, resolve, save

    try:
        tokenizer = load_tokenizer(resolve("smollm2"))
    except ModelError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("models")
    module = new_llama(
        "policy", vocab_size=len(tokenizer), hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64,
        max_positions=1024, seed=1, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    save(module, tokenizer, directory / "new")
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps(worked_sum(index)) + "\n" for index in range(400)))
    recipe = parse_recipe(
        {"task": "sft", "model": {"path": str(directory / "new")}, "data": {"path": str(rows), "eval_items": 4},
         "train": {"steps": 120, "batch": 8, "lr": 5e-3, "threads": 1}}, "test",
    )  # fmt: skip
    assert isinstance(recipe, SftRecipe)
    with Run(directory / "tiny", recipe) as run:
        SupervisedTraining(recipe, run, Progress("tiny")).fit()
    return directory / "tiny"


def worked_sum(index: int) -> dict[str, Any]:
    """A sum computed line by line, in the format of the recipes' shots."""
    rng = random.Random(index)
    terms = [rng.randrange(10) for _ in range(rng.choice((3, 4)))]
    expression, value, lines = str(terms[0]), terms[0], []
    for term in terms[1:]:
        sign = rng.choice("+-")
        expression, before = f"{expression} {sign} {term}", value
        value = value + term if sign == "+" else value - term
        lines.append(f"{before} {sign} {term} = {value}")
    solution = "\n".join([*lines, f"Answer: {value}"])
    question = f"State the final answer to the following arithmetic problem: {expression} ="
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]}


def small(recipes: Path, tiny: Path) -> None:
    for path in recipes.glob("smollm2-*.toml"):
        text = path.read_text().replace('"smollm2"', f'"{tiny}"')
        for key, value in SMALL.items():
            text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        if path.stem in ("smollm2-rollouts", "smollm2-solutions"):
            text = RULE.sub("rule = 'regex'\npattern = '^-?[0-4]'", text)
        text = SHOTS.sub("", text).replace(
            r"'Answer: (-?\d+)\s*$'", r"'(\S+)\s*$'"
        )  # any last word counts as the answer
        path.write_text(text)


def run_chain(name: str, directory: Path, tiny: Path) -> str:
    root = Path.cwd()
    shutil.copytree("plaudit/recipes", directory / "recipes")
    small(directory / "recipes", tiny)
    environment = {
        **os.environ, "PYTHONPATH": str(root), "PLAUDIT": f"{sys.executable} -m plaudit", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    result = subprocess.run(
        [f"recipes/{name}.sh"], cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_chain_from_rollouts_to_ppo_with_a_learned_reward(tmp_path: Path, tiny: Path) -> None:
    output = run_chain("smollm2-ppo-rm", tmp_path, tiny)
    assert re.search(r"pairs\.jsonl: \d+ pairs of 16 prompts", output)
    assert re.search(r"smollm2-ppo-rm: 2 steps in .*; truth 0\.\d+ -> ", output)
    assert (tmp_path / "runs" / "smollm2-ppo-rm" / "report.html").is_file()
    assert (tmp_path / "runs" / "smollm2-ppo-rm" / "final" / "config.json").is_file()


def test_chain_from_solutions_to_a_search_with_a_step_value_model(tmp_path: Path, tiny: Path) -> None:
    output = run_chain("smollm2-search", tmp_path, tiny)
    assert re.search(r"steps\.jsonl: \d+ steps of \d+ solutions", output)
    for method in ("best-of-n", "rebase", "ets"):
        assert f"{method}, width 4: 2 questions" in output
    assert (tmp_path / "runs" / "smollm2-ets" / "report.html").is_file()
