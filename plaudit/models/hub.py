"""Hugging Face hub models: `plaudit pull` downloads one, and its name then refers to the copy in the cache.

Nothing else connects to the hub: a name in a recipe or a request is only looked up in the cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from plaudit.errors import ModelError

NAME = re.compile(r"[\w][\w.-]*/[\w.-]+(@[\w./-]+)?")
FILES = ("*.json", "*.safetensors", "*.jinja", "*.toml", "tokenizer.model", "merges.txt", "vocab.txt")


def is_hub_name(name: str) -> bool:
    """organisation/model, with @revision (a branch, a tag or a commit) or without."""
    return NAME.fullmatch(name) is not None and ".." not in name


def cached(name: str) -> Path | None:
    """Return the directory of a downloaded model, or None."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _snapshot(name, local=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def pull(name: str) -> Path:
    """Download a model's changed files, and return its directory in the cache of `huggingface_hub`."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if not is_hub_name(name):
        raise ModelError(f"{name!r} is not a hub model name; expected organisation/model or organisation/model@tag")
    repository, _, revision = name.partition("@")
    try:
        directory = _snapshot(name, local=False)
    except RevisionNotFoundError:
        raise ModelError(f"{repository} has no revision {revision or 'main'!r}") from None
    except GatedRepoError:
        raise ModelError(f"{repository} is gated: accept its terms on its page, then set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(f"the hub has no {repository}, or it is private: check the name, or set HF_TOKEN") from None
    except HFValidationError as error:
        raise ModelError(f"{name!r} is not a hub model name: {_line(error)}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{name} cannot be downloaded: {_line(error.__cause__ or error)}; without a network, copy its directory "
            "here and give the path"
        ) from None
    if not list(directory.glob("*.safetensors")):
        raise ModelError(f"{name} has no .safetensors file; pickled weights are not read")
    return directory


def _snapshot(name: str, *, local: bool) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    home = os.environ.get("HF_HOME")
    cache = os.environ.get("HF_HUB_CACHE") or (str(Path(home) / "hub") if home else None)
    return Path(
        snapshot_download(
            repository, revision=revision or None, cache_dir=cache, local_files_only=local, allow_patterns=list(FILES),
            endpoint=os.environ.get("HF_ENDPOINT") or None,
        )
    )  # fmt: skip


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
