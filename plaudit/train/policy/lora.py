"""LoRA through peft: small matrices that learn beside frozen weights (Hu et al. 2021).

The module stays the transformers model it is, so the engine and the learner run it as before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plaudit.config.supervised import LoraTable
from plaudit.errors import ConfigError
from plaudit.models.fresh import seeded

NAME = "policy"


def attach(module: Any, table: LoraTable, seed: int) -> None:
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigError("[model.lora] needs peft: pip install 'plaudit[lora]'") from None
    targets = table.targets if isinstance(table.targets, str) else list(table.targets)
    config = LoraConfig(r=table.rank, lora_alpha=table.alpha, target_modules=targets, lora_dropout=0.0)
    with seeded(seed):
        try:
            module.add_adapter(config, NAME)
        except ValueError as error:
            raise ConfigError(f"model.lora.targets = {table.targets!r} does not fit this model: {error}") from None


def adapter_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().contiguous() for name, p in module.named_parameters() if p.requires_grad}


def save_adapter(module: Any, base: str, directory: Path) -> None:
    """In peft's own form: `PeftModel.from_pretrained(base, directory)` has the policy."""
    module.peft_config[NAME].base_model_name_or_path = base
    module.save_pretrained(directory)


def load_adapter(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def merged(module: Any) -> nn.Module:
    """A plain model with the adapter worked into its weights. The module itself is left as it is, to the bit."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    weights = {}
    for name, tensor in module.state_dict().items():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner and leaf == "weight":
            layer: Any = module.get_submodule(owner)
            assert isinstance(layer, BaseTunerLayer)
            tensor = tensor + layer.get_delta_weight(NAME).to(tensor.dtype)
        weights[name.replace(".base_layer.", ".")] = tensor
    with torch.device("meta"):
        plain: Any = type(module)(module.config)
    plain.load_state_dict(weights, assign=True)
    if plain.config.tie_word_embeddings:
        plain.tie_weights()
    generation = getattr(module, "generation_config", None)
    if generation is not None:
        plain.generation_config = generation
    plain.eval()
    return plain  # type: ignore[no-any-return]
