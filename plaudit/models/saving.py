"""Saves models atomically, so that plain transformers loads them bit-identically."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerFast

from plaudit.errors import StorageError, one_line
from plaudit.models.fresh import set_pad
from plaudit.models.quiet import quiet
from plaudit.output import sync

REWARD = "reward.toml"
OURS = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "vocab.*",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates",
    "spiece.model", REWARD, "README.md", ".gitattributes",
)  # fmt: skip
RENAME_EXCHANGE = 2
AT_FDCWD = -100


def save(
    module: nn.Module, tokenizer: PreTrainedTokenizerFast, directory: str | Path, *, reward: str | None = None
) -> Path:
    """Write config, safetensors and tokenizer to `directory`, replacing an existing model. `reward` is the text of its
    reward.toml, which describes how to read its scores."""
    new = Replacement.begin(directory)
    with new.guarded():
        _write(module, tokenizer, new.temporary)
        if reward is not None:
            (new.temporary / REWARD).write_text(reward, encoding="utf-8")
        new.finish()
    return new.target


@dataclass(frozen=True, slots=True)
class Replacement:
    """A temporary directory that replaces `target` atomically."""

    target: Path
    temporary: Path

    @classmethod
    def begin(cls, directory: str | Path) -> Replacement:
        target = Path(os.path.realpath(directory))
        _refuse_foreign(target)
        new = cls(target, target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.saving"))
        with new.guarded():
            target.parent.mkdir(parents=True, exist_ok=True)
            new.temporary.mkdir()
        return new

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Remove the temporary directory after any error."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(self.temporary, ignore_errors=True)
            if _is_storage(error):
                reason = (isinstance(error, OSError) and error.strerror) or one_line(error)
                raise StorageError(
                    f"cannot save {self.target}: {reason}; the previous content is intact: free disk space and try "
                    "again"
                ) from error
            raise

    def finish(self) -> None:
        _sync(self.temporary)
        _move(self.temporary, self.target)


def write_config(module: Any, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """A model's directory without its weights, as transformers writes it. The module may be on the meta device."""
    with quiet():
        set_pad(module, tokenizer.pad_token_id)
        module.config.architectures = [type(module).__name__]
        module.config.dtype = str(module.dtype).removeprefix("torch.")
        module.config.save_pretrained(directory)
        if module.can_generate():
            module.generation_config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _write(module: Any, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    with quiet():
        set_pad(module, tokenizer.pad_token_id)
        module.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    # safetensors makes its files readable by their owner alone; weights are as open as the config beside them.
    mode = (directory / "config.json").stat().st_mode & 0o777
    for weights in directory.glob("*.safetensors"):
        weights.chmod(mode)


def _refuse_foreign(target: Path) -> None:
    """Raise StorageError unless `target`, which is replaced entirely, contains only a model."""
    if not target.exists():
        return
    if not target.is_dir():
        raise StorageError(f"cannot save {target}: it is a file; give a directory")
    foreign = sorted(e.name for e in target.iterdir() if not any(fnmatch(e.name, pattern) for pattern in OURS))
    if foreign:
        raise StorageError(
            f"cannot save {target}: it holds {foreign[0]!r}, which is not part of a model; give an empty directory"
        )


def _is_storage(error: BaseException) -> bool:
    # The Rust writers of safetensors and tokenizers raise their own types, and name the errno in the text.
    return isinstance(error, OSError) or (isinstance(error, Exception) and "(os error " in str(error))


def _sync(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        sync(path)


def _move(temporary: Path, target: Path) -> None:
    if target.exists() and any(target.iterdir()):
        _exchange(temporary, target)
    else:
        temporary.replace(target)
    sync(target.parent)


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories in one step where the kernel can; elsewhere in two renames, undone if the second fails."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        swapped = renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE) == 0
    except AttributeError:
        swapped = False
    if swapped:
        shutil.rmtree(new, ignore_errors=True)
        return
    aside = new.with_suffix(".old")
    old.replace(aside)
    try:
        new.replace(old)
    except OSError:
        aside.replace(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)
