"""Loads a part of a model, without reading what a rank does not keep.

A model is made on the meta device first, where it takes no memory (`Outline`). The caller, who knows what a rank keeps,
removes modules or makes them smaller, and gives the ranges of the smaller ones in the stored tensors (`Cut`). `fill`
then reads just these, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import GENERATION_CONFIG_NAME

from plaudit.errors import ModelError
from plaudit.models import catalog, weights
from plaudit.models.dtypes import DTYPES
from plaudit.models.fresh import LABELS, set_pad
from plaudit.models.heads.value_head import HEAD, ValueModel
from plaudit.models.load import AUTO, Kind, choose_labels, examine, heads_of, wrong_kind
from plaudit.models.quiet import quiet
from plaudit.models.weights import Cut

Read = Callable[[str, Cut | None], Tensor]
"""Returns the tensor of a name, or its kept part, in new memory."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A model on the meta device, whose weights are known to exist in its files."""

    module: nn.Module
    stored: Mapping[str, weights.Readable]
    """By their names in the module."""
    tokenizer: PreTrainedTokenizerFast
    path: Path
    kind: Kind
    new: frozenset[str] = frozenset()
    """The names of a head that is in no file."""

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """Read a tensor from its file, and no more of it than the cut."""
        if name not in self.stored:
            raise ModelError(
                f"{self.path} stores {name!r} in another form, which cannot be read in part: load it and save it again "
                "with transformers, or set tensor_parallel = 1 and pipeline_parallel = 1"
            )
        return self.stored[name].read(*([] if cut is None else [cut]))

    @property
    def readable(self) -> bool:
        """Whether its tensors can be read in part; if not, some are fused or split on loading."""
        tied: Mapping[str, str] = getattr(self.module, "all_tied_weights_keys", {})
        names = {tied.get(name, name) for name in self.module.state_dict()}
        return names - self.new <= self.stored.keys()

    @property
    def plain(self) -> bool:
        """Whether the files have the same tensors as the module."""
        return self.readable and all(isinstance(at, weights.Stored) for at in self.stored.values())

    def files(self, module: nn.Module) -> set[Path]:
        """The files of the weights of a part."""
        tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", {})
        sources = (tied.get(name, name) for name in module.state_dict())
        return {file for name in sources for file in self.stored[name].files}


def outline(
    path: str | Path, dtype: str = "float32", device: str = "cpu", kind: Kind | None = None, labels: int | None = None
) -> Outline:
    """The model of a directory, checked as in `load_any`; or a model of a kind. One that scores, with so many `labels`,
    or a value model can be made from any: its head is then new, and without weights."""
    directory = catalog.resolve(path)
    seen = examine(directory, dtype, device)
    if kind == "policy" and seen.kind != kind:
        raise ModelError(wrong_kind(directory, seen.kind, kind))
    module, other = seen.module, kind is not None and seen.kind != kind
    if kind in LABELS:
        choose_labels(directory, seen.config, not other, LABELS[kind] if other and labels is None else labels)
    if kind is not None and other:
        with quiet(), torch.device("meta"):
            module = AUTO[kind].from_config(seen.config, trust_remote_code=False)
    stored = weights.renamed(module, seen.stored)[0]
    new: set[str] = set()
    if kind in LABELS and other:  # the files may have another head of that name
        new = {name for head in heads_of(module) for name in module.state_dict() if name.startswith(f"{head}.")}
        stored = {name: at for name, at in stored.items() if name not in new}
    if "value" in (kind, seen.kind):
        module = ValueModel(module)
        stored = {f"trunk.{name}": at for name, at in stored.items()}
        if seen.kind == "value":
            stored["score.weight"] = weights.read_header(directory / HEAD)["weight"]
        else:
            new = {"score.weight"}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])  # buffers keep their dtype
    seen.config.dtype = DTYPES[dtype]
    if (kind or seen.kind) == "policy" and (directory / GENERATION_CONFIG_NAME).is_file():
        with quiet():
            generation: Any = GenerationConfig.from_pretrained(directory, local_files_only=True)
        module.generation_config = generation
    set_pad(module, seen.tokenizer.pad_token_id)
    return Outline(module.eval(), stored, seen.tokenizer, directory, kind or seen.kind, frozenset(new))


def fill(module: nn.Module, read: Read, cuts: Mapping[str, Cut], device: str) -> None:
    """Load the weights of a module on the meta device, in place, onto a device. An adapter's, which are in no file, are
    zeros."""
    compute_buffers(module, device)
    tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", {})
    filled: dict[str, nn.Parameter] = {}
    for name, blank in module.state_dict(keep_vars=True).items():
        source = tied.get(name, name)
        if source not in filled:
            if ".lora_" in source:
                tensor = torch.zeros_like(blank, device=device)
            else:  # the name in a layer without an adapter
                tensor = read(source.replace(".base_layer.", "."), cuts.get(source)).to(device, blank.dtype)
            if tensor.shape != blank.shape:
                raise ModelError(f"{source!r} has shape {list(tensor.shape)}, expected {list(blank.shape)}")
            filled[source] = nn.Parameter(tensor, requires_grad=False)
        home, _, leaf = name.rpartition(".")
        own = filled[source] if isinstance(blank, nn.Parameter) else filled[source].detach()
        setattr(module.get_submodule(home), leaf, own)


def compute_buffers(module: nn.Module, device: str) -> None:
    """Compute buffers that are in no file, such as angles and scales, as transformers does on initialising weights."""
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
