"""The published configurations of widely used models, with small widths and at most seven layers: equal to plain
transformers or rejected in one line. What a family's default configuration has at its neutral value (multipliers, caps,
windows, patterns of layers) has the released value here.

released.json has the values of each model's config.json that determine its computation. With PLAUDIT_SOAK all of them
run and the table in docs/core.md is written; the slow stage runs a tenth, a different one every day; a few always run.
The results of a run must match the table.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from plaudit.core.proof.stand_in import shrunk
from tests.core.families import PROVED, Case, saved
from tests.core.test_families import as_policy, loaded
from tests.rotation import SOAK, in_turn

PAGE = Path(__file__).parents[2] / "docs" / "core.md"
BEGIN, END = "<!-- released -->\n", "<!-- end of released -->\n"
CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("released.json").read_text())
ALWAYS = {"tiiuae/Falcon-H1-0.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "google/gemma-3-270m-it"}
LAYERS = 7  # one more than the longest pattern of layers
OUTCOMES: dict[str, str] = {}


def chosen() -> list[Any]:
    return [
        pytest.param(name, marks=() if SOAK or name in ALWAYS else pytest.mark.slow)
        for number, name in enumerate(CONFIGS)
        if name in ALWAYS or in_turn(number, 10)
    ]


def small_config(name: str) -> Any:
    values = dict(CONFIGS[name])
    for key in ("num_hidden_layers", "n_layer"):
        if key in values:
            values[key] = min(values[key], LAYERS)
    if "full_attn_idxs" in values:
        values["full_attn_idxs"] = [layer for layer in values["full_attn_idxs"] if layer < LAYERS]
    config = shrunk(CONFIG_MAPPING[values["model_type"]].from_dict(values))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, key, None)
    return config


@pytest.mark.parametrize("name", chosen())
def test_released_configuration_matches_transformers_or_is_rejected(name: str, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    directory = saved(AutoModelForCausalLM, small_config(name), tmp_path / "model")
    engine, outcome = loaded(Case("causal", name, CONFIGS[name]["model_type"]), directory)
    if engine is not None:
        plain = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
        plain.config.pad_token_id = engine.decoder.module.config.pad_token_id
        as_policy(engine, plain)
    OUTCOMES[name] = outcome
    if not SOAK:
        assert from_table(PAGE.read_text())[name] == outcome


def table() -> str:
    by_outcome: dict[str, list[str]] = defaultdict(list)
    for name, outcome in OUTCOMES.items():
        by_outcome[outcome].append(f"`{name}`")
    lines = ["| | released models |", "| --- | --- |"]
    for outcome in sorted(by_outcome, key=lambda each: (each != PROVED, each)):
        label = f"**{PROVED}**" if outcome == PROVED else f"refused: {outcome}"
        names = sorted(by_outcome[outcome], key=str.lower)
        lines.append(f"| {label} | {len(names)}: {' '.join(names)} |")
    return "\n".join(lines) + "\n"


def from_table(page: str) -> dict[str, str]:
    outcomes: dict[str, str] = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]:
        _, outcome, names, _ = re.split(r"(?<!\\) ?\| ?", line)
        outcome = PROVED if outcome == f"**{PROVED}**" else outcome.removeprefix("refused: ")
        outcomes |= dict.fromkeys(re.findall(r"`([^`]+)`", names), outcome)
    return outcomes


def test_docs_table_lists_every_released_model() -> None:
    page = PAGE.read_text()
    if SOAK:
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
    assert set(from_table(PAGE.read_text())) == set(CONFIGS)
