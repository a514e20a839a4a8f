"""Texts longer than the short set of a model's two sets of rotary factors allows are rejected with a working fix."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Phi3Config

from plaudit.models import load_any, save
from tests.command import plaudit_here

ORIGINAL, LONGEST = 64, 256
FIX = "set short_factor to long_factor in its config.json"
ROWS = [
    {"prompt": "+".join(str((i + j) % 10) for j in range(40)) + "=", "response": "#7", "truth": "7"} for i in range(4)
]
RECIPES = {
    "sft": 'task = "sft"\n[data]\npath = "rows.jsonl"\n[train]\nsteps = 1\nbatch = 2\nlr = 1e-4\nthreads = 1\n',
    "rl": (
        'task = "rl"\n[data]\npath = "rows.jsonl"\ntruth = "truth"\n[reward]\nrule = "exact"\n'
        '[algorithm]\nname = "grpo"\nkl.coef = 0.0\n[train]\nsteps = 1\nprompts_per_step = 2\n'
        'samples_per_prompt = 2\nlr = 1e-4\nthreads = 1\n'
        "[sampling]\nmax_tokens = 8\n"
    ),
}  # fmt: skip


def write_model(auto: Any, directory: Path) -> Path:
    tokenizer = load_any("sums-policy").tokenizer
    config = Phi3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LONGEST, original_max_position_embeddings=ORIGINAL, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=1, eos_token_id=tokenizer.eos_token_id,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [4.0 + i for i in range(8)],
        },
    )  # fmt: skip
    torch.manual_seed(0)
    return save(auto.from_config(config).eval(), tokenizer, directory)


def apply_fix(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    rope = config["rope_parameters"]
    rope["short_factor"] = rope["long_factor"]
    (directory / "config.json").write_text(json.dumps(config))
    return rope


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@pytest.mark.parametrize("task", RECIPES)
def test_training_rejects_long_texts_with_a_working_fix(task: str, place: Path) -> None:
    model = write_model(AutoModelForCausalLM, place / "phi")
    (place / "recipe.toml").write_text(RECIPES[task] + '[model]\npath = "phi"\ndevice = "cpu"\n')
    refused = plaudit_here("train", "recipe.toml", "--out", "run", cwd=place)
    assert refused.returncode
    assert FIX in refused.stderr
    rope = apply_fix(model)
    trained = plaudit_here("train", "recipe.toml", "--out", "cured", cwd=place)
    assert not trained.returncode, trained.stderr
    saved = json.loads((place / "cured" / "final" / "config.json").read_text())["rope_parameters"]
    assert saved["short_factor"] == saved["long_factor"] == rope["long_factor"]


def test_scoring_rejects_long_texts_with_a_working_fix(place: Path) -> None:
    model = write_model(AutoModelForSequenceClassification, place / "judge")
    refused = plaudit_here("score", "rows.jsonl", "--model", str(model), cwd=place)
    assert refused.returncode
    assert refused.stdout.count(FIX) == len(ROWS)
    apply_fix(model)
    scored = plaudit_here("score", "rows.jsonl", "--model", str(model), cwd=place)
    assert not scored.returncode, scored.stderr
    assert scored.stdout.count('"score"') == len(ROWS)
