"""What a trial has found, kept on disk: it holds for as long as the model's code, ours and the config stay the same."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from plaudit.output import write_atomically

# Of a config, what no trial depends on: a stand-in has its own weights, in float32.
IDLE = {
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "quantization_config",
    "transformers_version",
}


@dataclass(frozen=True)
class Verdict:
    """refused   why the core cannot run the model; the end of a sentence that begins with its name
    lean      whether the lean trunk may be used for it
    """

    refused: str | None
    lean: bool


def recall(key: str) -> Verdict | None:
    try:
        return Verdict(**json.loads((_home() / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none yet, or half a file: the trial is run again
        return None


def keep(key: str, verdict: Verdict) -> None:
    try:
        _home().mkdir(parents=True, exist_ok=True)
        write_atomically(_home() / f"{key}.json", json.dumps(asdict(verdict)))
    except OSError:  # a disk that is full or read-only: the next load runs the trial again
        return


def key_of(module: nn.Module, kind: str) -> str:
    """Of everything that a verdict depends on."""
    code = sorted({_code(type(part)) for part in module.modules()})  # type: ignore[arg-type]
    facts = [
        kind, type(module).__qualname__, torch.__version__, transformers.__version__, sys.version, platform.machine(),
        _device(next(module.parameters()).device), _our_code(), *code, _config(module),
    ]  # fmt: skip
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plaudit" / "trials"


def _config(module: nn.Module) -> str:
    config: Any = module.config
    return json.dumps({n: v for n, v in config.to_dict().items() if n not in IDLE}, sort_keys=True, default=str)


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def _code(kind: type) -> str:
    """A class and the file it comes from; of torch the version is enough."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("torch."):
        return name
    try:
        return f"{name} {_digest(Path(inspect.getfile(kind)))}"
    except (TypeError, OSError):  # made in an interactive session
        return name


@functools.cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def _our_code() -> str:
    core = Path(__file__).parents[1]
    return "".join(_digest(file) for file in sorted(core.rglob("*.py")))
