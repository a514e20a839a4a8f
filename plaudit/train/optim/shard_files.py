"""Sharded models and optimizers on disk, written by all ranks at once: safetensors files and an index in JSON.

Every tensor is whole and in one file, and every rank writes one file, so whatever reads sharded safetensors reads them,
and so does any number of ranks. Tensors are gathered one at a time: beside its shards a rank has at most one.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from plaudit.models import ValueModel, save
from plaudit.models.heads.value_head import HEAD
from plaudit.models.saving import REWARD, Replacement, write_config
from plaudit.models.weights import SINGLE, TORCH
from plaudit.train.optim.pipeline import Stage
from plaudit.train.optim.sharding import Shards
from plaudit.train.run.checksum import memory_of
from plaudit.train.run.ranks import Group, together

NAMES = {dtype: name for name, dtype in TORCH.items()}


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is gathered when all ranks call `gather`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    gather: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_shards(path: Path, tensors: Sequence[Whole], group: Group) -> None:
    """Write tensors as one file per rank. `path` is the file that a single process would write: model.safetensors
    becomes model-00001-of-00002.safetensors, one for each rank that has a share, and model.safetensors.index.json. All
    ranks pass the same tensors."""
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # as safetensors does, for alignment
    total = sum(tensor.nbytes for tensor in tensors)
    owners, passed = [], 0
    for tensor in tensors:
        owners.append(min(passed * group.size // max(total, 1), group.size - 1))
        passed += tensor.nbytes

    def write() -> None:
        _write_part(path.with_name(shard_name(path, group.index, group)), tensors, [o == group.index for o in owners])
        if group.index == 0:
            files = {tensor.name: shard_name(path, owner, group) for tensor, owner in zip(tensors, owners, strict=True)}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
            path.with_name(f"{path.name}.index.json").write_text(json.dumps(index, indent=2) + "\n")

    together(group, write)


def of_all_stages(tensors: Sequence[Whole], stage: Stage) -> list[Whole]:
    """The tensors of all stages, on each. A tensor comes from the first stage that has it."""
    if stage.size == 1:
        return list(tensors)
    own = {tensor.name: tensor for tensor in tensors}
    listed = [(tensor.name, NAMES[tensor.dtype], tensor.shape) for tensor in tensors]
    by_name: dict[str, Whole] = {}

    def gather(name: str, home: int, like: Tensor) -> Tensor:
        here = own[name].gather().detach().cpu() if stage.index == home else None
        return stage.from_home(here, home, like, "cpu")

    for home, theirs in enumerate(stage.rows.gather_values(listed, list[tuple[str, str, tuple[int, ...]]])):
        for name, kind, shape in theirs:
            like = torch.empty(shape, dtype=TORCH[kind], device="meta")
            by_name.setdefault(name, Whole(name, like.dtype, shape, partial(gather, name, home, like)))
    return list(by_name.values())


def shard_name(path: Path, rank: int, group: Group) -> str:
    return f"{path.stem}-{rank + 1:05d}-of-{group.size:05d}{path.suffix}"


def _write_part(path: Path, tensors: Sequence[Whole], mine: Sequence[bool]) -> None:
    """Write this rank's file. An error is raised at the end, since the other ranks' gathers need this one."""
    failed: OSError | None = None
    own = [tensor for tensor, yes in zip(tensors, mine, strict=True) if yes]
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("wb")) if own else None
            if file is not None:
                file.write(_header(own))
        except OSError as error:
            failed = error
        for tensor, yes in zip(tensors, mine, strict=True):
            whole = tensor.gather()
            if yes and file is not None and failed is None:
                try:
                    file.write(memory_of(whole.detach().cpu().contiguous()))
                except OSError as error:
                    failed = error
        if failed is not None:
            raise failed
        if file is not None:
            file.flush()
            os.fsync(file.fileno())


def _header(tensors: Sequence[Whole]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        shape = list(tensor.shape)
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def save_shards(
    shards: Shards, tokenizer: PreTrainedTokenizerFast, directory: Path, *, reward: str | None = None
) -> None:
    """`models.save` for a sharded model. Collective."""
    group = shards.everyone
    main = group.index == 0
    skeleton = shards.skeleton
    base: Any = skeleton.trunk if isinstance(skeleton, ValueModel) else skeleton
    if not _one_by_one(base):  # transformers stores tensors that combine several of these
        module = shards.gathered()
        together(group, lambda: None if module is None else save(module, tokenizer, directory, reward=reward))
        return
    new: Replacement | None = None

    def begin() -> None:
        nonlocal new
        new = Replacement.begin(directory) if main else None

    together(group, begin)
    place = Path(group.from_main("" if new is None else str(new.temporary), str))
    with nullcontext() if new is None else new.guarded():
        prefix = "trunk." if base is not skeleton else ""
        saved = skeleton.state_dict()
        named = {**dict(skeleton.named_parameters()), **{n: b for n, b in skeleton.named_buffers() if n in saved}}
        tensors = [
            whole
            for name, tensor in named.items()
            if name.startswith(prefix)
            for whole in stored_as(base, name.removeprefix(prefix), tensor, partial(shards.full, name))
        ]
        write_shards(place / SINGLE, tensors, group)
        head = shards.full("score.weight").detach().cpu().contiguous() if prefix else None

        def finish() -> None:
            if new is not None:
                write_config(base, tokenizer, place)
                if head is not None:
                    save_file({"weight": head}, place / HEAD)
                if reward is not None:
                    (place / REWARD).write_text(reward, encoding="utf-8")
                new.finish()

        together(group, finish)


def stored_as(module: Any, name: str, like: Tensor, gather: Callable[[], Tensor]) -> list[Whole]:
    """What transformers stores for a tensor of a module: itself, or tensors made from it, such as one per expert."""
    blank = torch.empty(like.shape, dtype=like.dtype, device="meta")
    made = revert_weight_conversion(module, {name: blank})
    if made.keys() == {name}:
        return [Whole(name, like.dtype, tuple(like.shape), gather)]
    taken: dict[str, Tensor] = {}

    def take(part: str) -> Tensor:
        if not taken:  # gathered for the first of them
            taken.update(revert_weight_conversion(module, {name: gather()}))
        return taken.pop(part)

    return [Whole(part, blank.dtype, tuple(blank.shape), partial(take, part)) for part, blank in made.items()]


def _one_by_one(module: Any) -> bool:
    """Whether each of the module's tensors is stored on its own, as it is or in parts."""
    tensors = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
    single = [key for name, tensor in tensors.items() for key in revert_weight_conversion(module, {name: tensor})]
    return sorted(single) == sorted(revert_weight_conversion(module, tensors))
