"""Recurrent and convolution layers on a packed row: transformers' own modules, called sequence by sequence.

A mixer is a part of a layer that carries a state from token to token: the tail of a convolution, the matrix of a delta
rule or of Mamba. It is recognised by its structure (a layer index, a convolution, a cache among its arguments) and
runs unchanged; only its inputs differ. `layout.mix` determines which rows belong together and where their states are
stored.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

CACHES = ("cache_params", "past_key_values")  # names of the mixers' argument that has their state
ALIKE = 64  # lengths that go through a mixer together on a CPU, the shorter ones padded at the end: its chunk
NO_LIMITS = (0.0, math.inf)  # of Mamba's time steps
STATE_STEP = "mamba2_selective_state_update"  # in transformers' modules: one token of Mamba-2
PACKED = "packed_mixers"  # attribute of a model and its trunk: its mixers take packed rows

State = dict[tuple[str, int], Tensor]
"""A layer's state of several sequences: (("conv" or "recurrent"), index) -> (sequences, ...)."""
StateShapes = Mapping[int, Mapping[tuple[str, int], tuple[torch.Size, torch.dtype]]]
"""Per layer, the state of one sequence."""


class Carry:
    """The cache that a mixer is called with: its layer's state, for the sequences of one call. A mixer reads
    `layers[layer index]`, which is this object again. Without a state the sequences start at their first token."""

    record_past = False  # part of transformers' cache interface: states are not rolled back

    def __init__(self, state: State | None = None) -> None:
        state = state or {}
        self.conv_states = {i: tensor for (kind, i), tensor in state.items() if kind == "conv"}
        self.recurrent_states = {i: tensor for (kind, i), tensor in state.items() if kind == "recurrent"}

    @property
    def layers(self) -> Carry:
        return self

    def __getitem__(self, layer: int) -> Carry:
        return self

    @property
    def state(self) -> State:
        conv = {("conv", i): tensor for i, tensor in self.conv_states.items()}
        return conv | {("recurrent", i): tensor for i, tensor in self.recurrent_states.items()}

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.conv_states)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int | None = None, state_idx: int = 0,
        conv_kernel_size: int | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Store the last columns of (B, channels, L), and return all columns that the convolution reads."""
        width = conv_kernel_size or conv_states.shape[-1]
        before = self.conv_states.get(state_idx)
        if before is not None:
            conv_states = torch.cat([before, conv_states], dim=-1)
        elif conv_states.shape[-1] < width:
            conv_states = F.pad(conv_states, (width - conv_states.shape[-1], 0))
        self.conv_states[state_idx] = conv_states[..., -width:].contiguous()
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int | None = None, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


def shapes_of(carry: Carry) -> dict[tuple[str, int], tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape[1:], tensor.dtype) for name, tensor in carry.state.items()}


class Mixer:
    """One mixer as a layout calls it."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.layer: int = part.layer_idx  # type: ignore[assignment]

    def __call__(self, rows: Tensor, carry: Carry | None = None) -> Tensor:
        """(B, L, width) of B sequences -> the same shape. `carry` has their states before the call, and afterwards the
        final ones."""
        forward: Any = type(self.part).forward
        states: dict[str, Any] = {} if carry is None else {str(_cache_name(type(self.part))): carry}
        if carry is not None and carry.has_previous_state() and rows.shape[1] == 1 and bounded(self.part):
            states["dt_limit"] = limits_of(self.part)
        mixed: Tensor = forward(self.part, rows, **states)
        return mixed


def limits_of(part: nn.Module) -> tuple[float, float]:
    """Limits of the time steps of Mamba-2."""
    low, high = getattr(part, "time_step_limit", NO_LIMITS)
    return float(low), float(high)


def bounded(part: nn.Module) -> bool:
    return limits_of(part) != NO_LIMITS and hasattr(sys.modules[type(part).__module__], STATE_STEP)


def _with_limits(original: Any) -> Any:
    """transformers clamps the time steps of a prompt, but not those of a single decoded token: the same model would
    compute different values for a token in a prompt and in a decode step. With `dt_limit` they are clamped here too."""

    @wraps(original)
    def step(
        state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None,
        dt_limit: tuple[float, float] = NO_LIMITS, **named: Any,
    ) -> Any:  # fmt: skip
        if dt_limit != NO_LIMITS:
            dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
            dt_bias, dt_softplus = None, False
        return original(state, hidden_states, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **named)

    step.limits = True  # type: ignore[attr-defined]
    return step


def mixers_of(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if _is_mixer(part)]


def _is_mixer(part: nn.Module) -> bool:
    convolves = any(isinstance(child, nn.Conv1d) for child in part.children())
    return convolves and isinstance(getattr(part, "layer_idx", None), int) and _cache_name(type(part)) is not None


def _cache_name(kind: Any) -> str | None:
    parameters = inspect.signature(kind.forward).parameters
    return next((name for name in CACHES if name in parameters), None)


def pack_mixers(module: nn.Module) -> None:
    """Make a model's mixers take packed rows when they are called with a layout. A bound method and no closure: a copy
    of the module gets its own."""
    parts = mixers_of(module)
    for part in parts:
        part.forward = MethodType(_packed_forward, part)
        for child in part.children():
            if hasattr(child, "norm_before_gate"):
                child.forward = MethodType(_single_rows, child)
        if bounded(part) and not hasattr(getattr(home := sys.modules[type(part).__module__], STATE_STEP), "limits"):
            setattr(home, STATE_STEP, _with_limits(getattr(home, STATE_STEP)))
    if parts:
        for model in module.modules():
            if isinstance(model, PreTrainedModel):  # the module or, inside a wrapper, the model and its trunk
                setattr(model, PACKED, True)


def _single_rows(self: nn.Module, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    """Falcon-H1's gated norm drops the dimension of a single token, so that several sequences with one token each
    (B, 1, width) get the product of all pairs; (1, B, width) are the same rows."""
    forward: Any = type(self).forward
    if hidden_states.ndim < 3 or hidden_states.shape[1] > 1:
        normed: Tensor = forward(self, hidden_states, gate)
        return normed
    rows, gates = (None if x is None else x.transpose(0, 1) for x in (hidden_states, gate))
    single: Tensor = forward(self, rows, gates).reshape(hidden_states.shape)
    return single


def layout_arguments(trunk: nn.Module, layout: Any) -> dict[str, Any]:
    """Keyword arguments of a trunk's call that pass the layout to its layers. Some pass to their mixers only `seq_idx`,
    transformers' argument for packed rows."""
    return {"layout": layout, "seq_idx": layout} if getattr(trunk, PACKED, False) else {"layout": layout}


def _packed_forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    layout: Any = kwargs.get("layout", kwargs.get("seq_idx"))
    if not hasattr(layout, "mix"):
        forward: Any = type(self).forward
        alone: Tensor = forward(self, hidden_states, *args, **kwargs)
        return alone
    mixed: Tensor = layout.mix(Mixer(self), hidden_states)
    return mixed


def mix_whole(
    mixer: Mixer, hidden_1TW: Tensor, spans: Sequence[tuple[int, int, int]], rows: Sequence[np.ndarray]
) -> Tensor:  # fmt: skip
    """Every sequence from its first token, without states: gradients are those of the module itself. Where sequences
    share rows, the mixer runs over them once for each. `spans` and `rows` as in `packed_layout`."""
    alike = ALIKE if hidden_1TW.device.type == "cpu" else 1
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, tokens in enumerate(rows):
        by_length[-(-len(tokens) // alike)].append(i)
    outputs, places = [], []
    for members in by_length.values():
        length = max(len(rows[i]) for i in members)
        filled = np.stack([np.pad(rows[i], (0, length - len(rows[i])), mode="edge") for i in members])
        at = torch.from_numpy(filled).to(hidden_1TW.device)
        mixed = mixer(hidden_1TW[0].index_select(0, at.flatten()).view(*at.shape, -1))
        for i, own in zip(members, mixed, strict=True):
            first, new, before = spans[i]
            outputs.append(own[before : before + new])
            places.append(np.arange(first, first + new))
    back = torch.from_numpy(np.argsort(np.concatenate(places))).to(hidden_1TW.device)
    return torch.cat(outputs).index_select(0, back)[None]
