"""Quantised checkpoints, dequantised on loading: fp8 with block-wise scales (DeepSeek, Qwen) and MXFP4 (gpt-oss).
Training, serving and saving use the dequantised model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plaudit.errors import ModelError
from plaudit.models.safety import read_json
from plaudit.models.weights import BITS, TORCH, Cut, Readable, Stored, read_directory

RAW = {**TORCH, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Scaled:
    """An fp8 matrix with block-wise scales."""

    weight: Stored
    scale: Stored
    block: tuple[int, int]

    @property
    def dtype(self) -> str:
        return "BF16"

    @property
    def file(self) -> Path:
        return self.weight.file

    @property
    def files(self) -> set[Path]:
        return {self.weight.file, self.scale.file}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def read(self, *cuts: Cut) -> Tensor:
        scale = _raw(self.scale).float()
        for dim, size in zip((-2, -1), self.block, strict=True):
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, self.shape[dim])
        return _cut(_raw(self.weight).float().mul_(scale).bfloat16(), cuts)


@dataclass(frozen=True, slots=True)
class Packed:
    """Experts' matrices (experts, outputs, groups, 16), two numbers of four bits in a byte, and an exponent for each
    group of 32; a module has them as (experts, inputs, outputs)."""

    blocks: Stored
    scales: Stored

    @property
    def dtype(self) -> str:
        return "BF16"

    @property
    def file(self) -> Path:
        return self.blocks.file

    @property
    def files(self) -> set[Path]:
        return {self.blocks.file, self.scales.file}

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, size = self.blocks.shape
        return experts, groups * size * 2, outputs

    def read(self, *cuts: Cut) -> Tensor:
        own = Cut(0, 0, self.shape[0])  # of the experts no more is unpacked than is kept
        if cuts and cuts[0].dim == 0:
            own, cuts = cuts[0], cuts[1:]
        values, packed = torch.tensor(FP4, dtype=torch.bfloat16), _raw(self.blocks, own)
        exponents = _raw(self.scales, own).int() - 127
        whole = torch.empty(len(packed), *self.shape[1:], dtype=torch.bfloat16)
        for expert, (bytes_, exponent) in enumerate(zip(packed, exponents, strict=True)):
            numbers = torch.stack([values[(bytes_ & 15).int()], values[(bytes_ >> 4).int()]], dim=-1).flatten(-2)
            whole[expert] = torch.ldexp(numbers, exponent[..., None]).flatten(-2).T
        return _cut(whole, cuts)


def read_model(directory: Path) -> dict[str, Readable]:
    """Return every tensor of a checkpoint, with quantised ones readable as dequantised."""
    stored = read_directory(directory)
    raw = read_json(directory / "config.json")
    if "quantization_config" not in raw:
        return dict(stored)
    settings = raw["quantization_config"] or {}
    method, block = settings.get("quant_method", "unknown"), settings.get("weight_block_size")
    if method == "mxfp4":
        return _paired(stored, BLOCKS, SCALES, lambda values, scales: Packed(values, scales))
    if method == "fp8" and isinstance(block, (list, tuple)) and len(block) == 2:
        sizes = int(block[0]), int(block[1])
        plain = _paired(stored, "", SCALE, lambda values, scale: Scaled(values, scale, sizes))
        for name, at in plain.items():
            _check(name, at)
        return plain
    raise ModelError(
        f"{directory} is quantised ({method}); Plaudit reads fp8 with weight_block_size and mxfp4 as plain weights: "
        "dequantise it first"
    )


def _check(name: str, at: Readable) -> None:
    if isinstance(at, Stored) and at.dtype.startswith("F8"):
        raise ModelError(f"{at.file}: tensor {name!r} is in fp8 and has no {name + SCALE!r}; copy the model again")
    if isinstance(at, Scaled):
        blocks = [-(-n // size) for n, size in zip(at.shape[-2:], at.block, strict=True)]
        if [*at.shape[:-2], *blocks] != list(at.scale.shape):
            raise ModelError(
                f"{at.file}: tensor {name!r} of {list(at.shape)} has scales of {list(at.scale.shape)}, and its blocks "
                f"of {at.block[0]} × {at.block[1]} are {[*at.shape[:-2], *blocks]}; copy the model again"
            )


def _paired(
    stored: Mapping[str, Stored], ending: str, scales: str, pair: Callable[[Stored, Stored], Readable]
) -> dict[str, Readable]:
    made: dict[str, Readable] = dict(stored)
    for name, scale in stored.items():
        if name.endswith(scales) and (values := stored.get(name.removesuffix(scales) + ending)) is not None:
            del made[name]
            made.pop(name.removesuffix(scales) + ending, None)
            made[name.removesuffix(scales)] = pair(values, scale)
    return made


def _raw(at: Stored, rows: Cut | None = None) -> Tensor:
    if at.dtype not in RAW:
        raise ModelError(f"{at.file}: a quantised tensor has dtype {at.dtype}; known: {', '.join(RAW)}")
    part = np.memmap(at.file, f"i{BITS[at.dtype] // 8}", "r", at.begin, at.shape)
    return torch.from_numpy(np.array(part if rows is None else part[rows.start : rows.end])).view(RAW[at.dtype])


def _cut(whole: Tensor, cuts: tuple[Cut, ...]) -> Tensor:
    for cut in cuts:
        whole = cut.of(whole)
    return whole.contiguous()
