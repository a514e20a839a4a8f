"""Safety checks of model directories. Only JSON is read; nothing is imported or unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plaudit.errors import ModelError, UnsafeModel

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
KERNEL_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON ({error}); copy the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} contains a {type(content).__name__}, expected a JSON object; copy the model again")
    return content


def refuse_code(directory: Path) -> None:
    """Raise UnsafeModel if loading the directory with transformers could run its code."""
    for name in ("config.json", "tokenizer_config.json"):
        file = directory / name
        if not file.is_file():
            continue
        for key, value in _pairs(read_json(file)):
            if key == "auto_map":
                raise UnsafeModel(
                    f"{file} requests custom code (auto_map: {str(value)[:80]}), which Plaudit does not run: "
                    "if transformers knows this model type, delete auto_map from the file"
                )
            if key in KERNEL_KEYS and isinstance(value, str) and "/" in value:
                raise UnsafeModel(
                    f"{file} requests downloaded kernels ({key}: {value[:80]!r}); delete {key} from the file"
                )


def refuse_adapter(directory: Path) -> None:
    if (directory / "adapter_model.bin").is_file():
        raise UnsafeModel(
            f"{directory} contains adapter_model.bin, a pickle, which can run code; merge the adapter elsewhere"
        )
    if (directory / "adapter_config.json").is_file():
        raise ModelError(f"{directory} is an adapter, not a whole model; merge it into its base model and save that")


def pickles(directory: Path) -> list[str]:
    return sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _pairs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _pairs(item)
