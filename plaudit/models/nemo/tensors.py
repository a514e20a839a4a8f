"""Reads the tensors of an unpacked archive, by their Megatron names, and nothing else.

Three layouts have been written: `model_weights/` of megatron-core in its zarr format (a folder of chunks for each
tensor) or in PyTorch's distributed format (`.metadata` and `*.distcp`), and one `model_weights.ckpt` of torch.save.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plaudit.errors import ModelError, UnsafeModel, one_line
from plaudit.models.nemo.opcodes import Record, read_index
from plaudit.models.safety import read_json

WEIGHTS, CHECKPOINT, INDEX = "model_weights", "model_weights.ckpt", ".metadata"
ZARR_TYPES: dict[str, Any] = {
    "<f4": np.dtype("<f4"),
    "<f2": np.dtype("<f2"),
    "<f8": np.dtype("<f8"),
    "bfloat16": np.dtype("<i2"),
}
CURE = "copy the archive again"


def read_tensors(directory: Path) -> dict[str, Tensor]:
    weights = directory / WEIGHTS
    if (directory / CHECKPOINT).is_file():
        return _read_checkpoint(directory / CHECKPOINT)
    if (weights / "metadata.json").is_file():
        backend = read_json(weights / "metadata.json").get("sharded_backend")
        if backend == "zarr":
            return _read_zarr(weights)
        if backend == "torch_dist":
            return _read_distributed(weights)
        raise ModelError(f"{weights} is a checkpoint of the format {backend!r}; known: zarr, torch_dist")
    if any(directory.glob("*p_rank_*")):
        raise ModelError(
            f"{directory} contains a file for every model-parallel rank; restore it with NeMo and save it again, which "
            f"gives {WEIGHTS}/"
        )
    raise ModelError(f"no weights in {directory}: looked for {WEIGHTS}/metadata.json and {CHECKPOINT}")


def _is_state(name: str) -> bool:
    """Scales of FP8, which reward models do not use and which are pickles."""
    return "_extra_state" in name


def _read_checkpoint(file: Path) -> dict[str, Tensor]:
    tree = _load(file, file)
    if not isinstance(tree, Mapping):
        raise ModelError(f"{file} contains a {type(tree).__name__}, expected tensors by name")
    tensors = {str(name): value for name, value in tree.items() if not _is_state(str(name))}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ModelError(f"{file}: {name!r} is a {type(value).__name__}, expected a tensor")
    return tensors


def _load(stored: Path | io.BytesIO, file: Path) -> Any:
    try:
        # BytesIO, because that is how the states above are stored; they are left out afterwards.
        with torch.serialization.safe_globals([io.BytesIO]):
            return torch.load(stored, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UnsafeModel(
            f"{file} contains more than tensors, or is damaged ({one_line(error)[:160]}); nothing of it was run"
        ) from error


def _read_zarr(directory: Path) -> dict[str, Tensor]:
    return {
        folder.name: _read_array(folder)
        for folder in sorted(directory.iterdir())
        if (folder / ".zarray").is_file() and not _is_state(folder.name)
    }


def _read_array(folder: Path) -> Tensor:
    about = read_json(folder / ".zarray")
    shape: Any = about.get("shape")
    chunks: Any = about.get("chunks")
    dtype: Any = about.get("dtype")
    if not _is_shape(shape) or not _is_shape(chunks) or len(shape) != len(chunks) or 0 in chunks:
        raise ModelError(f"{folder}: shape {shape} in chunks of {chunks} is not that of a tensor; {CURE}")
    plain = about.get("compressor") is None and not about.get("filters") and about.get("order") == "C"
    if about.get("zarr_format") != 2 or not plain or dtype not in ZARR_TYPES:
        raise ModelError(f"{folder} is not what megatron-core writes: zarr 2, uncompressed, one of {list(ZARR_TYPES)}")
    kind = ZARR_TYPES[dtype]
    size = math.prod(chunks) * kind.itemsize
    places = list(itertools.product(*(range(-(-whole // part)) for whole, part in zip(shape, chunks, strict=True))))
    files = [folder / ".".join(map(str, place)) for place in places]
    for file in files:  # before anything as large as the shape says is allocated
        if not file.is_file() or file.stat().st_size != size:
            raise ModelError(f"{file} is missing or has not {size} bytes, a chunk of {chunks} {dtype}; {CURE}")
    array = np.empty(shape, kind)
    for place, file in zip(places, files, strict=True):
        begin = [at * part for at, part in zip(place, chunks, strict=True)]
        end = [min(at + part, whole) for at, part, whole in zip(begin, chunks, shape, strict=True)]
        inner = tuple(slice(stop - start) for start, stop in zip(begin, end, strict=True))
        outer = tuple(slice(start, stop) for start, stop in zip(begin, end, strict=True))
        array[outer] = np.frombuffer(file.read_bytes(), kind).reshape(chunks)[inner]
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(size) is int and size >= 0 for size in value)


def _read_distributed(directory: Path) -> dict[str, Tensor]:
    index = directory / INDEX
    try:
        tree = read_index(index.read_bytes(), str(index))
        tensors = tree.state["state_dict_metadata"]
        pieces: dict[str, list[tuple[tuple[int, ...], Mapping[str, Any]]]] = {}
        for key, place in tree.state["storage_data"].items():
            if (offset := key.state.get("offset")) is not None:  # bytes have none
                pieces.setdefault(key.state["fqn"], []).append((_size(offset), place.state))
        return {
            name: _assembled(directory, name, _size(about.state["size"]), pieces[name])
            for name, about in tensors.items()
            if not _is_state(name) and about.name.endswith(".TensorStorageMetadata")
        }
    except OSError as error:
        raise ModelError(f"cannot read {index}: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"{index} is not an index that megatron-core writes ({one_line(error)}); {CURE}") from error


def _size(record: Record) -> tuple[int, ...]:
    size = record.args[0]
    if record.name != "torch.Size" or not _is_shape(size):
        raise TypeError(f"{record.name}{record.args} is not a size")
    return tuple(size)


def _assembled(
    directory: Path, name: str, shape: tuple[int, ...], pieces: list[tuple[tuple[int, ...], Mapping[str, Any]]]
) -> Tensor:
    whole: Tensor | None = None
    for offset, piece in _loaded(directory, name, pieces):
        end = [start + size for start, size in zip(offset, piece.shape, strict=False)]
        if (
            len(offset) != len(shape)
            or piece.dim() != len(shape)
            or any(a > b for a, b in zip(end, shape, strict=True))
        ):
            raise ModelError(
                f"{directory}: a piece {list(piece.shape)} of {name!r} at {offset} is outside {shape}; {CURE}"
            )
        if whole is None:
            lacking = math.prod(shape) - sum(_elements(place, piece) for _, place in pieces)
            if lacking > 0:
                raise ModelError(
                    f"{directory} lacks pieces of {name!r}, {lacking} of {math.prod(shape)} numbers; {CURE}"
                )
            whole = torch.full(shape, torch.nan, dtype=piece.dtype)
        whole[tuple(slice(start, stop) for start, stop in zip(offset, end, strict=True))] = piece
    if whole is None or not bool(torch.isfinite(whole).all()):
        raise ModelError(f"{directory} has not every piece of {name!r}, or numbers that are not finite; {CURE}")
    return whole


def _elements(place: Mapping[str, Any], piece: Tensor) -> int:
    """The most numbers that the bytes of a piece can hold."""
    return int(place["length"]) // piece.element_size()


def _loaded(
    directory: Path, name: str, pieces: list[tuple[tuple[int, ...], Mapping[str, Any]]]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    for offset, place in pieces:
        path, begin, length = place["relative_path"], place["offset"], place["length"]
        if not isinstance(path, str) or Path(path).name != path or type(begin) is not int or type(length) is not int:
            raise ModelError(f"{directory}: {name!r} lies in {str(path)[:80]!r}, which is not a file name; {CURE}")
        file = directory / path
        with file.open("rb") as stream:
            stream.seek(begin)
            piece = _load(io.BytesIO(stream.read(length)), file)
        if not isinstance(piece, Tensor) or not piece.is_floating_point():
            raise ModelError(f"{file}: a piece of {name!r} is a {type(piece).__name__}, expected a tensor of numbers")
        yield offset, piece
