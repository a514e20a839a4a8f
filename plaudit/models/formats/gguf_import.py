"""Dequantises GGUF files into a plain Hugging Face directory."""

from __future__ import annotations

import io
import struct
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from plaudit.errors import ModelError, nearest, one_line
from plaudit.models.dtypes import DTYPES
from plaudit.models.fresh import seeded
from plaudit.models.quiet import quiet
from plaudit.models.saving import save

# Byte-level vocabularies that llama.cpp begins with the begin token where a file does not say it.
BEGINNING = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "chameleon",
)  # fmt: skip


def convert_gguf(
    gguf_path: str | Path, directory: str | Path, dtype: str = "float32"
) -> tuple[Path, list[int], list[int]]:
    """Write the model, its tokenizer and its chat template to `directory`. Also returns the tokens that by the file
    come before a text and behind it."""
    source = Path(gguf_path)
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    _check(source)
    options = {"gguf_file": source.name, "local_files_only": True, "trust_remote_code": False}
    try:
        # Not from_pretrained, which keeps the weights packed and may download kernels for them from a hub.
        with quiet(), seeded(0), redirect_stderr(io.StringIO()):
            config = AutoConfig.from_pretrained(source.parent, **options)
            module = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], trust_remote_code=False)
            _fill(module, source, DTYPES[dtype])
            tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    except Exception as error:
        raise ModelError(f"cannot import {source}: {one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token is None:
        raise ModelError(f"{source} has no usable tokenizer; import a file that has tokens and an eos token")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    bos, eos = _adds(source)
    tokenizer.add_bos_token, tokenizer.add_eos_token = bos, eos
    return save(module, tokenizer, directory), [tokenizer.bos_token_id] * bos, [tokenizer.eos_token_id] * eos


def _adds(source: Path) -> tuple[bool, bool]:
    """Whether the file's tokenizer begins a text with its begin token, and ends it with its end token. Where the file
    does not say it, by the rule of llama.cpp for its kind of vocabulary."""
    from gguf import GGUFReader

    fields = GGUFReader(source).fields

    def said(name: str) -> Any:
        field = fields.get(f"tokenizer.ggml.{name}")
        return None if field is None else field.contents()

    kind, bos, eos = said("model"), said("add_bos_token"), said("add_eos_token")
    if bos is None:
        bos = kind in ("llama", "bert") or (kind == "gpt2" and said("pre") in BEGINNING)
    return bool(bos), kind in ("bert", "t5") if eos is None else bool(eos)


def _fill(module: Any, source: Path, dtype: torch.dtype) -> None:
    checkpoint = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=module, torch_dtype=dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in checkpoint["tensors"].items()}
    report = module.load_state_dict(tensors, strict=False)
    lost = [*(set(report.missing_keys) - module.all_tied_weights_keys.keys()), *report.unexpected_keys]
    if lost:
        raise ModelError(f"tensor {min(lost)!r} is in the file or in the model, but not in both")


def _check(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    if start[:4] != b"GGUF":
        raise ModelError(f"{file} is not a GGUF file: it begins with {start[:4]!r}, expected b'GGUF'")
    if len(start) < 8 or struct.unpack("<I", start[4:])[0] not in (2, 3):
        raise ModelError(
            f"{file} has an unsupported GGUF version; expected 2 or 3: convert it again with a current llama.cpp"
        )
    _check_tensors(file)


def _check_tensors(file: Path) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("the package gguf is not installed; install it: pip install gguf") from error
    try:
        reader = GGUFReader(file)
    except Exception as error:
        raise ModelError(f"{file} is truncated or damaged ({one_line(error)}); copy it again") from error
    size = file.stat().st_size
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise ModelError(f"{file} is truncated: tensor {tensor.name!r} does not fit; copy it again")
