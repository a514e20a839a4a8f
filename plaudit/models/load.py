"""Loads models from local directories after checking config, code, weights and tokenizer, in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from plaudit.errors import ModelError, nearest, one_line
from plaudit.models import catalog, weights
from plaudit.models.dtypes import DTYPES
from plaudit.models.formats.quantised import read_model
from plaudit.models.fresh import LABELS, init_head, seeded, set_pad
from plaudit.models.gpu import check_device
from plaudit.models.heads import openrlhf_head
from plaudit.models.heads.mlp_head import Qwen2ForProcessRewardModel, Qwen2ForRewardModel
from plaudit.models.heads.value_head import HEAD, ValueModel, check_head
from plaudit.models.quiet import quiet
from plaudit.models.safety import read_json, refuse_adapter, refuse_code
from plaudit.models.text import load_tokenizer

Kind = Literal["policy", "reward", "steps", "value"]
AUTO: dict[str, Any] = {
    "policy": AutoModelForCausalLM,
    "reward": AutoModelForSequenceClassification,
    "steps": AutoModelForTokenClassification,
    "value": AutoModel,
}
# Known architectures that transformers lacks; None: a transformers class fits.
OURS: dict[str, tuple[Kind, Any]] = {
    openrlhf_head.ARCHITECTURE: ("reward", None),
    "Qwen2ForRewardModel": ("reward", Qwen2ForRewardModel),
    "Qwen2ForProcessRewardModel": ("steps", Qwen2ForProcessRewardModel),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module in eval mode and the tokenizer it was saved with. `module.config.pad_token_id` is the tokenizer's."""

    module: nn.Module
    tokenizer: PreTrainedTokenizerFast
    path: Path
    kind: Kind


def choose_device(device: str) -> str:
    """Resolve `auto` to the GPU if there is one."""
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def load_policy(path: str | Path, dtype: str = "float32", device: str = "cpu") -> Loaded:
    return _load(catalog.resolve(path), "policy", dtype, device)


def load_reward(
    path: str | Path, dtype: str = "float32", device: str = "cpu", *, labels: int | None = 1, fresh_head: bool = False,
    seed: int = 0,
) -> Loaded:  # fmt: skip
    """Load a sequence classifier with `labels` outputs (None: as saved).

    `fresh_head` allows a directory without such a head, a causal LM for instance, and adds a new head to its trunk.
    """
    return _load(catalog.resolve(path), "reward", dtype, device, labels, fresh_head, seed)


def load_steps(
    path: str | Path, dtype: str = "float32", device: str = "cpu", *, labels: int | None = 2, fresh_head: bool = False,
    seed: int = 0,
) -> Loaded:  # fmt: skip
    """Load a token classifier; `labels` and `fresh_head` as for `load_reward`."""
    return _load(catalog.resolve(path), "steps", dtype, device, labels, fresh_head, seed)


def load_value(
    path: str | Path, dtype: str = "float32", device: str = "cpu", *, fresh_head: bool = False, seed: int = 0
) -> Loaded:
    """Load a trunk with a per-token scalar head; `fresh_head` as for `load_reward`."""
    return _load(catalog.resolve(path), "value", dtype, device, None, fresh_head, seed)


def load_any(path: str | Path, dtype: str = "float32", device: str = "cpu") -> Loaded:
    """Load a model of any kind, by the architecture in its config."""
    directory = catalog.resolve(path)
    return _load(directory, kind_of(directory), dtype, device)


def kind_of(directory: Path) -> Kind:
    if (directory / HEAD).is_file():
        return "value"
    name = _architecture(directory)
    if name in OURS:
        return OURS[name][0]
    if name.endswith("ForSequenceClassification"):
        return "reward"
    if name.endswith("ForTokenClassification"):
        return "steps"
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or _multimodal(name):
        return "policy"
    raise ModelError(
        f"{directory / catalog.CONFIG} names the architecture {name!r}; expected a transformers class ...ForCausalLM, "
        "...ForSequenceClassification or ...ForTokenClassification, for instance LlamaForCausalLM"
    )


def _multimodal(name: str) -> bool:
    """Whether the policy is multimodal; it is loaded whole and gets text only."""
    both = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    return name not in both[0] and name in both[1]


def _class_of(directory: Path, kind: Kind) -> Any:
    """Return the class that loads a directory with a model of this kind."""
    name = _architecture(directory)
    ours = OURS.get(name, (None, None))[1]
    return ours or (AutoModelForImageTextToText if kind == "policy" and _multimodal(name) else AUTO[kind])


def _openrlhf_head(stored: Mapping[str, weights.Readable]) -> str:
    return openrlhf_head.stored_head({name: at.shape for name, at in stored.items()})


def _architecture(directory: Path) -> str:
    return str((read_json(directory / catalog.CONFIG).get("architectures") or [None])[0])


@dataclass(frozen=True, slots=True)
class Examined:
    """A directory that passed every check, before its weights are read. The module is on the meta device."""

    module: nn.Module
    stored: dict[str, weights.Readable]
    tokenizer: PreTrainedTokenizerFast
    config: Any
    kind: Kind

    @property
    def plain(self) -> bool:
        return all(isinstance(at, weights.Stored) for at in self.stored.values())


def examine(directory: Path, dtype: str, device: str) -> Examined:
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    check_device(device)
    refuse_code(directory)
    refuse_adapter(directory)
    stored = read_model(directory)
    kind = kind_of(directory)
    config = _read_config(directory)
    model_class = _class_of(directory, kind)
    if hasattr(model_class, "labels"):
        config.num_labels = model_class.labels  # their config leaves it out
    if _architecture(directory) == openrlhf_head.ARCHITECTURE:
        config.num_labels = 1
        stored = openrlhf_head.renamed_head(stored, _openrlhf_head(stored))
    module = _check_weights(directory, kind, config, stored, model_class)
    tokenizer = load_tokenizer(directory)
    _check_vocabulary(directory, tokenizer, config)
    return Examined(module, stored, tokenizer, config, kind)


def _load(
    directory: Path, kind: Kind, dtype: str, device: str, labels: int | None = None, fresh_head: bool = False,
    seed: int = 0,
) -> Loaded:  # fmt: skip
    seen = examine(directory, dtype, device)
    config, tokenizer, stored_kind = seen.config, seen.tokenizer, seen.kind
    if stored_kind != kind and not (fresh_head and kind != "policy"):
        raise ModelError(wrong_kind(directory, stored_kind, kind))
    if kind in LABELS:
        choose_labels(
            directory, config, stored_kind == kind, LABELS[kind] if stored_kind != kind and labels is None else labels
        )
    model_class = _class_of(directory, kind) if stored_kind == kind else AUTO[kind]
    module = _build(seen, directory, kind, model_class, dtype, new_head=stored_kind != kind, seed=seed)
    set_pad(module, tokenizer.pad_token_id)
    return Loaded(_to_device(module.eval(), device), tokenizer, directory, kind)


def wrong_kind(directory: Path, stored_kind: Kind, kind: Kind) -> str:
    problem = f"{directory} contains a {stored_kind} model, expected a {kind} model"
    if kind == "policy":
        return f"{problem}; give the directory of a causal language model"
    return f"{problem}; train one from it (`plaudit train`), or pass fresh_head=True to start from an untrained head"


def _read_config(directory: Path) -> Any:
    try:
        with quiet():
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{directory / catalog.CONFIG} is not a config that transformers accepts: {one_line(error)}"
        ) from error
    vars(config).pop("quantization_config", None)  # weights are read plain (quantised.py), and saved so
    return config


def _check_weights(
    directory: Path, kind: Kind, config: Any, stored: dict[str, weights.Readable], model_class: Any
) -> nn.Module:  # fmt: skip
    """Return the module for the weights, on the meta device."""
    try:
        with quiet(), seeded(0), torch.device("meta"):
            bare = _bare(model_class, config)
    except Exception as error:
        raise ModelError(f"{directory}: transformers cannot build a {kind} model of it: {one_line(error)}") from error
    weights.check_names(bare, stored, directory)
    if kind == "value":
        check_head(directory, config.hidden_size)
    module: nn.Module = bare
    return module


def _bare(model_class: Any, config: Any) -> Any:
    """A module of a class of transformers or of ours."""
    auto = hasattr(model_class, "from_config")
    return model_class.from_config(config, trust_remote_code=False) if auto else model_class(config)


def _check_vocabulary(directory: Path, tokenizer: PreTrainedTokenizerFast, config: Any) -> None:
    highest = max(tokenizer.get_vocab().values(), default=-1)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if rows is None:
        raise ModelError(f"{directory}: its config has no vocab_size; Plaudit runs token models only")
    if highest >= rows:
        raise ModelError(
            f"{directory}: the tokenizer has ids up to {highest}, the model embeds {rows} (0 to {rows - 1}); "
            "they are of different models: copy the right tokenizer files"
        )


def choose_labels(directory: Path, config: Any, saved: bool, labels: int | None) -> None:
    if saved and labels is not None and config.num_labels != labels:
        raise ModelError(
            f"{directory} scores {config.num_labels} labels, expected {labels}; "
            f"pass labels={config.num_labels} to use them"
        )
    if not saved:
        config.num_labels = labels
        config.classifier_dropout = 0.0


def _build(
    seen: Examined, directory: Path, kind: Kind, model_class: Any, dtype: str, *, new_head: bool, seed: int
) -> nn.Module:
    config, state = seen.config, None
    source: Path | None = directory
    try:
        if not seen.plain:  # transformers would not read plain weights: they are read here
            source, state = None, {name: at.read() for name, at in seen.stored.items()}
            with quiet(), torch.device("meta"):
                bare = _bare(model_class, config)
            model_class, config = type(bare), bare.config
        with quiet(), seeded(seed):
            module, report = model_class.from_pretrained(
                source, state_dict=state, config=config, dtype=DTYPES[dtype], local_files_only=True,
                trust_remote_code=False, use_safetensors=True, output_loading_info=True,
                key_mapping=_key_mapping(directory),
                # A stored head of another kind may have the new head's name and another shape: its shape is ignored.
                ignore_mismatched_sizes=new_head,
            )  # fmt: skip
    except Exception as error:
        raise ModelError(f"cannot load {directory}: {one_line(error)}") from error
    heads = heads_of(module) if new_head and kind != "value" else {}
    lost = sorted(name for name in report["missing_keys"] if name.split(".")[0] not in heads)
    if lost:
        raise ModelError(f"{directory} lacks tensor {lost[0]!r}; its weights do not belong to its config.json")
    for head in heads.values():
        init_head(head, config, seed)
    return _value_model(module, directory, new_head, seed) if kind == "value" else module


def _key_mapping(directory: Path) -> dict[str, str] | None:
    """Names in the files to those of the module, for from_pretrained."""
    if _architecture(directory) != openrlhf_head.ARCHITECTURE:
        return None
    return {rf"^{_openrlhf_head(weights.read_directory(directory))}\.": f"{openrlhf_head.HEAD}."}


def heads_of(module: nn.Module) -> dict[str, nn.Module]:
    """All but the trunk, by name."""
    return {name: child for name, child in module.named_children() if name != module.base_model_prefix}


def _value_model(trunk: nn.Module, directory: Path, new_head: bool, seed: int) -> ValueModel:
    module = ValueModel(trunk)
    if new_head:
        init_head(module.score, module.config, seed)
    else:
        module.load_head(directory)
    return module


def _to_device(module: nn.Module, device: str) -> nn.Module:
    try:
        return module.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"cannot put the model on device {device!r}: {one_line(error)}") from error
