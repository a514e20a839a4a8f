"""Weights on disk: safetensors headers, read and checked before anything is loaded from them.

A header is eight bytes of length and that much JSON: per tensor its dtype, shape and byte range in what follows.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.errors import ModelError, UnsafeModel
from plaudit.models.safety import pickles, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STACKINGS = [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]
"""The operations of transformers that stack all experts in one tensor, and that `Stacked` can read."""
HEADER_LIMIT = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor from start to end - 1 along one dimension."""

    dim: int
    start: int
    end: int

    def of(self, tensor: Any) -> Any:
        return tensor[(slice(None),) * self.dim + (slice(self.start, self.end),)]


class Readable(Protocol):
    """A tensor in one or several files, as it is or in another form."""

    @property
    def file(self) -> Path: ...
    @property
    def files(self) -> set[Path]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self, *cuts: Cut) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as its file describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """The offset of its first byte in the file."""

    @property
    def files(self) -> set[Path]:
        return {self.file}

    def read(self, *cuts: Cut) -> Tensor:
        """The part that the cuts leave, applied in order, in new memory. File pages outside of it use no memory of the
        process."""
        if self.dtype not in TORCH:
            raise ModelError(f"{self.file}: a tensor has dtype {self.dtype}; known: {', '.join(TORCH)}")
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=TORCH[self.dtype])
        part = np.memmap(self.file, f"i{BITS[self.dtype] // 8}", "r", self.begin, self.shape)
        for cut in cuts:
            part = cut.of(part)
        return torch.from_numpy(np.array(part, order="C")).view(TORCH[self.dtype])


@dataclass(frozen=True, slots=True)
class Stacked:
    """The weights of a layer's experts, one tensor in the module and separate tensors in the files: the `parts` of each
    expert are consecutive along the second dimension of the whole (gate and up)."""

    parts: tuple[tuple[Readable, ...], ...]

    @property
    def file(self) -> Path:
        return self.parts[0][0].file

    @property
    def dtype(self) -> str:
        return self.parts[0][0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return len(self.parts), sum(part.shape[0] for part in first), *first[0].shape[1:]

    @property
    def files(self) -> set[Path]:
        return {part.file for expert in self.parts for part in expert}

    def read(self, *cuts: Cut) -> Tensor:
        """As in `Stored`: reads no more of the files than that."""
        ranges = [(0, size) for size in self.shape]
        for cut in cuts:
            first = ranges[cut.dim][0]
            ranges[cut.dim] = first + cut.start, first + cut.end
        (begin, end), (low, high), *others = ranges
        rest = [Cut(dim, *between) for dim, between in enumerate(others, start=1)]
        experts = []
        for expert in self.parts[begin:end]:
            pieces, at = [], 0
            for part in expert:
                rows = part.shape[0]
                pieces.append(part.read(Cut(0, *(min(max(row - at, 0), rows) for row in (low, high))), *rest))
                at += rows
            experts.append(torch.cat(pieces))
        if experts:
            return torch.stack(experts)
        return torch.empty(0, *(stop - start for start, stop in ranges[1:]), dtype=TORCH[self.dtype])


def read_directory(directory: Path) -> dict[str, Stored]:
    """Every tensor of a single or sharded checkpoint, each known to lie whole inside its file."""
    if (directory / SINGLE).is_file() or (directory / INDEX).is_file():
        return read_stem(directory / SINGLE)
    if pickled := pickles(directory):
        raise UnsafeModel(
            f"{directory} holds only pickled weights ({', '.join(pickled[:3])}), which can run code; "
            "convert them to safetensors elsewhere and load that"
        )
    raise ModelError(f"no weights in {directory}: looked for {SINGLE} and {INDEX}")


def read_stem(path: Path) -> dict[str, Stored]:
    """Every tensor of a file or, where it is not there, of those that path.index.json names."""
    return read_header(path) if path.is_file() else _read_shards(path.with_name(f"{path.name}.index.json"))


def read_header(file: Path) -> dict[str, Stored]:
    header, data_bytes = _parse_header(file)
    data_begin = file.stat().st_size - data_bytes
    header.pop("__metadata__", None)
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(file, name, entry)
        size = math.prod(shape) * BITS[dtype] // 8
        if end - begin != size:
            raise ModelError(f"{file}: tensor {name!r} ({dtype} {list(shape)}) needs {size} bytes, has {end - begin}")
        spans.append((begin, end, name))
        tensors[name] = Stored(file, dtype, shape, data_begin + begin)
    _check_spans(file, spans, data_bytes)
    return tensors


def check_names(module: nn.Module, stored: Mapping[str, Readable], directory: Path) -> None:
    """Compare with `module`, built on the meta device: nothing missing, nothing left over, every shape right."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    supplied, converted = renamed(module, stored)
    for name, tensor in supplied.items():
        if name in expected and tensor.shape != expected[name]:
            raise ModelError(
                f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, "
                f"config.json makes it {list(expected[name])}; the two are of different models"
            )
    tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", {})
    have = supplied.keys() | converted
    missing = {name for name in expected.keys() - have if name not in tied or tied[name] not in have}
    _refuse(directory, "lacks", missing, getattr(module, "_keys_to_ignore_on_load_missing", None))
    unexpected = supplied.keys() - expected.keys() - converted
    ignored = {*(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"}
    _refuse(directory, "has the unexpected", unexpected, ignored)


def _refuse(directory: Path, verb: str, names: Iterable[str], ignored: Iterable[str] | None) -> None:
    left = sorted(name for name in names if not any(re.search(pattern, name) for pattern in ignored or ()))
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ModelError(f"{directory} {verb} tensor {left[0]!r}{more}; its weights do not belong to its config.json")


def renamed(module: nn.Module, stored: Mapping[str, Readable]) -> tuple[dict[str, Readable], set[str]]:
    """Tensors by the names that transformers will use. Of tensors that it makes from others, stacked experts can be
    read; the others are returned as names only."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    transforms = get_model_conversion_mapping(module)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    expected = module.state_dict()
    supplied: dict[str, Readable] = {}
    converted: set[str] = set()
    sources: dict[str, dict[str, Readable]] = {}
    for source, tensor in stored.items():
        name, fused = rename_source_key(source, renamings, converters, module.base_model_prefix, expected)
        if fused is None:
            supplied[name] = tensor
        else:
            converted |= {name} | _siblings(name, converters, expected)
            sources.setdefault(name, {})[source] = tensor
    for name, tensors in sources.items():
        if name in expected and (stacked := _stacked(name, tensors, converters, expected[name].shape)) is not None:
            supplied[name] = stacked
    return supplied, converted


def _stacked(
    name: str, tensors: Mapping[str, Readable], converters: Iterable[Any], shape: Sequence[int]
) -> Stacked | None:
    """The stacked experts, or None where transformers converts the tensors otherwise."""
    for converter in converters:
        steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
        if steps not in STACKINGS or converter.target_patterns[0] not in name:
            continue
        patterns = [re.compile(re.escape(each).replace(r"\*", r"(\d+)")) for each in converter.source_patterns]
        by_expert: dict[int, dict[int, Readable]] = {}
        for source, tensor in tensors.items():
            for place, pattern in enumerate(patterns):
                if (match := pattern.search(source)) and match.groups():
                    by_expert.setdefault(int(match[1]), {})[place] = tensor
        parts = tuple(tuple(by_expert[n][place] for place in sorted(by_expert[n])) for n in sorted(by_expert))
        alike = len({tuple((part.dtype, part.shape) for part in expert) for expert in parts}) == 1
        if alike and sum(map(len, parts)) == len(tensors) and Stacked(parts).shape == tuple(shape):
            return Stacked(parts)
    return None


def _siblings(name: str, converters: Iterable[Any], expected: Mapping[str, Any]) -> set[str]:
    """The other targets of a converter with several: it is named by the first, and all come from the same tensors."""
    siblings: set[str] = set()
    for converter in converters:
        first, *others = converter.target_patterns
        if first in name:
            siblings |= {name.replace(first, other, 1) for other in others} & expected.keys()
    return siblings


def _read_shards(index: Path) -> dict[str, Stored]:
    directory = index.parent
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index} has no weight_map; copy the model again")
    shards: dict[str, dict[str, Stored]] = {}
    for name, shard in places.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{index} puts tensor {name!r} in {str(shard)[:80]!r}, which is not a file name")
        if shard not in shards:
            if not (directory / shard).is_file():
                raise ModelError(f"{directory} lacks the shard {shard}, which holds tensor {name!r}; copy it again")
            shards[shard] = read_header(directory / shard)
        if name not in shards[shard]:
            raise ModelError(f"{directory / shard} lacks tensor {name!r}, which {index.name} puts there; copy it again")
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


def _parse_header(file: Path) -> tuple[dict[str, Any], int]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                raise ModelError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` where it came from")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(size - 8, HEADER_LIMIT):
                raise ModelError(
                    f"{file} is truncated or not safetensors: {size} bytes, header of {length}; copy it again"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} has a header that is not JSON ({error}); copy it again") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file} has a header that is not a JSON object; copy it again")
    return header, size - 8 - length


def _entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise ModelError(f"{file}: tensor {name!r} has a broken header entry {str(entry)[:120]}; copy the file again")
    if dtype not in BITS:
        raise ModelError(f"{file}: tensor {name!r} has dtype {str(dtype)[:20]!r}; known: {', '.join(BITS)}")
    return dtype, shape, begin, end


def _check_spans(file: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    reached = 0
    for begin, end, name in sorted(spans):
        if end > data_bytes:
            raise ModelError(
                f"{file} is truncated: tensor {name!r} ends at byte {end} of the data, which has {data_bytes}; "
                "copy it again"
            )
        if begin != reached:
            raise ModelError(f"{file}: tensor {name!r} begins at byte {begin}, expected {reached}; copy the file again")
        reached = end
    if reached != data_bytes:
        raise ModelError(f"{file} has {data_bytes - reached} bytes that belong to no tensor; copy it again")
