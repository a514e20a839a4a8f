"""The result of a trial, cached on disk: valid as long as the model's code, our code and the config are unchanged."""

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

# Config entries that do not affect a trial: a stand-in has its own weights, in float32.
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
    """refused   why the core cannot run the model, as the end of a sentence that begins with its name
    lean      whether the lean trunk may be used for it
    """

    refused: str | None
    lean: bool


def recall(key: str) -> Verdict | None:
    try:
        return Verdict(**json.loads((_home() / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # no file, or an incomplete one: the trial is run again
        return None


def keep(key: str, verdict: Verdict) -> None:
    try:
        _home().mkdir(parents=True, exist_ok=True)
        write_atomically(_home() / f"{key}.json", json.dumps(asdict(verdict)))
    except OSError:  # the disk is full or read-only: the next load runs the trial again
        return


def key_of(module: nn.Module, kind: str) -> str:
    """A hash of everything that a verdict depends on."""
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
    """A class and a hash of its source file; for torch the version is sufficient."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("torch."):
        return name
    try:
        return f"{name} {_digest(Path(inspect.getfile(kind)))}"
    except (TypeError, OSError):  # defined in an interactive session
        return name


@functools.cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def _our_code() -> str:
    core = Path(__file__).parents[1]
    return "".join(_digest(file) for file in sorted(core.rglob("*.py")))
