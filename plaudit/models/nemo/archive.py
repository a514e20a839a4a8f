"""`plaudit import FILE.nemo DIRECTORY`: converts a NeMo-Aligner reward model to a Hugging Face directory.

An archive is a tar (or a folder) of `model_config.yaml`, the weights and the tokenizer's files.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForSequenceClassification, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from plaudit.errors import ModelError, nearest, one_line
from plaudit.models.dtypes import DTYPES
from plaudit.models.fresh import seeded
from plaudit.models.imported import check_imported, set_ends
from plaudit.models.nemo.layout import converted
from plaudit.models.nemo.tensors import read_tensors
from plaudit.models.quiet import quiet
from plaudit.models.saving import save
from plaudit.models.text import added_ids, load_tokenizer, tokenizer_in

CONFIG = "model_config.yaml"
HEAD, BIAS = "rm_head.weight", "rm_head.bias"
REFERENCE = re.compile(r"^\$\{(?:\.|model\.)?(\w+)\}$")


def import_nemo(
    source: str | Path, directory: str | Path, dtype: str = "float32", tokenizer: str | None = None
) -> Path:
    """Write the model, its tokenizer (or that of the directory `tokenizer`) and its reward.toml to `directory`."""
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    with _unpacked(Path(source), Path(directory)) as folder:
        cfg = _config(folder)
        texts = _named_tokenizer(tokenizer) if tokenizer is not None else _tokenizer(folder, cfg)
        if tokenizer is None:  # NeMo encodes without special tokens; reward.toml says whether an end token follows
            set_ends(texts, False, False)
        stored = read_tensors(folder)
        head, bias = _head(stored, cfg)
        model_config, tensors = converted(cfg, {n: t for n, t in stored.items() if not n.endswith(BIAS)}, len(head))
    module = _filled(model_config, tensors, DTYPES[dtype])
    path = save(module, texts, directory, reward=_reward(cfg, bias))
    check_imported(path, *added_ids(texts))
    return path


@contextmanager
def _unpacked(source: Path, directory: Path) -> Iterator[Path]:
    """Yield the folder `source`, or the archive unpacked beside `directory`, whose disk has space for a model."""
    if source.is_dir():
        yield source
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".plaudit-nemo-", dir=directory.parent) as folder:
        try:
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")  # no absolute names, no links out, no devices
        except (OSError, tarfile.TarError) as error:
            raise ModelError(f"cannot unpack {source}: {one_line(error)}") from error
        yield Path(folder)


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG
    try:
        cfg = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ModelError(f"cannot read {CONFIG} of the archive: {one_line(error)}") from error
    if not isinstance(cfg, dict):
        raise ModelError(f"{CONFIG} contains a {type(cfg).__name__}, expected keys and values")
    for key, value in cfg.items():  # OmegaConf writes references to other keys as they are
        if isinstance(value, str) and (match := REFERENCE.match(value)):
            cfg[key] = cfg.get(match[1])
    if cfg.get("output_sequence"):
        raise ModelError(
            f"{CONFIG} has output_sequence: true, a critic with a value for every token, not a reward model"
        )
    return cfg


def _head(stored: Mapping[str, Tensor], cfg: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    heads = {name: tensor for name, tensor in stored.items() if name.endswith((HEAD, BIAS))}
    matrix = next((tensor for name, tensor in heads.items() if name.endswith(HEAD)), None)
    labels = (cfg.get("regression") or {}).get("num_attributes", 1)
    if matrix is None or matrix.dim() != 2 or len(matrix) != labels:
        shown = "none" if matrix is None else list(matrix.shape)
        raise ModelError(
            f"a reward model of NeMo-Aligner has {HEAD} with {labels} rows, the archive {shown}; "
            "a language model is converted with NeMo's own scripts"
        )
    bias = next((tensor for name, tensor in heads.items() if name.endswith(BIAS)), torch.zeros(labels))
    return matrix, bias.float()


def _filled(config: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    try:
        with quiet(), seeded(0), torch.device("meta"):
            module = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        module.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
    except Exception as error:
        raise ModelError(f"the archive's tensors do not fit its {CONFIG}: {one_line(error)}") from error
    return module


def _reward(cfg: Mapping[str, Any], bias: Tensor) -> str:
    """How NeMo-Aligner's server makes a score of the head's outputs."""
    labels = [f"LABEL_{at}" for at in range(len(bias))]
    lines = ['kind = "outcome"', f'pool = "{"mean" if cfg.get("use_avg_pool") else "last"}"']
    lines.append(f"end = {str(bool((cfg.get('data') or {}).get('append_eod', False))).lower()}")
    pairs = zip(labels, bias.tolist(), strict=True)
    lines.append("bias = { " + ", ".join(f"{label} = {value!r}" for label, value in pairs) + " }")
    if len(labels) > 1:
        weights = (cfg.get("regression") or {}).get("attribute_weights") or [1 / len(labels)] * len(labels)
        if len(weights) != len(labels):
            raise ModelError(f"{CONFIG} has {len(weights)} attribute_weights for {len(labels)} attributes")
        shown = (f"{label} = {float(weight)!r}" for label, weight in zip(labels, weights, strict=True))
        lines.append("weights = { " + ", ".join(shown) + " }")
    standard = cfg.get("reward_standardization") or {}
    if standard.get("enable"):
        mean, std = float(standard.get("mean", 0.0)), float(standard.get("std", 1.0))
        lines.append(f"standardise = {{ mean = {mean!r}, std = {std!r} }}")
    return "\n".join(lines) + "\n"


def _named_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Of a directory with a tokenizer's files alone, or of whatever else names a model."""
    path = Path(name).expanduser()
    return tokenizer_in(path) if (path / "tokenizer_config.json").is_file() else load_tokenizer(name)


def _tokenizer(folder: Path, cfg: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    about = cfg.get("tokenizer") or {}
    cure = "give the directory of one that fits: --tokenizer DIRECTORY"
    files = {key: _artifact(folder, about.get(key)) for key in ("model", "vocab_file", "merge_file")}
    library, kind = about.get("library"), about.get("type")
    try:
        with quiet():
            if files["vocab_file"] is not None and files["merge_file"] is not None:
                tokenizer: Any = GPT2Tokenizer(str(files["vocab_file"]), str(files["merge_file"]))
            elif files["model"] is not None and (library == "sentencepiece" or kind == "GPTSentencePieceTokenizer"):
                tokenizer = _sentencepiece(files["model"])
            else:
                raise ModelError(
                    f"the archive uses the tokenizer {kind!r} of {library!r} and does not contain its files; {cure}"
                )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"cannot make a tokenizer of the archive's files ({one_line(error)[:160]}); {cure}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _artifact(folder: Path, value: Any) -> Path | None:
    """`nemo:NAME` is a file of the archive."""
    name = str(value or "").removeprefix("nemo:")
    return folder / name if name and Path(name).name == name and (folder / name).is_file() else None


def _sentencepiece(model: Path) -> Any:
    with tempfile.TemporaryDirectory() as folder:  # transformers knows the file by its name
        shutil.copyfile(model, Path(folder) / "tokenizer.model")
        return LlamaTokenizer.from_pretrained(folder, local_files_only=True)
