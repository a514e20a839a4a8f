"""LoRA by peft: trained low-rank matrices beside frozen weights (Hu et al. 2021).

The module stays the transformers model it is, so the engine and the learner run it as before.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plaudit.config.supervised import EXPERT_LAYERS, LoraTable
from plaudit.errors import ConfigError
from plaudit.models.fresh import seeded
from plaudit.output import write_atomically

NAME = "policy"
SETS = ("target_modules", "exclude_modules", "modules_to_save", "target_parameters")


def attach(module: Any, table: LoraTable, seed: int) -> None:
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigError("[model.lora] needs peft: pip install 'plaudit[lora]'") from None
    targets = linear_layers(module) if table.targets == "all-linear" else list(table.targets)
    config = LoraConfig(r=table.rank, lora_alpha=table.alpha, target_modules=targets, lora_dropout=0.0)
    with seeded(seed):
        try:
            module.add_adapter(config, NAME)
        except ValueError as error:
            raise ConfigError(f"model.lora.targets = {table.targets!r} does not fit this model: {error}") from None


def attach_blank(table: LoraTable | None, module: nn.Module) -> None:
    """Attach an uninitialised adapter, if configured, to a model without weights."""
    if table is not None:
        attach(module, table, 0)


def drawn(like: Any, table: LoraTable, seed: int) -> dict[str, Tensor]:
    """The adapter that `attach` gives a model like this one, which may have one already and need have no weights."""
    plain = hollow(like)
    for home, part in plain.named_modules():
        for name, blank in part.named_parameters(recurse=False):
            value = torch.zeros((), dtype=blank.dtype).expand(blank.shape)  # takes no memory
            setattr(plain.get_submodule(home), name, nn.Parameter(value, requires_grad=False))
    attach(plain, table, seed)
    return adapter_tensors(plain)


def hollow(module: Any) -> Any:
    """Return the model without its adapter and without weights."""
    with torch.device("meta"):
        plain = type(module)(module.config)
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(module.dtype)
    return plain


def linear_layers(module: Any) -> list[str]:
    """All but the output head; of a mixture of experts those of its attention. Experts lie in one tensor, beside which
    peft makes another of that size in every forward pass, decode steps among them, and what has a name of an expert's
    layer, as dense layers and shared experts have, it takes for the experts."""
    head = module.get_output_embeddings()
    mixture = any(".experts." in name for name, _ in module.named_parameters())
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear) and part is not head]
    return [name for name in names if not (mixture and name.rpartition(".")[2] in EXPERT_LAYERS)]


def adapter_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().contiguous() for name, p in module.named_parameters() if p.requires_grad}


def with_adapter(skeleton: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module without weights in which those of the adapter have memory."""
    module = deepcopy(skeleton)
    for name, blank in list(module.named_parameters()):
        if blank.requires_grad:
            home, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(home), leaf, nn.Parameter(torch.empty_like(blank, device=device)))
    return module


def save_adapter(module: Any, base: str, directory: Path) -> None:
    """Save in peft's format: `PeftModel.from_pretrained(base, directory)` loads the policy."""
    module.peft_config[NAME].base_model_name_or_path = base
    module.save_pretrained(directory)
    path = directory / "adapter_config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    # peft stores sets, whose order differs between processes.
    tree = {key: sorted(value) if key in SETS and isinstance(value, list) else value for key, value in tree.items()}
    write_atomically(path, json.dumps(tree, indent=2, sort_keys=True))


def load_adapter(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def merged(module: Any) -> nn.Module:
    """Return a plain model with the adapter merged into its weights. The module itself is unchanged, to the bit."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    deltas = {}
    for name, layer in module.named_modules():
        if isinstance(layer, BaseTunerLayer):  # one beside a parameter names it; several may lie around one module
            leaf = getattr(layer, "parameter_name", "weight")
            deltas[f"{name.replace('.base_layer', '')}.{leaf}"] = layer
    weights = {}
    for name, tensor in module.state_dict().items():
        if ".lora_" in name:
            continue
        plain_name = name.replace(".base_layer", "")
        if (layer := deltas.pop(plain_name, None)) is not None:
            tensor = tensor + layer.get_delta_weight(NAME).to(tensor.dtype)
        weights[plain_name] = tensor
    if deltas:
        raise RuntimeError(f"adapters beside weights that are not there: {', '.join(sorted(deltas))}")
    plain = hollow(module)
    plain.load_state_dict(weights, assign=True)
    if plain.config.tie_word_embeddings:
        plain.tie_weights()
    generation = getattr(module, "generation_config", None)
    if generation is not None:
        plain.generation_config = generation
    plain.eval()
    return plain  # type: ignore[no-any-return]
