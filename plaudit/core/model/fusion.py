"""Fused kernels for modules that every family implements the same way, recognised by what they compute.

Norms, gated MLPs, experts and their routers, rotary embeddings and recurrent layers cost many small launches in eager
mode. A module is replaced only if a kernel gives the module's own result on random input, so nothing depends on a
model's name; what is not recognised runs unchanged. Replacements are active inside `applied()` only: the module itself
is not changed. Products are steadied there too, where requested (algo/tokens/products.py).
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from plaudit.algo.tokens.products import HALF, SteadyProducts
from plaudit.core.model.mixers import NO_LIMITS
from plaudit.core.model.operations import elementwise
from plaudit.models.positions import SHIFTING

Call = Callable[..., Any]
MOST_EXPERTS = 1024  # attributes of a router that a kernel replaces
SCALES = (1, 30)  # magnitude of the trial inputs: some layers clamp large values
ACTIVATIONS = tuple(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())
PROBED = 64  # head size that a rotary embedding is tried with


class Kernels(Protocol):
    """The module `differentiable`, of a GPU, or `operations`, in plain torch."""

    RECURRENT: Mapping[str, Call]
    MIXTURE: Mapping[str, Call]

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, gemma: bool = False) -> Tensor: ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...


class Fusion:
    @torch.no_grad()
    def __init__(self, trunk: nn.Module, kernels: Kernels) -> None:
        self.kernels = kernels
        first = next(trunk.parameters())
        self.half = first.dtype in HALF
        self.forwards: list[tuple[nn.Module, Call]] = []
        self.functions: list[tuple[Any, str, Call]] = []
        self._originals: list[tuple[Any, str, Call]] = []
        self._inside = 0  # active passes, each possibly in another thread
        self._lock = threading.Lock()
        kind_of: dict[tuple[type, Any], str | None] = {}
        for module in trunk.modules():
            if type(module).__name__.endswith("RMSNorm"):
                self._norm(module, kind_of)
            elif type(module).__name__.endswith("RMSNormGated") and kernels.RECURRENT:
                self._gated_norm(module, kind_of)
            elif _is_gated(module):
                self._gated(module, kind_of)
            elif not first.is_cuda and isinstance(module, ACTIVATIONS) and not [*module.parameters()]:
                self.forwards.append((module, partial(elementwise, module.forward)))
            elif _looks_at_length(module):
                self.forwards.append((module, partial(_short_rotary, module)))
            elif kernels.MIXTURE and are_experts(module):
                self._experts(module, kind_of)
            elif kernels.MIXTURE and _is_router(module):
                self._router(module, kind_of)
        for home in {sys.modules[type(module).__module__] for module in trunk.modules()}:
            original = getattr(home, "apply_rotary_pos_emb", None)
            if original is not None and _same_rotary(kernels, original, first):
                self.functions.append((home, "apply_rotary_pos_emb", _rotary_or(kernels, original)))
            for name, replaced in REPLACED.items():
                original = getattr(home, name, None)
                if original is None or name not in kernels.RECURRENT:
                    continue
                fused = replaced(original, kernels.RECURRENT[name])
                if _same_step(name, original, fused, trunk):
                    self.functions.append((home, name, fused))

    def covers(self, parts: Sequence[nn.Module]) -> bool:
        """Whether a kernel replaces each of these modules, and the rotary embedding."""
        fused_modules = {module for module, _ in self.forwards}
        return any(name == "apply_rotary_pos_emb" for _, name, _ in self.functions) and fused_modules.issuperset(parts)

    @contextmanager
    def applied(self, steady: bool) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._apply()
        try:
            with SteadyProducts(also_wide=self.half) if steady else nullcontext():
                yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._restore()

    def _apply(self) -> None:
        self._originals = [(home, name, getattr(home, name)) for home, name, _ in self.functions]
        for module, forward in self.forwards:
            module.__dict__["forward"] = forward
        for home, name, function in self.functions:
            setattr(home, name, function)

    def _restore(self) -> None:
        for module, _ in self.forwards:
            module.__dict__.pop("forward", None)
        for home, name, original in self._originals:
            setattr(home, name, original)

    def _norm(self, module: nn.Module, kind_of: dict[tuple[type, Any], str | None]) -> None:
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(weight, Tensor) or weight.ndim != 1 or epsilon is None:
            return
        rms_norm, key = self.kernels.rms_norm, (type(module), weight.dtype)
        if key not in kind_of:
            probe = _random(weight, 4, weight.shape[0])
            kinds = {"llama": False, "gemma": True}
            kind_of[key] = next(
                (k for k, g in kinds.items() if _same(rms_norm(probe, weight, epsilon, g), module(probe))), None
            )
        kind = kind_of[key]
        if kind is not None:
            gemma = kind == "gemma"
            self.forwards.append((module, lambda x: rms_norm(x, weight, epsilon, gemma)))

    def _gated_norm(self, module: Any, kind_of: dict[tuple[type, Any], str | None]) -> None:
        weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not isinstance(weight, Tensor) or weight.ndim != 1 or epsilon is None:
            return
        columns = weight.shape[0]
        parts = getattr(module, "n_groups", columns // getattr(module, "group_size", columns))
        kernel = self.kernels.RECURRENT["gated norm"]
        key = (type(module), weight.dtype)
        if key not in kind_of:
            probe, gate = (scale * _random(weight, 4, columns) for scale in SCALES)
            # Mamba's norm takes a scan's result in float32.
            kinds = {"silu": probe, "sigmoid": probe, "first": probe.float()}
            try:
                kind_of[key] = next(
                    (
                        kind
                        for kind, x in kinds.items()
                        if _same(kernel(module, epsilon, kind, parts, x, gate), module(x, gate), _roundings(x))
                    ),
                    None,
                )
            except (TypeError, RuntimeError):  # another signature
                kind_of[key] = None
        kind = kind_of[key]
        if kind is not None:
            self.forwards.append((module, partial(kernel, module, epsilon, kind, parts)))

    def _gated(self, module: Any, kind_of: dict[tuple[type, Any], str | None]) -> None:
        def fused(x: Tensor) -> Tensor:
            down: Tensor = module.down_proj(self.kernels.silu_mul(module.gate_proj(x), module.up_proj(x)))
            return down

        weight = module.gate_proj.weight
        key = (type(module), weight.dtype)
        if key not in kind_of:
            probes = [scale * _random(weight, 4, weight.shape[1]) for scale in SCALES]
            same = not hasattr(module, "act_fn") or is_silu(module.act_fn, weight.device)
            kind_of[key] = "gated" if same and all(_same(fused(probe), module(probe)) for probe in probes) else None
        if kind_of[key] is not None:
            self.forwards.append((module, fused))

    def _experts(self, module: Any, kind_of: dict[tuple[type, Any], str | None]) -> None:
        original, kernel = module.forward, self.kernels.MIXTURE["experts"]

        def fused(silu: bool, x: Tensor, *rest: Any, **named: Any) -> Any:
            if named or len(rest) != 2 or x.ndim != 2 or rest[0].ndim != 2 or rest[0].shape != rest[1].shape:
                return original(x, *rest, **named)
            return kernel(module, silu, x, *rest)

        weight = module.down_proj
        key = (type(module), weight.dtype)
        if key not in kind_of:
            count = weight.shape[0]
            x = _random(weight, 6, weight.shape[2 if module.is_transposed else 1])
            others = int(getattr(module, "_is_expert_parallel", False))  # one more index: experts of other ranks
            ids = _random(weight, 6, count + others).argsort(-1)[:, : min(2, count)]
            weights = _random(weight, *ids.shape).sigmoid()
            silu = module.has_gate and _gates_by_silu(module, weight)
            same = all(
                _same(fused(silu, scale * x, ids, weights), original(scale * x, ids, weights), _roundings(weight))
                for scale in SCALES
            )
            kind_of[key] = None if not same else "silu" if silu else "own"
        kind = kind_of[key]
        if kind is not None:
            self.forwards.append((module, partial(fused, kind == "silu")))

    def _router(self, module: Any, kind_of: dict[tuple[type, Any], str | None]) -> None:
        """A router that takes the top k of a softmax over its logits, and may normalise them."""
        weight, kernel = module.weight, self.kernels.MIXTURE["router"]

        def fused(normed: bool, dtype: torch.dtype, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(x.reshape(-1, weight.shape[1]), module.weight)  # read here: an adapter may change it
            return logits, *kernel(logits, module.top_k, normed, dtype)

        kinds = {
            f"{normed} {dtype}": (normed, dtype) for normed in (True, False) for dtype in (weight.dtype, torch.float32)
        }
        key = (type(module), weight.dtype)
        if key not in kind_of:
            probe = _random(weight, 16, weight.shape[1])
            expected = module(probe)
            kind_of[key] = next((k for k, how in kinds.items() if _same_choice(fused(*how, probe), expected)), None)
        kind = kind_of[key]
        if kind is not None:
            self.forwards.append((module, partial(fused, *kinds[kind])))


def are_experts(module: Any) -> bool:
    """Whether they are written as in transformers, so that one function can replace another."""
    marked = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "down_proj"))
    if not marked:
        return False
    weights = (getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None), module.down_proj)
    return all(type(weight) is nn.Parameter and weight.ndim == 3 for weight in weights)


def _is_router(module: nn.Module) -> bool:
    """Has a weight and nothing else: a bias or a correction that is still zero would not show in a trial."""
    weight = getattr(module, "weight", None)
    names_choices = type(module).__name__.endswith("Router") and isinstance(getattr(module, "top_k", None), int)
    if not names_choices or len([*module.parameters(), *module.buffers()]) != 1:
        return False
    return type(weight) is nn.Parameter and weight.ndim == 2 and weight.shape[0] <= MOST_EXPERTS


def is_silu(activation: Call, device: torch.device | str = "cpu") -> bool:
    """Tried separately, in float32: with small weights in half precision a whole layer is too coarse to distinguish it
    from other activations."""
    x = torch.linspace(-30, 30, 256, device=device)
    return _same(activation(x), F.silu(x), 64)


def _gates_by_silu(module: Any, like: Tensor) -> bool:
    """The same for experts, whose gate is a method: silu(first half) * second half, of any size."""
    gate = torch.linspace(-30, 30, 256, device=like.device)
    up = gate.flip(0)
    return _same(module._apply_gate(torch.cat([gate, up])[None]), (F.silu(gate) * up)[None], 64)


def _same_choice(result: tuple[Tensor, ...], expected: Any) -> bool:
    """Of experts with equal logits, either may be chosen."""
    if not isinstance(expected, tuple) or len(expected) != 3 or not all(isinstance(x, Tensor) for x in expected):
        return False
    same_types = all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(result, expected, strict=True))
    (logits, values, ids), (their_logits, their_values, their_ids) = result, expected
    return (
        same_types
        and _same(logits, their_logits)
        and _same(values, their_values)
        and _same(logits.gather(1, ids), logits.gather(1, their_ids))
    )


def _looks_at_length(module: nn.Module) -> bool:
    original = getattr(module, "original_inv_freq", None)
    return getattr(module, "rope_type", None) in SHIFTING and isinstance(original, Tensor)


def _short_rotary(rotary: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Its own forward pass without the check of the furthest position, which would synchronise with the GPU: no
    sequence reaches the positions where its frequencies change (models/positions.py)."""
    rotary.original_inv_freq = rotary.inv_freq = rotary.original_inv_freq.to(x.device)
    cos_sin: tuple[Tensor, Tensor] = inspect.unwrap(type(rotary).forward)(rotary, x, position_ids)
    return cos_sin


def _is_gated(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))


def _rotary_or(kernels: Kernels, original: Call) -> Call:
    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> Any:
        packed = query.shape[0] == 1 and cos.shape[-1] == query.shape[-1]
        if rest or named or not packed or cos.requires_grad:
            return original(query, key, cos, sin, *rest, **named)
        return kernels.rotary(query, key, cos, sin)

    return rotate


def _delta_or(original: Call, kernel: Call) -> Call:
    """One token or many. A state that the kernel uses is updated in place."""

    def rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *rest: Any,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        **named: Any,
    ) -> Any:  # fmt: skip
        state = initial_state
        takes = state is None or (state.dtype == torch.float32 and state.is_contiguous() and output_final_state)
        learning = torch.is_grad_enabled() and (state is not None or output_final_state)
        if rest or not takes or learning or key.shape[2] != value.shape[2] or query.shape != key.shape:
            return original(
                query, key, value, g, beta, *rest, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **named,
            )  # fmt: skip
        out, last = kernel(original, query, key, value, g, beta, state, use_qk_l2norm_in_kernel)
        return out, last if output_final_state else None

    return rule


def _scan_or(original: Call, kernel: Call) -> Call:
    """Replaces `mamba2_chunk_scan`. A state that the kernel uses is updated in place."""

    def scan(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
        dt_bias: Tensor | None = None, initial_states: Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = NO_LIMITS, return_final_states: bool = False, **named: Any,
    ) -> Any:  # fmt: skip
        state = initial_states
        takes = state is None or (state.dtype == torch.float32 and state.is_contiguous() and return_final_states)
        learning = torch.is_grad_enabled() and (state is not None or return_final_states)
        plain = D is None or dt_bias is None or not dt_softplus or any(value is not None for value in named.values())
        if plain or not takes or learning:
            return original(
                hidden_states, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias, initial_states=state,
                dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=return_final_states, **named,
            )  # fmt: skip

        def alone(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
            out: Tensor = original(
                x, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias, dt_softplus=True, dt_limit=dt_limit
            )
            return out

        out, last = kernel(alone, (hidden_states, dt, A, B, C, D, dt_bias), state, dt_limit)
        return (out, last) if return_final_states else out

    return scan


def _state_step_or(original: Call, kernel: Call) -> Call:
    """Replaces `mamba2_selective_state_update`, which updates the state in place and takes per-head inputs repeated for
    each of the head's values. Its output is float32, as that of a scan."""

    def step(
        state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None,
        dt_limit: tuple[float, float] = NO_LIMITS, **named: Any,
    ) -> Any:  # fmt: skip
        takes = state.dtype == torch.float32 and state.is_contiguous() and A.ndim == 3 and A.stride()[1:] == (0, 0)
        repeated = all(x is not None and x.stride(-1) == 0 for x in (dt, D, dt_bias))
        if named or not takes or not repeated or not dt_softplus or torch.is_grad_enabled():
            limits = {} if dt_limit == NO_LIMITS else {"dt_limit": dt_limit}
            return original(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **limits, **named)
        x, step, key, query = (tensor[:, None] for tensor in (hidden_states, dt[..., 0], B, C))
        out = kernel(x, step, A[:, 0, 0], key, query, D[:, 0], dt_bias[:, 0], state, dt_limit)[:, 0]  # type: ignore[index]
        return out if z is None else out * F.silu(z)

    return step


def _whole_convolution_or(original: Call, kernel: Call) -> Call:
    """Replaces `causal_conv1d_fn`."""

    def convolved(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **named: Any
    ) -> Any:  # fmt: skip
        if (
            activation not in (None, "silu", "swish")
            or hidden_states.dtype != weight.dtype
            or named.get("seq_idx") is not None
        ):
            return original(hidden_states, weight, bias, activation=activation, **named)
        return kernel(original, hidden_states, weight, bias, activation)

    return convolved


def _convolution_or(original: Call, kernel: Call) -> Call:
    """Replaces `causal_conv1d_update`, which updates the state in place."""

    def step(
        hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:  # fmt: skip
        takes = hidden_states.shape[-1] == 1 and conv_state.is_contiguous() and conv_state.shape[-1] == weight.shape[-1]
        if not takes or activation not in (None, "silu", "swish") or torch.is_grad_enabled():
            return original(hidden_states, conv_state, weight, bias, activation)
        return kernel(hidden_states, conv_state, weight, bias, activation is not None)

    return step


REPLACED = {
    "torch_recurrent_gated_delta_rule": _delta_or, "torch_chunk_gated_delta_rule": _delta_or,
    "recurrent_kimi_delta_attention": _delta_or, "chunk_kimi_delta_attention": _delta_or,
    "mamba2_selective_state_update": _state_step_or, "mamba2_chunk_scan": _scan_or,
    "causal_conv1d_update": _convolution_or, "causal_conv1d_fn": _whole_convolution_or,
}  # fmt: skip
"""Functions of transformers' recurrent layers, and how a kernel replaces each."""


def _same_step(name: str, original: Call, fused: Call, trunk: nn.Module) -> bool:
    """Compares output and state on random input of a recurrence or a convolution."""
    like = next(trunk.parameters())
    try:
        with torch.no_grad():
            return all(
                _same(a, b, _roundings(a))
                for a, b in zip(_tried(name, fused, like), _tried(name, original, like), strict=True)
            )
    except (TypeError, RuntimeError):  # another signature
        return False


def _tried(name: str, function: Call, like: Tensor) -> tuple[Tensor, ...]:
    if name.startswith("causal_conv1d"):
        x, weight, bias, tail = (_random(like, *shape) for shape in ((3, 20, 1), (20, 4), (20,), (3, 20, 4)))
        if name == "causal_conv1d_update":
            return function(x, tail, weight, bias, "silu"), tail
        return (function(_random(like, 3, 20, 9), weight, bias, activation="silu"),)
    length = 70 if "chunk" in name else 1  # more than a chunk
    heads = (3, length, 2)
    if name.startswith("mamba2"):
        return _tried_state_space(function, like.float(), length)
    query, key, value = (_random(like, *heads, size) for size in (16, 16, 24))
    decay = _random(like, *heads, *([16] if "kimi" in name else [])).sigmoid()
    out, last = function(
        query, key, value, g=-decay.float(), beta=_random(like, *heads).sigmoid(),
        initial_state=_random(like, 3, 2, 16, 24).float(), output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out, last


def _tried_state_space(function: Call, like: Tensor, length: int) -> tuple[Tensor, ...]:
    """In float32: in half precision transformers rounds steps and outputs, which the kernels of Mamba's authors do
    not."""
    x, step, state = (_random(like, *shape) for shape in ((3, length, 2, 24), (3, length, 2), (3, 2, 24, 16)))
    key, query = _random(like, 2, 3, length, 1, 16)
    rate, skip, bias = _random(like, 3, 2)
    rate = -rate.exp()
    if length > 1:
        out, last = function(
            x, step, rate, key, query, chunk_size=32, D=skip, dt_bias=bias, dt_softplus=True, initial_states=state,
            return_final_states=True,
        )  # fmt: skip
        return out, last
    step, skip, bias = (tensor[..., None].expand(*tensor.shape, 24) for tensor in (step[:, 0], skip, bias))
    rate = rate[:, None, None].expand(-1, 24, 16)
    out = function(state, x[:, 0], step, rate, key[:, 0], query[:, 0], skip, dt_bias=bias, dt_softplus=True)
    return out, state


def _same_rotary(kernels: Kernels, original: Call, like: Tensor) -> bool:
    query, key = (_random(like, 1, 5, n, PROBED).transpose(1, 2) for n in (4, 2))
    angle = _random(like, 1, 5, PROBED // 2).repeat(1, 1, 2).float()
    cos, sin = angle.cos().to(like.dtype), angle.sin().to(like.dtype)
    try:
        expected = original(query, key, cos, sin)
    except (TypeError, RuntimeError):  # another signature or another layout of the angles
        return False
    return all(_same(a, b) for a, b in zip(kernels.rotary(query, key, cos, sin), expected, strict=True))


def _random(like: Tensor, *shape: int) -> Tensor:
    """Drawn from a separate generator: what a model samples later does not depend on the number of trials."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(*shape, generator=generator, device=like.device).to(like.dtype)


def _roundings(x: Tensor) -> int:
    """Tolerance for sums: float32 ones round at every step."""
    return 64 if x.dtype == torch.float32 else 4


def _same(result: Tensor, expected: Any, roundings: int = 4) -> bool:
    """Equal up to rounding of the dtype."""
    if not isinstance(expected, Tensor) or result.shape != expected.shape:
        return False
    scale = expected.float().abs().max().clamp_min(1e-6)
    tolerance = roundings * torch.finfo(expected.dtype).eps
    return bool((result.float() - expected.float()).abs().max() <= tolerance * scale)
