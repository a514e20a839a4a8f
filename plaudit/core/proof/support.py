"""Decides whether the core can run a model: its stand-in must pass the trial (trial.py), its own weights a short check.

A few models are refused by name first, where that gives a clearer reason. The verdict is cached on disk (verdict.py),
so that a model is tested once per machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from plaudit.core.model.attention import HALVES
from plaudit.core.model.decoder import NOTHING, Decoder, Kind, kind_of
from plaudit.core.model.lean import LeanTrunk
from plaudit.core.model.mixers import mixers_of
from plaudit.core.model.packing import Packed, pack, use_packed_attention
from plaudit.core.proof.own import Choices, Computed, own_outputs, own_rows
from plaudit.core.proof.stand_in import stand_in, tokens_for
from plaudit.core.proof.trial import Refused, Trial, Watch, lean_fits, operations_for, watched
from plaudit.core.proof.verdict import Verdict, keep, key_of, recall
from plaudit.errors import ModelError, one_line
from plaudit.models.known_text import KNOWN_TEXT
from plaudit.models.text import bos_ids, encode

# Families whose recurrent layers keep their state elsewhere than mixers do (model/mixers.py), or without attention.
RECURRENT = frozenset(
    {"falcon_mamba", "mamba", "mamba2", "minimax", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm"}
)
FIRST = 24  # tokens of the first of two sequences in the check of the real weights
SECOND = 8
SLACK = 3.0  # of the rounding: over all families the core is 0.7 to 1.4 times as far from the truth as transformers is
SEEDS = (0, 1)  # of a stand-in's weights: with one seed, nearly equal expert scores may round either way


def inspect(module: nn.Module, tokenizer: Any = None) -> Decoder:
    """The module as a Decoder; raises ModelError with the reason if the core cannot run it. Its weights are checked on
    a text of its tokenizer. Ranks that share the module all pass the tokenizer, or none."""
    base, kind, verdict = accepted(module)
    was_training = base.training
    base.eval()
    try:
        with torch.inference_mode():
            decoder = Decoder(base, kind)
            return _checked(decoder, verdict, _known_ids(decoder, tokenizer))
    finally:
        base.train(was_training)


def accepted(module: nn.Module) -> tuple[nn.Module, Kind, Verdict]:
    """The base model, its kind and its verdict, without using the module's own weights; raises ModelError if the core
    cannot run it. May run a trial. Ranks that share a module call it before they wait for each other."""
    if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
        raise ModelError(
            f"{type(module).__name__} uses prompt learning (learned tokens before every prompt), which the core does "
            "not support: use LoRA"
        )
    inner: Any = getattr(module, "get_base_model", None)  # an adapter's layers are in the model it adapts
    base: nn.Module = inner() if inner is not None else module
    config: Any = getattr(base, "config", None)
    if config is None:
        raise ModelError(f"{type(base).__name__} is not a transformers model: it has no config")
    _refuse_by_name(type(base).__name__, config)
    _refuse_layers(base, config)
    kind = kind_of(base)
    if kind is None:
        raise ModelError(f"{type(base).__name__} has no head to read: load it as a causal LM or a classifier")
    verdict = verdict_of(base, kind)
    if verdict.refused is not None:
        raise ModelError(f"{type(base).__name__} ({_family(config)}) {verdict.refused}")
    return base, kind, verdict


def verdict_of(module: nn.Module, kind: Kind) -> Verdict:
    key = key_of(module, kind)
    verdict = recall(key)
    if verdict is None:
        verdict = _tried(module, kind)
        keep(key, verdict)
    return verdict


def _tried(module: nn.Module, kind: Kind) -> Verdict:
    refused = ""
    for seed in SEEDS:
        try:
            small = stand_in(module, seed)
        except Exception as error:
            return Verdict(f"cannot be tested: no small model can be built from its config: {one_line(error)}", False)
        try:
            with torch.inference_mode():
                return Verdict(None, Trial(small, kind).run())
        except Refused as error:
            refused = refused or str(error)
    return Verdict(refused, False)


def _family(config: Any) -> str:
    return str(config.get_text_config().model_type if hasattr(config, "get_text_config") else config.model_type)


def _refuse_by_name(name: str, config: Any) -> None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    family = text.model_type
    layers = set(getattr(text, "layer_types", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} ({family}) attends in both directions; the core runs causal decoders only")
    if not hasattr(text, "vocab_size"):
        raise ModelError(f"{name} ({family}) has no vocab_size; the core runs models of tokens")
    if getattr(text, "index_topk", None) or any("sparse" in t or "compress" in t for t in layers):
        raise ModelError(f"{name} ({family}) attends only to the keys that an indexer selects; the core attends to all")


def _refuse_layers(base: nn.Module, config: Any) -> None:
    """Raise ModelError unless all recurrent layers are mixers."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = [kind for kind in getattr(text, "layer_types", None) or () if _recurrent(kind)]
    mixers, name = mixers_of(base), f"{type(base).__name__} ({text.model_type})"
    if text.model_type in RECURRENT or (kinds and not mixers):
        lists = [part for part in base.modules() if isinstance(part, nn.ModuleList) and len(part)]
        layer = type(mixers[0] if mixers else lists[0][0]).__name__
        raise ModelError(f"{name} has recurrent layers that the core does not support: {layer}")


def _recurrent(kind: str) -> bool:
    return any(word in kind for word in ("mamba", "linear", "conv", "recurrent"))


# The check of the real weights, in their own dtype. The trial has proved that the core computes what the classes do;
# this detects damaged weights, replaced submodules, and a rank's shard that does not fit the others.


def _known_ids(decoder: Decoder, tokenizer: Any) -> list[int]:
    """Tokens as the model has seen them; without a tokenizer of the language, any that are not special."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        ids = [*bos_ids(tokenizer), *encode(tokenizer, KNOWN_TEXT)][: FIRST + SECOND]
        unknown = sum(token == tokenizer.unk_token_id for token in ids)
        if len(ids) == FIRST + SECOND and max(ids) < decoder.vocab_size and unknown <= SECOND:
            return ids
    return tokens_for(decoder.module, 0, FIRST + SECOND)


def _checked(decoder: Decoder, verdict: Verdict, ids: Sequence[int]) -> Decoder:
    packed = pack(parts := [ids[:FIRST], ids[FIRST:]], decoder.device)
    with Choices() as choices:
        together, watch = watched(decoder, packed)
    _check_finite(decoder, together)
    replays = [choices.of_rows(*span, len(ids)) for span in zip(packed.starts, packed.lengths, strict=True)]
    each = list(zip(parts, replays, strict=True))
    rows = _Reference(decoder, lambda: torch.cat([_replayed(own_rows, decoder, *part) for part in each]))
    rows.compare(together, "gives different rows packed than alone: it mixes tokens outside attention")
    if decoder.kind == "causal":
        outputs = _Reference(decoder, lambda: _replayed(own_outputs, decoder, parts[0], replays[0]))
        ours = decoder.logits(together[:FIRST])
        outputs.compare(ours, "changes its logits in a way that the core does not support")
    layers = max(len(watch.shapes), decoder.config.num_hidden_layers)
    shapes = [watch.shapes.get(i, NOTHING) for i in range(layers)]
    checked = Decoder(decoder.module, decoder.kind, shapes, watch.states)
    use_packed_attention(decoder.module)
    if verdict.lean:
        checked.lean = _lean(checked, packed, rows, watch)
    return checked


def _replayed(own: Callable[..., Tensor], decoder: Decoder, ids: Sequence[int], choices: Sequence[Tensor]) -> Tensor:
    with Choices(choices):
        return own(decoder.module, ids)


class _Reference:
    """What plain transformers computes: in a wider dtype, which is the truth, and in the model's own. How far the
    second is from the first is the dtype's rounding with these weights, and the core may be SLACK times as far."""

    def __init__(self, decoder: Decoder, compute: Callable[[], Tensor]) -> None:
        self.decoder = decoder
        wide = torch.float32 if decoder.dtype in HALVES else torch.float64
        with Computed(wide):
            self.expected = compute()
        if decoder.dtype == wide:
            with Computed(torch.float32):
                rounded = compute()
        else:
            rounded = compute()
        _check_finite(decoder, self.expected)
        _check_finite(decoder, rounded)
        self.rounding = _distance(rounded, self.expected)

    def near(self, got: Tensor) -> bool:
        return _distance(got, self.expected) <= SLACK * self.rounding

    def compare(self, got: Tensor, fault: str) -> None:
        if not self.near(got):
            raise ModelError(
                f"{self.decoder.name} {fault} (relative difference {_distance(got, self.expected):.2g}, "
                f"{self.rounding:.2g} by rounding to {str(self.decoder.dtype).removeprefix('torch.')})"
            )


def _lean(decoder: Decoder, packed: Packed, rows: _Reference, watch: Watch) -> LeanTrunk | None:
    """The lean trunk, if this module has the submodules that its classes had in the trial."""
    operations = operations_for(decoder.device)
    if operations is None or not lean_fits(decoder, watch, operations):
        return None
    lean = LeanTrunk(decoder.trunk, [watch.rules[i] for i in sorted(watch.rules)], operations)
    if not operations.compute(decoder.trunk, lean.replaced):
        return None
    return lean if rows.near(lean.hidden(packed.input_ids, packed.position_ids, packed.layout)) else None


def _check_finite(decoder: Decoder, values: Tensor) -> None:
    if torch.isfinite(values).all():
        return
    name = f"{decoder.name} gives values that are not finite numbers"
    for parameter, weights in decoder.module.named_parameters():
        if bad := int((~torch.isfinite(weights)).sum()):
            raise ModelError(
                f"{name}; its weights are damaged: {bad} of {weights.numel()} in {parameter} are not finite: copy the "
                "model again, or use an earlier checkpoint"
            )
    raise ModelError(f"{name}; its weights are finite but overflow in {decoder.dtype}: load it in float32 or bfloat16")


def _distance(got: Tensor, expected: Tensor) -> float:
    """The relative norm of the difference over all rows."""
    difference = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-6)
    return float(difference)
