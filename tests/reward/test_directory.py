"""Reward settings stored in a model directory, and how a user overrides them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plaudit.config import load_recipe, parse_recipe
from plaudit.config.reward import BlendTable, JudgeTable, OutcomeTable, ProcessTable, RuleTable, parse_reward
from plaudit.errors import ConfigError, ModelError
from plaudit.models import resolve, save
from plaudit.records import Item
from plaudit.reward import complete, load_reward
from plaudit.reward.rules.rule import RuleReward
from plaudit.train.run.progress import Progress
from plaudit.train.run.run import Run
from plaudit.train.supervised.model import reward_toml
from plaudit.train.supervised.supervised import SupervisedTraining

from . import tiny


def test_embedded_models_load_with_the_settings_of_their_reward_toml() -> None:
    outcome, process = complete({"path": "sums"}, "test"), complete({"path": "sums-steps"}, "test")
    assert isinstance(outcome, OutcomeTable)
    assert outcome.answer == "apart"
    assert isinstance(process, ProcessTable)
    assert process.format.split == ";"
    with pytest.raises(ConfigError, match='kind = "process" and a format'):
        complete({"path": "sums-policy"}, "test")


def test_reward_toml_of_embedded_models_equals_what_training_writes() -> None:
    for name in ("sums", "sums-steps"):
        directory = resolve(name)
        assert (directory / "reward.toml").read_text() == reward_toml(load_recipe(directory / "recipe.toml"))
    assert reward_toml(load_recipe(resolve("sums-policy") / "recipe.toml")) is None


def test_user_settings_override_those_of_the_model() -> None:
    table = complete({"path": "sums-steps", "format": {"keep": False}, "aggregate": "min"}, "test")
    assert isinstance(table, ProcessTable)
    assert (table.format.split, table.format.keep, table.aggregate) == (";", False, "min")
    named = complete({"path": "sums-steps", "format": "qwen2.5-math-prm"}, "test")
    assert isinstance(named, ProcessTable)
    assert named.format.tag == "<extra_0>"
    other = complete({"path": "sums", "end": False}, "test")
    assert isinstance(other, OutcomeTable)
    assert (other.answer, other.end) == ("apart", False)


def test_kind_follows_the_architecture(tmp_path: Path) -> None:
    tokenizer = tiny.chatml()
    for kind, expected in (("outcome", OutcomeTable), ("steps", ProcessTable), ("value", ProcessTable)):
        path = tiny.write(tmp_path / kind, tiny.model(kind, tokenizer, ("a", "b")), tokenizer)
        assert isinstance(complete({"path": path}, "test"), expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "outcome"\npath = "x"', "remove path"),
        ('kind = "outcome"\npol = "mean"', "did you mean 'pool'"),
        ('kind = "rule"\nrule = "exact"', "unknown key 'path'|outcome or process"),
        ('pool = "mean"', "kind is missing"),
        ("kind = ", "not valid TOML"),
    ],
)
def test_invalid_reward_toml_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    tokenizer = tiny.chatml()
    path = tiny.write(tmp_path, tiny.model("outcome", tokenizer, ("reward",)), tokenizer)
    (tmp_path / "reward.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        complete({"path": path}, "test")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "kind is missing"),
        ({"kind": "proces"}, "did you mean 'process'"),
        ({"kind": "outcome"}, "the key 'path' is missing"),
        ({"kind": "outcome", "path": "x", "pool": "max"}, "pool = 'max'"),
        ({"kind": "outcome", "path": "x", "standardise": {"std": 0.0}}, "standardise.std = 0.0"),
        ({"kind": "rule", "rule": "regex"}, "needs pattern"),
        ({"kind": "rule", "rule": "exact", "pattern": "x"}, "does not take pattern"),
        ({"kind": "rule", "rule": "regex", "pattern": "("}, "is not a regular expression"),
        ({"kind": "rule", "rule": "exact", "answer": "x"}, "has no group"),
        ({"kind": "rule", "rule": "function", "function": "nocolon"}, "expected package.module:name"),
        ({"kind": "rule", "rule": "exact", "timeout": 0.0}, "timeout = 0.0"),
        ({"kind": "judge", "template": "{response}"}, "either url and model, or path"),
        ({"kind": "judge", "template": "{response}", "url": "http://x"}, "model = None"),
        ({"kind": "judge", "template": "{response}", "url": "file:///etc", "model": "m"}, "expected http"),
        ({"kind": "judge", "template": "rate it", "path": "x"}, "has no {response}"),
        ({"kind": "judge", "template": "{response}", "path": "x", "pattern": "x"}, "exactly one group"),
        ({"kind": "judge", "template": "{response}", "path": "x", "low": 3.0, "high": 1.0}, "must be below"),
        ({"kind": "blend", "members": {}}, "members"),
        ({"kind": "blend", "members": {"a": -1.0}, "combine": "mean-minus-deviation"}, "weights above 0"),
    ],
)
def test_invalid_reward_tables_are_rejected_in_one_line(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_reward(tree, "test")
    assert "\n" not in str(caught.value)


def test_tables_survive_serialisation() -> None:
    trees: list[tuple[dict[str, Any], type]] = [
        ({"kind": "outcome", "path": "x", "weights": {"a b": 1.0}, "kv_bytes": 1 << 20}, OutcomeTable),
        ({"kind": "rule", "rule": "regex", "pattern": "x"}, RuleTable),
        ({"kind": "judge", "template": "{response}", "path": "x"}, JudgeTable),
        ({"kind": "blend", "members": {"a": 1.0, "b": 2.0}}, BlendTable),
    ]
    for tree, expected in trees:
        table = parse_reward(tree, "test")
        assert isinstance(table, expected)
        assert parse_reward(table.model_dump(mode="json"), "again") == table


def recipe(task: str, **more: Any) -> Any:
    tree: dict[str, Any] = {
        "task": task, "model": {"new": {"hidden": 16, "heads": 2, "kv_heads": 2, "layers": 2, "ffn": 16}},
        "data": {"world": "sums", "eval_items": 10}, "train": {"steps": 2, "batch": 2, "lr": 1e-3, "threads": 1},
    }  # fmt: skip
    return parse_recipe({**tree, **more}, "test")


def test_trained_model_loads_without_further_settings(tmp_path: Path) -> None:
    item = Item(prompt="7+8+4=", response="7+8=15;15+4=19;#19")
    for task, count in (("reward", 1), ("prm", 3)):
        tree = recipe(task)
        with Run(tmp_path / task, tree) as run:
            SupervisedTraining(tree, run, Progress("test")).fit()
        (result,) = load_reward(tmp_path / task).score([item])
        assert result.error is None
        assert len(getattr(result, "values", (0,))) == count
        assert (tmp_path / task / "final" / "reward.toml").is_file()


def test_attributes_have_equal_weights_by_default(tmp_path: Path) -> None:
    data = tmp_path / "rated.jsonl"
    data.write_text('{"prompt": "1+1=", "response": "#2", "true": 1, "short": 0.5}\n' * 4)
    base = tiny_policy(tmp_path / "base")
    tree = recipe(
        "reward", model={"path": base}, data={"path": str(data)},
        algorithm={"name": "regression", "attributes": ("true", "short")},
    )  # fmt: skip
    with Run(tmp_path / "run", tree) as run:
        SupervisedTraining(tree, run, Progress("test")).fit()
    (score,) = load_reward(tmp_path / "run").score([Item(prompt="1+1=", response="#2")])
    attributes = score.attributes  # type: ignore[union-attr]
    assert score.value == pytest.approx((attributes["true"] + attributes["short"]) / 2)  # type: ignore[union-attr]
    assert "reward.toml" not in {entry.name for entry in Path(base).iterdir()}


def tiny_policy(directory: Path) -> str:
    tokenizer = tiny.chatml()
    return str(save(tiny.model("causal", tokenizer), tokenizer, directory))


def test_missing_model_is_reported_with_a_suggestion() -> None:
    with pytest.raises(ModelError, match="did you mean 'sums'"):
        complete({"path": "summs"}, "test")


@pytest.mark.parametrize(
    "names", ["Work, ModelInfo", "complete", "RuleReward", "Judge, JudgeReward, HttpAsk", "combine"]
)
def test_rules_judges_and_tables_load_without_torch(names: str) -> None:
    code = f"from plaudit.reward import {names}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_readings_load_without_torch() -> None:
    code = "from plaudit.reward import OutcomeReading, ProcessReading; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_keys_of_a_table_load_as_a_recipe_reads_them() -> None:
    rule = load_reward({"rule": "exact", "answer": r"#(\d+)$"})
    assert isinstance(rule, RuleReward)
    rule.close()
    assert load_reward({"path": "sums"}).version == load_reward("sums").version
    for wrong, message in (
        ({}, "neither path, rule nor template"), ({"kind": "judge"}, "the key 'template' is missing"),
        ({"path": "sums", "pth": 1}, "unknown key 'pth'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            load_reward(wrong)
