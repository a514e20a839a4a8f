"""manifest.json: what a finished run delivers, in one file that anyone can check without the run.

files        SHA-256 of every file of final/, as `sha256sum` prints it
tensors      SHA-256 of every set of tensors in it, whatever its layout (models/digest.py)
chain        the end of the chain of hashes in the run's log, and with it all steps
recipe       SHA-256 of recipe.toml
summary      SHA-256 of summary.json
checkpoints  SHA-256 of the manifest of each, which has those of its files
evaluation   held-out figures before and after training
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plaudit import __version__
from plaudit.errors import ModelError, RunError
from plaudit.models.digest import digest, set_of
from plaudit.output import write_atomically
from plaudit.train.run.checkpoint import sha256
from plaudit.train.run.run import Run

NAME = "manifest.json"


def write_manifest(run: Run, source: str, chain: str, summary: Mapping[str, Any]) -> None:
    content = digest(run.final)
    checkpoints = run.checkpoints
    tree = {
        "plaudit": __version__,
        "task": summary["task"],
        "steps": summary["steps"],
        "source": source,
        "evaluation": {name: value for name, value in summary.items() if name.endswith(("_before", "_after"))},
        "chain": chain,
        "recipe": sha256(run.directory / "recipe.toml"),
        "summary": sha256(run.directory / "summary.json"),
        "checkpoints": {name: sha256(checkpoints.directory / name / "manifest.json") for name in checkpoints.names()},
        "tensors": content.tensors,
        "files": content.files,
    }
    write_atomically(run.directory / NAME, json.dumps(tree, indent=1) + "\n")


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: give the manifest.json of a finished run") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as a manifest: {error}") from None
    tables = ("files", "tensors", "checkpoints")
    if not isinstance(tree, dict) or any(not isinstance(tree.get(name), dict) for name in tables):
        raise RunError(f"{path} is not a manifest: expected a JSON object with {', '.join(tables)}")
    return tree


def first_change(manifest: Mapping[str, Any], model: Path) -> str | None:
    """The first file under `model` that is not as in the manifest; None if all are. Weights may have another layout."""
    if not model.is_dir():
        return f"{model} is missing"
    try:
        found = digest(model)
    except (ModelError, OSError) as error:
        return str(error)
    for name in sorted({*manifest["tensors"], *found.tensors}):
        if (problem := _compare(model / name, manifest["tensors"].get(name), found.tensors.get(name))) is not None:
            return problem
    others = {name for name in (*manifest["files"], *found.files) if set_of(name) is None}
    for name in sorted(others):
        if (problem := _compare(model / name, manifest["files"].get(name), found.files.get(name))) is not None:
            return problem
    return None


def _compare(path: Path, expected: str | None, actual: str | None) -> str | None:
    if expected == actual:
        return None
    if actual is None:
        return f"{path} is missing"
    if expected is None:
        return f"{path} is not in the manifest"
    what = "its tensors have" if path.suffix == ".safetensors" else "it has"
    return f"{path} was changed: {what} SHA-256 {actual[:16]}, the manifest {expected[:16]}"
