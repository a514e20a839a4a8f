"""What a directory with weights contains, whatever its layout: the same tensors in one file or in shards are equal.

A set of tensors is named by the file that a single process would write: model-00001-of-00002.safetensors,
model-00002-of-00002.safetensors and model.safetensors.index.json are the set model.safetensors. Its hash is the SHA-256
of one line per tensor, in order of their names:

    NAME DTYPE SHAPE SHA-256-OF-ITS-BYTES        model.norm.weight F32 [576] 9b7f…

with the dtype and the shape of the safetensors header ([2,3]; [] for a scalar).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.errors import ModelError
from plaudit.models.weights import BITS, Stored, read_header, read_stem

PIECE = 1 << 23
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Content:
    """The files under a directory, by their paths in it; those of weights also by set."""

    directory: Path
    files: Mapping[str, Path]
    sets: Mapping[str, Mapping[str, Stored]]

    @classmethod
    def of(cls, directory: Path) -> Content:
        """ModelError if a file of weights is damaged, or belongs to no set."""
        files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
        names = sorted({set_of(name) for name in files} - {None}, key=str)
        sets = {str(name): read_stem(directory / str(name)) for name in names}
        used = {at.file for tensors in sets.values() for at in tensors.values()}
        used |= {directory / f"{name}.index.json" for name in sets if name not in files} | {directory / n for n in sets}
        for name, path in files.items():
            if set_of(name) is not None and path not in used:
                raise ModelError(f"{path} is not among the files of {set_of(name)}: remove it, or copy them again")
        return cls(directory, files, sets)

    def others(self) -> dict[str, Path]:
        """The files besides weights."""
        return {name: path for name, path in self.files.items() if set_of(name) is None}


@dataclass(frozen=True, slots=True)
class Digest:
    """SHA-256 of every file, and of every set of tensors."""

    files: Mapping[str, str]
    tensors: Mapping[str, str]


def set_of(name: str) -> str | None:
    """The set to which a file of weights belongs; None for other files."""
    if name.endswith(_INDEX):
        return name.removesuffix(".index.json")
    stem, dot, suffix = name.rpartition(".")
    return f"{_SHARD.sub('', stem)}.safetensors" if dot and suffix == "safetensors" else None


def digest(directory: Path) -> Digest:
    """Hash all files and tensors, reading each file once."""
    content = Content.of(directory)
    files: dict[str, str] = {}
    by_file: dict[Path, dict[str, str]] = {}
    for name, path in content.files.items():
        files[name], by_file[path] = _hashes(path)
    tensors = {
        name: _of_set(stored, {each: by_file[at.file][each] for each, at in stored.items()})
        for name, stored in content.sets.items()
    }
    return Digest(files, tensors)


def tensors_digest(directory: Path) -> str:
    """The hash of the tensors of a model's own set."""
    return digest_set(read_stem(directory / "model.safetensors"))


def digest_set(stored: Mapping[str, Stored]) -> str:
    return _of_set(stored, {name: hashlib.sha256(_raw(at)).hexdigest() for name, at in stored.items()})


def difference(one: Path, other: Path, ignored: tuple[str, ...] = ()) -> str | None:
    """The first difference of two directories, named by the path in the first; None if they have the same files, and
    the same tensors in whatever layout."""
    a, b = Content.of(one), Content.of(other)
    for name in sorted({*a.sets, *b.sets}):
        if name not in a.sets or name not in b.sets:
            return _only(one / name, name in a.sets)
        if (found := _difference_of_sets(a.sets[name], b.sets[name])) is not None:
            return f"{one / name}: {found}"
    mine, theirs = a.others(), b.others()
    for name in sorted({*mine, *theirs} - {*ignored}):
        if name not in mine or name not in theirs:
            return _only(one / name, name in mine)
        if mine[name].read_bytes() != theirs[name].read_bytes():
            return f"{one / name} is not the recomputed file"
    return None


def _only(path: Path, here: bool) -> str:
    return f"{path} is not among the recomputed files" if here else f"{path} is missing"


def _difference_of_sets(one: Mapping[str, Stored], other: Mapping[str, Stored]) -> str | None:
    for name in sorted({*one, *other}):
        if name not in one:
            return f"tensor {name!r} is missing"
        if name not in other:
            return f"tensor {name!r} is not among the recomputed ones"
        a, b = one[name], other[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"tensor {name!r} is {a.dtype} {list(a.shape)}, recomputed {b.dtype} {list(b.shape)}"
        left, right = _raw(a), _raw(b)
        for begin in range(0, len(left), PIECE):
            unequal = left[begin : begin + PIECE] != right[begin : begin + PIECE]
            if unequal.any():
                at = (begin + int(unequal.argmax())) * 8 // BITS[a.dtype]
                return f"tensor {name!r} differs from the recomputed one, first in its element {at}"
    return None


def _raw(at: Stored) -> Any:
    size = prod(at.shape) * BITS[at.dtype] // 8
    return np.memmap(at.file, np.uint8, "r", at.begin, (size,)) if size else np.empty(0, np.uint8)


def _hashes(path: Path) -> tuple[str, dict[str, str]]:
    """The hash of a file and, if it has tensors, of the bytes of each."""
    tensors: dict[str, str] = {}
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return hashlib.file_digest(file, "sha256").hexdigest(), tensors
        whole = hashlib.sha256()
        for name, at in sorted(read_header(path).items(), key=lambda pair: pair[1].begin):
            whole.update(file.read(at.begin - file.tell()))
            left, one = prod(at.shape) * BITS[at.dtype] // 8, hashlib.sha256()
            while left:
                piece = file.read(min(left, PIECE))
                if not piece:
                    raise ModelError(f"{path} became shorter while it was read")
                whole.update(piece)
                one.update(piece)
                left -= len(piece)
            tensors[name] = one.hexdigest()
        whole.update(file.read())
    return whole.hexdigest(), tensors


def _of_set(stored: Mapping[str, Stored], hashes: Mapping[str, str]) -> str:
    lines = hashlib.sha256()
    for name, at in sorted(stored.items()):
        shape = ",".join(map(str, at.shape))
        lines.update(f"{name} {at.dtype} [{shape}] {hashes[name]}\n".encode())
    return lines.hexdigest()
