"""Our learner and TRL's preference trainers give the same loss and gradient for the same rows.

Each tokenizes the texts itself; TRL pads what ours packs and computes the prompt of a pair twice. The reference is a
different model from the policy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from plaudit.config import PreferenceRecipe, parse_recipe
from plaudit.core.model.packing import use_packed_attention
from plaudit.models import Loaded, load_policy
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.supervised.encode import Encoder
from plaudit.train.supervised.learner import Learner
from plaudit.train.supervised.preference_data import PreferenceExamples
from plaudit.train.supervised.preferences import LearnPreferences
from tests.interop.environments import run_client
from tests.interop.test_trl_losses import make_model
from tests.train.test_preferences import write

pytestmark = pytest.mark.interop

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": f"{a}+{b}={a + b};#{a + b}", "rejected": "1" * (a % 4) + f"#{b}"}
    for a, b in ((1, 7), (23, 4), (5, 5), (9, 17), (12, 8), (7, 3))
]
LABELLED = [
    {"prompt": p["prompt"], "response": p["chosen" if i % 3 else "rejected"], "label": bool(i % 3)}
    for i, p in enumerate(PAIRS)
]


@dataclass(frozen=True)
class Case:
    name: str
    theirs: Mapping[str, Any]
    ours: Mapping[str, Any]
    trainer: str = "dpo"
    rows: str = "pairs"
    policy: str = "policy"
    reference: str = "reference"


CASES = [
    Case("dpo", {"beta": 0.3, "loss_type": "sigmoid"}, {"name": "dpo", "beta": 0.3}),
    Case("ipo", {"beta": 0.2, "loss_type": "ipo"}, {"name": "ipo", "beta": 0.2}),
    Case("kto", {"beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 0.5},
         {"name": "kto", "beta": 0.1, "desirable": 1.5, "undesirable": 0.5}, "kto", "labelled"),
    # With policy and reference swapped the mean log-ratio is above 0, and the baseline matters.
    Case("kto-drift", {"beta": 0.1}, {"name": "kto", "beta": 0.1}, "kto", "labelled", "reference", "policy"),
    Case("orpo", {"beta": 0.4}, {"name": "orpo", "beta": 0.4}, "orpo"),
    Case("simpo", {"beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0, "loss_type": "simpo"},
         {"name": "simpo", "beta": 2.0, "gamma": 0.5}, "cpo"),
]  # fmt: skip


@dataclass(frozen=True)
class World:
    root: Path
    found: Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("trl")
    policy, reference = make_model(root / "policy", 3), make_model(root / "reference", 4)
    write(root / "pairs.jsonl", PAIRS)
    write(root / "labelled.jsonl", LABELLED)
    inputs = {
        "models": {"policy": str(policy), "reference": str(reference)}, "out": str(root), "pairs": PAIRS,
        "labelled": [{"prompt": r["prompt"], "completion": r["response"], "label": r["label"]} for r in LABELLED],
        "cases": [{**vars(case), "config": dict(case.theirs)} for case in CASES],
    }  # fmt: skip
    return World(root, run_client(".venv-interop", "trl_preferences", inputs, 400))


def learner(case: Case, world: World, directory: Path, budget: int) -> tuple[Learner, list[Any]]:
    """All rows as one batch, read from a file as in a user's run."""
    rows = world.root / f"{case.rows}.jsonl"
    recipe = parse_recipe(
        {
            "task": "preference", "model": {"path": str(world.root / "policy")}, "algorithm": dict(case.ours),
            "data": {"path": str(rows), "eval_path": str(rows)}, "train": {"steps": 1, "batch": len(PAIRS), "lr": 1e-9},
        },
        case.name,
    )  # fmt: skip
    assert isinstance(recipe, PreferenceRecipe)
    loaded, reference = (load_packed(world.root / name) for name in (case.policy, case.reference))
    encode = Encoder(recipe, loaded.tokenizer, 64)
    data = PreferenceExamples(recipe, directory, encode, lambda: nullcontext(reference.module))
    module = loaded.module
    return Learner(module, LearnPreferences(recipe.algorithm), Optimizer(module, recipe.train), budget), data.heldout


def load_packed(directory: Path) -> Loaded:
    loaded = load_policy(directory, "float32", "cpu")
    use_packed_attention(loaded.module)
    return loaded


@pytest.mark.parametrize("budget", [10**6, 40], ids=["whole", "split"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradient(world: World, case: Case, budget: int, tmp_path: Path) -> None:
    theirs, expected = world.found[case.name], load_file(world.root / f"{case.name}.safetensors")
    ours, examples = learner(case, world, tmp_path, budget)
    loss = ours.gradient(examples)
    gradients = {n: p.grad for n, p in ours.model.named_parameters() if p.grad is not None}
    assert expected.keys() == gradients.keys()
    scale = max(gradient.abs().max() for gradient in expected.values())
    diff = max(((gradients[n] - g).abs().max() / scale).item() for n, g in expected.items())
    print(f"{case.name:6} loss {loss:+.7f} TRL {theirs['loss']:+.7f} gradient {diff:.1e} of the largest {theirs['kl']}")
    assert loss == pytest.approx(theirs["loss"], rel=1e-6, abs=1e-6)
    assert diff < 5e-6
    if case.trainer == "kto":
        objective = ours.objective
        assert isinstance(objective, LearnPreferences)
        assert [objective.baseline] == pytest.approx(theirs["kl"], rel=1e-5, abs=1e-6)
        assert (objective.baseline > 0) == (case.name == "kto-drift")
