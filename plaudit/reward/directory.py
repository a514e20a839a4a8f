"""What a model directory says of its scores: `reward.toml`, or else its architecture. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plaudit.config.reward import RewardTable, parse_reward, read_reward_toml
from plaudit.errors import ConfigError
from plaudit.models.catalog import CONFIG, resolve
from plaudit.models.safety import read_json

REWARD_TOML = "reward.toml"
VALUE_HEAD = "value_head.safetensors"


def complete(tree: Mapping[str, Any], source: str) -> RewardTable:
    """The reward that `tree` means. What it leaves out about a model, the model's directory may say."""
    if "path" not in tree or tree.get("kind", "outcome") not in ("outcome", "process"):
        return parse_reward(tree, source)
    directory = resolve(str(tree["path"]))
    file = directory / REWARD_TOML
    own = read_reward_toml(file) if file.is_file() else {}
    if own and tree.get("kind", own.get("kind")) == own.get("kind"):
        return parse_reward(_over(own, tree), source)
    return parse_reward(tree if "kind" in tree else {**tree, "kind": _kind(directory, tree)}, source)


def _over(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` laid over `own`; of a format, key by key."""
    merged = {**own, **given}
    if isinstance(own.get("format"), Mapping) and isinstance(given.get("format"), Mapping):
        merged["format"] = {**own["format"], **given["format"]}
    return merged


def _kind(directory: Path, tree: Mapping[str, Any]) -> str:
    if (directory / VALUE_HEAD).is_file() or "format" in tree:
        return "process"
    name = str((read_json(directory / CONFIG).get("architectures") or [None])[0])
    if name.endswith("ForSequenceClassification"):
        return "outcome"
    if name.endswith("ForTokenClassification"):
        return "process"
    raise ConfigError(
        f"{directory} holds {name}, which does not say how it scores; a causal LM that judges steps needs "
        'kind = "process" and a format, for instance format = "math-shepherd"'
    )
