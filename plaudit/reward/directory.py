"""How a model directory is scored: from its `reward.toml`, otherwise from its architecture. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plaudit.config.reward import RewardTable, parse_reward, read_reward_toml
from plaudit.errors import ConfigError
from plaudit.models.catalog import CONFIG, resolve
from plaudit.models.heads import openrlhf_head
from plaudit.models.safety import read_json

REWARD_TOML = "reward.toml"
VALUE_HEAD = "value_head.safetensors"
CAUSAL = ("ForCausalLM", "LMHeadModel")
BY_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "ForSequenceClassification": {"kind": "outcome"},
    "ForTokenClassification": {"kind": "process"},
    "Qwen2ForRewardModel": {"kind": "outcome"},
    "Qwen2ForProcessRewardModel": {"kind": "process", "format": "qwen2.5-math-prm"},
}


def complete(tree: Mapping[str, Any], source: str) -> RewardTable:
    """The reward table for `tree`, completed with what the model's directory specifies."""
    if "path" not in tree or tree.get("kind", "outcome") not in ("outcome", "process"):
        return parse_reward(tree, source)
    directory = resolve(str(tree["path"]))
    own = _own(directory)
    if not own and "kind" not in tree:
        if "format" not in tree:
            raise ConfigError(
                f"{directory} has {_architecture(directory)}, which does not define a score; a causal LM that "
                'scores steps needs kind = "process" and a format, for example format = "math-shepherd"'
            )
        own = {"kind": "process"}
    same = tree.get("kind", own.get("kind")) == own.get("kind")
    return parse_reward(_over(own, tree) if same else tree, source)


def only_predicts(path: str) -> bool:
    """Whether a directory has a causal LM and no reward.toml that defines a score."""
    directory = resolve(path)
    return not _own(directory) and _architecture(directory).endswith(CAUSAL)


def _own(directory: Path) -> dict[str, Any]:
    """The settings in the directory; empty for a causal LM."""
    file = directory / REWARD_TOML
    if file.is_file():
        return read_reward_toml(file)
    if (directory / VALUE_HEAD).is_file():
        return {"kind": "process"}
    name = _architecture(directory)
    if name == openrlhf_head.ARCHITECTURE:
        return {"kind": "outcome", **openrlhf_head.standardisation(read_json(directory / CONFIG))}
    return next((keys for suffix, keys in BY_ARCHITECTURE.items() if name.endswith(suffix)), {})


def _architecture(directory: Path) -> str:
    return str((read_json(directory / CONFIG).get("architectures") or [None])[0])


def _over(own: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`given` merged over `own`; a format is merged key by key."""
    merged = {**own, **overrides}
    if isinstance(own.get("format"), Mapping) and isinstance(overrides.get("format"), Mapping):
        merged["format"] = {**own["format"], **overrides["format"]}
    return merged
