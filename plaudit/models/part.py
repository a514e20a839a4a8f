"""A model read in part: what a rank does not keep is never read into memory.

A model is made on the meta device first, where it takes no memory (`Outline`). Whoever knows what a rank keeps takes
modules out of it or makes them smaller, and says where the smaller ones lie in the stored tensors (`Cut`). `fill` then
reads just that, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from plaudit.errors import ModelError
from plaudit.models import catalog, weights
from plaudit.models.dtypes import DTYPES
from plaudit.models.fresh import set_pad
from plaudit.models.heads.value_head import HEAD, ValueModel
from plaudit.models.load import Kind, examine

STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of a tensor: start .. end - 1 along one dimension."""

    dim: int
    start: int
    end: int

    def of(self, tensor: Any) -> Any:
        return tensor[(slice(None),) * self.dim + (slice(self.start, self.end),)]


Read = Callable[[str, Cut | None], Tensor]
"""The tensor of a name, or what is kept of it, in memory of its own."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A model without its weights, which are known to be there."""

    module: nn.Module
    stored: Mapping[str, weights.Stored]
    """By the names that the module has for them."""
    tokenizer: PreTrainedTokenizerFast
    path: Path
    kind: Kind

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """From its file, and no more of it than the cut; file pages that were passed over are nobody's memory."""
        if name not in self.stored:
            raise ModelError(
                f"{self.path} keeps {name!r} in another form, which cannot be read in part: load it and save it again "
                "with transformers, or set tensor_parallel = 1 and pipeline_parallel = 1"
            )
        at = self.stored[name]
        if at.dtype not in STORED:
            raise ModelError(f"{at.file}: tensor {name!r} has dtype {at.dtype}; known: {', '.join(STORED)}")
        whole = np.memmap(at.file, f"i{weights.BITS[at.dtype] // 8}", "r", at.begin, at.shape)
        kept = np.array(whole if cut is None else cut.of(whole), order="C")
        return torch.from_numpy(kept).view(STORED[at.dtype])

    def files(self, module: nn.Module) -> set[Path]:
        """Those that the weights of a part come from."""
        tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", {})
        sources = (tied.get(name, name) for name in module.state_dict())
        return {self.stored[name].file for name in sources}


def outline(path: str | Path, dtype: str = "float32", device: str = "cpu") -> Outline:
    """Whatever the directory holds, checked as `load_any` checks it."""
    directory = catalog.resolve(path)
    seen = examine(directory, dtype, device)
    module, stored = seen.module, weights.renamed(seen.module, seen.stored)[0]
    if seen.kind == "value":
        module = ValueModel(module)
        stored = {f"trunk.{name}": at for name, at in stored.items()}
        stored["score.weight"] = weights.read_header(directory / HEAD)["weight"]
    for parameter in module.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])  # and not the buffers, which keep their own
    set_pad(module, seen.tokenizer.pad_token_id)
    return Outline(module.eval(), stored, seen.tokenizer, directory, seen.kind)


def fill(module: nn.Module, read: Read, cuts: Mapping[str, Cut], device: str) -> None:
    """Give a module on the meta device its weights, in place, on a device."""
    _compute_buffers(module, device)
    tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", {})
    filled: dict[str, nn.Parameter] = {}
    for name, blank in module.state_dict(keep_vars=True).items():
        source = tied.get(name, name)
        if source not in filled:
            tensor = read(source, cuts.get(source)).to(device, blank.dtype)
            if tensor.shape != blank.shape:
                raise ModelError(f"{source!r} has shape {list(tensor.shape)}, expected {list(blank.shape)}")
            filled[source] = nn.Parameter(tensor, requires_grad=False)
        home, _, leaf = name.rpartition(".")
        own = filled[source] if isinstance(blank, nn.Parameter) else filled[source].detach()
        setattr(module.get_submodule(home), leaf, own)


def _compute_buffers(module: nn.Module, device: str) -> None:
    """Angles and scales that no file has: transformers computes them anew where it initialises weights."""
    base: Any = getattr(module, module.base_model_prefix)  # type: ignore[call-overload]
    saved = module.state_dict().keys()
    for home, part in module.named_modules():
        names = [n for n, b in part.named_buffers(prefix=home, recurse=False) if b.is_meta and n not in saved]
        for name in names:
            setattr(part, name.rpartition(".")[2], torch.full_like(module.get_buffer(name), torch.nan, device="cpu"))
        if names:
            base._init_weights(part)
        for name in names:
            value = module.get_buffer(name)
            if value.isnan().any():
                raise ModelError(f"{type(module).__name__} does not say how {name!r} is computed: load it on one rank")
            setattr(part, name.rpartition(".")[2], value.to(device))
