"""Which models the core can run. Known misfits are refused by name; the rest must pass a small trial at load.

The trial packs two short sequences, counts the layers that came to our attention, and compares every row with the same
sequences run alone. A model that mixes tokens in any other way fails it, whatever it is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plaudit.core.model.attention import Layout, Rule
from plaudit.core.model.decoder import NOTHING, Decoder, LayerShape, kind_of
from plaudit.core.model.lean import LeanTrunk
from plaudit.core.model.operations import Operations
from plaudit.core.model.packing import Packed, pack
from plaudit.core.model.stages import has_layer
from plaudit.errors import ModelError

RECURRENT = frozenset({
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
    "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe", "qwen3_next",
    "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
})  # fmt: skip
ENCODERS = frozenset({
    "albert", "bert", "big_bird", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "ernie",
    "esm", "funnel", "ibert", "longformer", "luke", "modernbert", "mpnet", "roberta", "roformer", "squeezebert",
    "xlm-roberta", "xlm-roberta-xl", "xlnet",
})  # fmt: skip
SHIFTING_ROPE = frozenset({"dynamic", "longrope"})


class _Trial(Layout):
    """Records what each layer hands to attention."""

    def __init__(self, inner: Layout) -> None:
        super().__init__(inner.groups, inner.restore)
        self.inner = inner
        self.shapes: dict[int, LayerShape] = {}
        self.rules: dict[int, Rule] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.rules[layer] = rule
        return self.inner.attend(layer, query, key, value, rule)


def inspect(module: nn.Module) -> Decoder:
    """The module as a Decoder, or a ModelError that says why not."""
    if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
        raise ModelError(f"{type(module).__name__} puts learned tokens before every prompt, which the core does not do")
    inner: Any = getattr(module, "get_base_model", None)  # an adapter's layers live inside the model it adapts
    base: nn.Module = inner() if inner is not None else module
    config: Any = getattr(base, "config", None)
    if config is None:
        raise ModelError(f"{type(base).__name__} is not a transformers model: it has no config")
    _refuse_by_name(type(base).__name__, config)
    kind = kind_of(base)
    if kind is None:
        raise ModelError(f"{type(base).__name__} has no head to read: load it as a causal LM or a classifier")
    was_training = base.training
    base.eval()
    try:
        with torch.inference_mode():
            return _tried(Decoder(base, kind))
    finally:
        base.train(was_training)


def _refuse_by_name(name: str, config: Any) -> None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    family = text.model_type
    layers = set(getattr(text, "layer_types", None) or ())
    if family in RECURRENT or any("mamba" in t or "linear" in t or "conv" in t or "recurrent" in t for t in layers):
        raise ModelError(f"{name} ({family}) mixes tokens with recurrent layers; the core runs attention decoders only")
    if family in ENCODERS or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} ({family}) attends in both directions; the core runs causal decoders only")
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {rope.get("rope_type")} | {v.get("rope_type") for v in rope.values() if isinstance(v, dict)}
    if shifting := kinds & SHIFTING_ROPE:
        raise ModelError(
            f"{name} uses {shifting.pop()!r} rotary positions, which change with the longest sequence of a batch; "
            "the core needs positions that do not"
        )


def _tried(decoder: Decoder) -> Decoder:
    ids = [t % decoder.vocab_size for t in (3, 1, 4, 1, 5, 9, 2, 6)]
    first, second = ids[:5], ids[5:]
    try:
        packed = pack([first, second], decoder.device)
        together, trial = _run(decoder, packed)
    except Exception as error:
        raise ModelError(f"{decoder.name} cannot run packed: {type(error).__name__}: {error}") from error
    layers = decoder.config.num_hidden_layers
    own = [i for i in range(layers) if has_layer(decoder.trunk, i)]
    if sorted(trial.shapes) != own:
        raise ModelError(
            f"{decoder.name}: {len(trial.shapes)} of {len(own)} layers go through transformers' attention registry; "
            "the core needs all of them"
        )
    if not torch.isfinite(together).all():
        raise ModelError(
            f"{decoder.name} gives values that are not finite numbers; its weights are damaged: copy the model again"
        )
    alone = torch.cat([_run(decoder, pack([part], decoder.device))[0] for part in (first, second)])
    _compare(decoder, together, alone, "gives other hidden rows packed than alone: it mixes tokens outside attention")
    if decoder.kind == "causal":
        plain = _plain_logits(decoder, first)
        _compare(decoder, decoder.logits(alone[: len(first)]), plain, "does something to its logits that is not known")
    tried = Decoder(decoder.module, decoder.kind, [trial.shapes.get(i, NOTHING) for i in range(layers)])
    tried.lean = _lean(tried, packed, together, [trial.rules[i] for i in own])
    return tried


def _lean(decoder: Decoder, packed: Packed, rows: Tensor, rules: list[Rule]) -> LeanTrunk | None:
    """The trunk in few calls, if it gives the rows that the module gave."""
    if not LeanTrunk.fits(decoder.trunk) or any(r.sinks is not None for r in rules):
        return None
    operations = _operations(decoder.device)
    if operations is None:
        return None
    lean = LeanTrunk(decoder.trunk, rules, operations)
    wanted = torch.tensor([4, 7], device=decoder.device)
    whole = lean.hidden(packed.input_ids, packed.position_ids, packed.layout)
    part = lean.hidden(packed.input_ids, packed.position_ids, packed.layout, wanted)
    same = _close(decoder, whole, rows) and _close(decoder, part, rows[wanted])
    return lean if same and operations.compute(decoder.trunk, lean.replaced) else None


def _operations(device: torch.device) -> Operations | None:
    if device.type == "cuda":
        from plaudit.core.model.kernel_operations import (
            KernelOperations,  # needs Triton, which a CPU build comes without
        )

        return KernelOperations()
    return Operations() if device.type == "cpu" else None


def _run(decoder: Decoder, packed: Packed) -> tuple[Tensor, _Trial]:
    layout = _Trial(packed.layout)
    return decoder.hidden(packed.input_ids, packed.position_ids, layout), layout


def _plain_logits(decoder: Decoder, ids: list[int]) -> Tensor:
    """The module's own logits, through its own forward."""
    packed = pack([ids], decoder.device)
    out = decoder.module(
        input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, layout=packed.layout
    )
    logits: Tensor = out.logits[0]
    return logits


def _compare(decoder: Decoder, got: Tensor, expected: Tensor, fault: str) -> None:
    if not _close(decoder, got, expected):
        raise ModelError(f"{decoder.name} {fault} (relative difference {_error(got, expected):.2g})")


def _close(decoder: Decoder, got: Tensor, expected: Tensor) -> bool:
    return _error(got, expected) < (1e-3 if decoder.dtype in (torch.float32, torch.float64) else 5e-2)


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-6))
