"""Which settings can change when a run is resumed; the fixes that errors suggest work as printed."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from plaudit.config import parse_recipe, to_toml
from plaudit.config.rl import RlRecipe
from plaudit.events import CHANGED, read_events
from plaudit.report.diagnosis import diagnose
from plaudit.report.history import read_history
from plaudit.train.run.run import FIXED
from tests.command import plaudit_here
from tests.train.rl_world import recipe

ROOT = Path(__file__).resolve().parent.parent.parent / "plaudit"
KEY = re.compile(
    r"\b((?:train|placement|engine|resources|reward|critic|environment|model|sampling|algorithm)\.[a-z_.]+)"
)
# Named by errors that are raised before training starts: there is nothing to resume.
AT_THE_START = {"model.lora", "model.lora.targets", "model.path", "model.new", "critic.path"}


def started_run(directory: Path, **tables: Any) -> list[str]:
    """Trains one step and saves a checkpoint; returns the command that resumes the run."""
    tree = recipe(**{"train": {"steps": 1, "checkpoint": {"every": 1}}, **tables})
    file = directory / "recipe.toml"
    file.write_text(to_toml(tree))
    words = ["train", str(file), "--out", str(directory / "run")]
    done = plaudit_here(*words)
    assert done.returncode == 0, done.stderr
    return [*words, "--resume"]


def sets(**keys: str) -> list[str]:
    return [word for key, value in keys.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def keys_in_errors() -> set[str]:
    """The recipe keys that errors of the training code name."""
    keys: set[str] = set()
    for folder in ("rl", "train", "place"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise):
                    texts = [
                        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                    ]
                    keys |= {key.rstrip(".") for text in texts for key in KEY.findall(text)}
    return keys


def test_keys_named_by_errors_can_be_changed_on_resumption() -> None:
    named = {key for key in keys_in_errors() if _exists(key)}
    assert {"train.lr", "train.non_finite", "engine.kv_bytes"} <= named
    fixed = {key for key in named if any(key == name or key.startswith(f"{name}.") for name in FIXED)}
    assert fixed <= AT_THE_START


def _exists(key: str) -> bool:
    table: Any = RlRecipe
    for part in key.split("."):
        fields = getattr(table, "model_fields", {})
        if part not in fields:
            return False
        annotation = fields[part].annotation
        table = next(
            (t for t in (annotation, *getattr(annotation, "__args__", ())) if hasattr(t, "model_fields")), None
        )
    return True


@pytest.mark.slow
def test_settings_that_affect_no_number_can_be_changed_on_resumption(tmp_path: Path) -> None:
    command = started_run(tmp_path)
    changes = sets(
        train__steps="2", train__micro_batch_tokens="512", train__non_finite="skip", train__show="0",
        model__recompute="true", placement__name="swapped", placement__deadline="60", engine__kv_bytes="4000000",
        engine__probe="0", reward__on_error="halt", reward__max_errors="0.1", reward__patience="5",
    )  # fmt: skip
    done = plaudit_here(*command, *changes)
    assert done.returncode == 0, done.stderr
    assert not [event for event in read_events(tmp_path / "run") if event.get("text") == CHANGED]


@pytest.mark.slow
def test_settings_that_affect_numbers_need_set_and_are_recorded(tmp_path: Path) -> None:
    command = started_run(tmp_path)
    file = tmp_path / "recipe.toml"
    file.write_text(file.read_text().replace("lr = 0.0001", "lr = 0.0002"))
    refused = plaudit_here(*command)
    assert refused.returncode == 2
    assert "started with train.lr = 0.0001, and the recipe has 0.0002" in refused.stderr
    fix = re.search(r"add (--set train\.lr=)… to the command", refused.stderr)
    assert fix is not None, refused.stderr
    more = sets(train__steps="3", algorithm__clip__high="0.3", algorithm__shaping__normalise="true")
    done = plaudit_here(*command, *more, *f"{fix[1]}0.0002".split())
    assert done.returncode == 0, done.stderr
    changes = [event for event in read_events(tmp_path / "run") if event.get("text") == CHANGED]
    recorded = {(e["key"], e["old"], e["new"], e["step"]) for e in changes}
    assert recorded == {
        ("train.lr", 0.0001, 0.0002, 1), ("algorithm.clip.high", 0.2, 0.3, 1),
        ("algorithm.shaping.normalise", False, True, 1),
    }  # fmt: skip
    findings = {finding.rule: finding.says for finding in diagnose(read_history(tmp_path / "run"))}
    assert "train.lr = 0.0002 instead of 0.0001 from step 1 on" in findings["settings changed on resumption"]


@pytest.mark.parametrize("algorithm", [{"name": "dapo", "dynamic": "none"}, {"name": "ppo", "clip": {"value": "none"}}])
def test_none_can_be_written_and_read_back(algorithm: dict[str, Any]) -> None:
    """Where the algorithm's name or a default sets a key, omitting the key does not turn it off."""
    tree = recipe(algorithm=algorithm)
    assert (tree.algorithm.dynamic, tree.algorithm.clip.value) in ((None, 0.2), (None, None))
    assert parse_recipe(tomllib.loads(to_toml(tree)), "again") == tree


@pytest.mark.slow
def test_settings_that_do_not_fit_the_checkpoints_are_rejected(tmp_path: Path) -> None:
    command = started_run(tmp_path)
    for change in (sets(model__dtype="bfloat16"), sets(model__lora__rank="4")):
        refused = plaudit_here(*command, *change)
        assert refused.returncode == 2
        assert "which does not fit its checkpoints; --fresh starts over" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("names", [("colocated", "async"), ("async", "colocated")])
def test_run_can_resume_as_async_and_back(tmp_path: Path, names: tuple[str, str]) -> None:
    before, after = names
    command = started_run(tmp_path, placement={"name": before})
    done = plaudit_here(*command, *sets(train__steps="2", placement__name=after))
    assert done.returncode == 0, done.stderr
    changed_keys = [event["key"] for event in read_events(tmp_path / "run") if event.get("text") == CHANGED]
    assert "placement.name" in changed_keys
