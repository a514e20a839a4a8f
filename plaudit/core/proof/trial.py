"""The trial of a stand-in: compares the core with plain transformers in every way the core runs a model.

Prompts packed and alone, a few rows of the last layer, chunked prompts through the KV blocks, decode steps, large
positions, and the head. The lean trunk and the kernels are included if the model would run on them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from plaudit.core.device.backend import Backend, DecodeBatch, Span
from plaudit.core.device.choose import backend_of
from plaudit.core.model.attention import Layout, Rule, number_shared, packed_attention
from plaudit.core.model.decoder import NOTHING, Decoder, Kind, LayerShape
from plaudit.core.model.latent import pack_latents
from plaudit.core.model.lean import LeanTrunk
from plaudit.core.model.mixers import Carry, Mixer, layout_arguments, mixers_of, pack_mixers, shapes_of
from plaudit.core.model.operations import Operations
from plaudit.core.model.packing import Packed, pack
from plaudit.core.proof.own import own_outputs, own_rows, own_steps
from plaudit.core.proof.stand_in import LENGTH, POSITIONS, tokens_for
from plaudit.core.sampling.noise import row_key, token_hashes
from plaudit.core.sampling.sampler import Sampler
from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.errors import one_line

WATCHED = "plaudit-watched"
TOLERANCE = 1e-3  # relative to the largest value; float32 rounding is 1e-5 of it in models of these sizes
LENGTHS = (LENGTH, 37, 5)
PROMPT, STEPS = 40, 8  # of the longest sequence: tokens of the prompt, and decode steps
# Keyword arguments of attention that the core may ignore: the layout already has their information.
KNOWN = {
    "position_ids",
    "cache_position",
    "seq_idx",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "is_causal",
}


T = TypeVar("T")


class Refused(Exception):
    """Why the core cannot run the model, as the end of a sentence that begins with its name."""


@dataclass
class Watch(Layout):
    """A layout that records the arguments of every attention call."""

    inner: Layout = field(kw_only=True)
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    rules: dict[int, Rule] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=dict)  # StateShapes
    calls: dict[int, int] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    masked: bool = False

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        mixer(hidden[:, :1], carry := Carry())
        self.states[mixer.layer] = shapes_of(carry)
        return self.inner.mix(mixer, hidden)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.rules[layer] = rule
        self.calls[layer] = self.calls.get(layer, 0) + 1
        return self.inner.attend(layer, query, key, value, rule)


def _watched_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    layout: Watch | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if layout is None:
        raise Refused("does not pass the model's keyword arguments to its attention, so it cannot run packed")
    if not hasattr(module, "layer_idx"):
        raise Refused("does not number its attention layers, so they have no KV cache")
    read = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}
    layout.unread |= {name for name, value in options.items() if value is not None} - read - KNOWN
    layout.masked |= attention_mask is not None
    return packed_attention(module, query, key, value, attention_mask, layout=layout, **options)


AttentionInterface.register(WATCHED, _watched_attention)


def watched(decoder: Decoder, packed: Packed) -> tuple[Tensor, Watch]:
    """The trunk's hidden rows of a packed row, computed with the core's attention, and the recorded calls."""
    layout = Watch(packed.layout.groups, packed.layout.restore, inner=packed.layout)
    decoder.module.set_attn_implementation(WATCHED)  # type: ignore[operator]
    pack_mixers(decoder.module)
    pack_latents(decoder.module)
    number_shared(decoder.module)
    out = decoder.trunk(
        input_ids=packed.input_ids, position_ids=packed.position_ids, attention_mask=None, use_cache=False,
        **layout_arguments(decoder.trunk, layout),
    )  # fmt: skip
    return out.last_hidden_state[0], layout


def operations_for(device: torch.device) -> Operations | None:
    """The operations of a lean trunk on this device."""
    if device.type == "cuda":
        from plaudit.core.device.kernel_operations import KernelOperations  # needs Triton

        return KernelOperations()
    return Operations() if device.type == "cpu" else None


def lean_fits(decoder: Decoder, watch: Watch, operations: Operations) -> bool:
    return LeanTrunk.fits(decoder.trunk, operations) and all(rule.sinks is None for rule in watch.rules.values())


class Trial:
    """The trial of one stand-in. `rows` are the reference hidden rows of each sequence, computed once."""

    def __init__(self, module: nn.Module, kind: Kind) -> None:
        self.kind = kind
        self.module = module
        self.ids = [tokens_for(module, seed, length) for seed, length in enumerate(LENGTHS)]
        self.rows = _own(lambda: [own_rows(module, ids) for ids in self.ids])
        if not all(torch.isfinite(rows).all() for rows in self.rows):
            raise Refused("gives values that are not finite numbers on random weights")
        self._causal()

    def run(self) -> bool:
        """Whether the lean trunk may be used; raises Refused if the core cannot run the model."""
        decoder = Decoder(self.module, self.kind)
        try:
            packed = pack(self.ids, decoder.device)
            rows, watch = watched(decoder, packed)
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"does not run packed: {type(error).__name__}: {one_line(error)}") from error
        layers = max(len(watch.shapes), decoder.config.num_hidden_layers)  # a decoder with two stacks counts only one
        if any(count > 1 for count in watch.calls.values()):
            raise Refused("calls attention twice in a layer, but the KV cache has one entry per layer")
        if (mixers := mixers_of(self.module)) and len(watch.states) < len(mixers):
            raise Refused(
                f"does not pass the model's keyword arguments to its recurrent layers ({type(mixers[0]).__name__}), so "
                "they cannot run packed"
            )
        if not set(watch.shapes) <= set(range(layers)):
            raise Refused("uses an attention layer several times, but the KV cache has one entry per layer")
        if watch.states and not watch.shapes:
            raise Refused("has recurrent layers but no attention layers; the core runs models that have both")
        if not watch.states and sorted(watch.shapes) != list(range(layers)):
            raise Refused("has layers outside transformers' attention registry; the core needs all of them in it")
        self._same(rows, torch.cat(self.rows), lambda: _feature(decoder, watch))
        self._heads(decoder)
        if self.kind == "causal":
            self._own_steps()
        decoder.layers = tuple(watch.shapes.get(i, NOTHING) for i in range(layers))
        decoder.states = watch.states
        operations = operations_for(decoder.device)
        if operations is not None and lean_fits(decoder, watch, operations):
            decoder.lean = LeanTrunk(decoder.trunk, [watch.rules[i] for i in range(layers)], operations)
            if operations.compute(decoder.trunk, decoder.lean.replaced):
                try:
                    self._everywhere(decoder)
                    return True
                except Refused:  # the model may still pass without the lean trunk
                    pass
        decoder.lean = None
        self._everywhere(decoder)
        return False

    def _everywhere(self, decoder: Decoder) -> None:
        try:
            self._packed(decoder)
            self._far(decoder)
            with warnings.catch_warnings(action="ignore"):  # of missing CUDA graphs in float32
                self._cached(backend_of(decoder))
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"does not run in the core: {type(error).__name__}: {one_line(error)}") from error

    def _causal(self) -> None:
        """Raise Refused if, in plain transformers, a row depends on later tokens."""
        rows = _own(lambda: own_rows(self.module, self.ids[0][: LENGTH // 2]))
        if _error(self.rows[0][: len(rows)], rows) > TOLERANCE:
            raise Refused("attends in both directions; the core runs causal decoders only")

    def _own_steps(self) -> None:
        """Raise Refused if plain transformers gives different rows in decode steps than in a prompt."""
        try:
            steps = own_steps(self.module, self.ids[0][: PROMPT + 2], PROMPT)
        except Exception:  # the model has no cache of its own to compare with
            return
        if _error(steps, self.rows[0][PROMPT : PROMPT + 2]) > TOLERANCE:
            raise Refused("gives different rows in decode steps than in a prompt, in plain transformers too")

    def _heads(self, decoder: Decoder) -> None:
        ids, rows = self.ids[1], self.rows[1]
        expected = _own(lambda: own_outputs(self.module, ids)).float()
        ours = decoder.logits(rows) if self.kind == "causal" else decoder.head(rows)
        if self.kind == "causal" and ours.shape == expected.shape:
            ours, expected = torch.log_softmax(ours, -1), torch.log_softmax(expected, -1)
        if self.kind == "sequence" and ours.ndim != expected.ndim:
            ours = ours[-1]
        elif ours.shape == (*expected.shape, 1):  # a value per token
            ours = ours[:, 0]
        if ours.shape != expected.shape or _error(ours, expected) > TOLERANCE:
            outputs = "its logits" if self.kind == "causal" else "its class head's outputs"
            raise Refused(f"computes something between its hidden rows and {outputs} that the core does not support")

    def _packed(self, decoder: Decoder) -> None:
        backend = backend_of(decoder)
        packed = pack(self.ids, decoder.device)
        every = torch.arange(sum(LENGTHS), device=decoder.device)
        whole = torch.cat(self.rows)
        self._same(backend.rows(packed, every), whole, lambda: "gives different rows packed than alone")
        last = torch.tensor([LENGTHS[0] - 1], device=decoder.device)
        self._same(backend.rows(packed, last), whole[last], lambda: "gives different rows if only one is requested")

    def _far(self, decoder: Decoder) -> None:
        first = POSITIONS - LENGTH
        try:
            rows = own_rows(self.module, self.ids[0], first)
        except Exception:  # the model takes no positions, or has fewer
            return
        packed = pack([self.ids[0]], decoder.device)
        ours = decoder.hidden(packed.input_ids, packed.position_ids + first, packed.layout)
        self._same(ours, rows, lambda: "gives different rows at large positions")

    def _cached(self, backend: Backend) -> None:
        """Chunked prompts, two in one step, then decode steps, through the KV blocks."""
        size, (first, second) = backend.block_size, self.ids[:2]
        each = -(-LENGTH // size)
        backend.open(2 * each)
        try:
            a, b = list(range(each)), list(range(each, 2 * each))
            half = PROMPT // 2 + 1
            backend.forward([Span(first[:half], 0, a), Span(second, 0, b)], [])
            rows = backend.forward([Span(first[half:PROMPT], half, a, list(range(PROMPT - half)))], [])
            self._same(rows, self.rows[0][half:PROMPT], lambda: "gives different rows with the KV cache")
            if self.kind == "causal":
                self._decoded(backend, [first[: PROMPT + 1], [*second, first[0]]], [a, b])
        finally:
            backend.close()

    def _decoded(self, backend: Backend, prompts: list[list[int]], blocks: list[list[int]]) -> None:
        device = backend.decoder.device
        params = SamplingParams(ignore_eos=True)

        def column(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        stops: list[frozenset[int]] = [frozenset()] * 2
        batch = DecodeBatch(
            tokens=column([p[-1] for p in prompts]), positions=column([len(p) - 1 for p in prompts]),
            drawn=column([0, 0]), left=column([STEPS, STEPS]), stops=column([-1, -1])[:, None], tables=column(blocks),  # type: ignore[arg-type]
            alive=torch.ones(2, dtype=torch.bool, device=device), lengths=[len(p) for p in prompts],
            sampler=Sampler(
                [params] * 2, [row_key(0, 0), row_key(0, 1)], stops, token_hashes(backend.decoder.vocab_size, device)
            ),
        )  # fmt: skip
        pieces = list(backend.decode(batch, STEPS))
        tokens = torch.cat([p.tokens for p in pieces])[:STEPS].T.tolist()
        logprobs = torch.cat([p.raw_logprobs for p in pieces])[:STEPS].T
        for prompt, drawn, ours in zip(prompts, tokens, logprobs, strict=True):
            logits = own_outputs(self.module, [*prompt, *drawn])[len(prompt) - 1 : -1].float()
            own = torch.log_softmax(logits, -1).gather(1, column(drawn)[:, None])[:, 0]
            self._same(ours, own, lambda: "gives different log-probs in decode steps", least=1.0)

    def _same(self, ours: Tensor, own: Tensor, why: Callable[[], str], least: float = 0.0) -> None:
        error = _error(ours, own, least)
        if not error <= TOLERANCE:
            raise Refused(f"{why()} (relative difference {error:.2g} on a stand-in with random weights)")


def _own(call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        raise Refused(
            f"cannot be tested: in plain transformers a small model of its config fails on token ids alone: "
            f"{type(error).__name__}: {one_line(error)}"
        ) from error


def _feature(decoder: Decoder, watch: Watch) -> str:
    """The likely reason why a model's rows differ: what in it is not plain causal attention."""
    config, rules = decoder.config, watch.rules
    if "position_ids" not in inspect.signature(decoder.trunk.forward).parameters:
        return "takes no position_ids, so it cannot run packed"
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None) and all(rule.window is None for rule in rules.values()):
            return f"has a window ({name}) only in its mask, which the core does not read"
    if watch.unread:
        return f"passes {', '.join(sorted(watch.unread))} to attention, which the core does not read"
    if watch.masked:
        return "creates its own mask in its layers, which the core does not read"
    kinds = set(getattr(config, "layer_types", None) or ())
    if odd := sorted(kinds - {"full_attention", "sliding_attention", "attention"}):
        return f"has layers of type {odd[0]!r}, which the core does not support"
    return "gives different rows packed than alone: it mixes tokens outside attention"


def _error(got: Tensor, expected: Tensor, least: float = 0.0) -> float:
    if got.shape != expected.shape:
        return float("inf")
    expected = expected.to(got.device)  # decode steps on a GPU return host tensors
    scale = expected.float().abs().max().clamp(min=max(least, 1e-6))
    return float((got.float() - expected.float()).abs().max() / scale)
