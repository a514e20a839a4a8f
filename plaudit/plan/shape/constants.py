"""Constants of all time formulas: few, physical, the same for every model, system and accelerator.

Fitted on published measurements with leave-one-group-out validation (benchmarks/planner_validation.py), then rounded.
`plaudit plan --calibrate` measures those of the local machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from plaudit.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Constants:
    bandwidth_share: float = 0.93
    """Share of peak memory bandwidth that long streaming reads reach, after refresh and row switches. GB200 was
    measured at 0.92."""
    gemm_share: float = 0.70
    """Share of the dense bf16 rate that large matmuls reach: the clock under load is below the data sheet's, and edge
    tiles are partly empty."""
    narrow_gemm_share: float = 0.70
    """The same for fp8 and fp4, where feeding the tensor cores and the scales costs more."""
    unpack_share: float = 0.45
    """Share of both rates, memory and compute, that weights reach in a format without hardware support (four bits on
    Hopper or MI300X): each weight is converted to bf16 in registers before use."""
    attention_share: float = 0.60
    """Share of the bf16 rate that fused attention reaches: the softmax between its two matmuls runs on other units."""
    layer_seconds: float = 61e-6
    """Fixed cost of one layer of a decode step: a dozen dependent kernels of 5 µs that fill no device, with or without
    CUDA graphs."""
    expert_layer_seconds: float = 80e-6
    """Additional cost of an MoE layer: routing, sorting, two more kernels and their synchronization."""
    step_seconds: float = 0.35e-3
    """Fixed cost of one decode step for any model: scheduling, sampling, stop checks, host work."""
    sequence_seconds: float = 8e-6
    """Host cost per sequence in a decode step: block table, token, stop check, detokenization."""
    link_share: float = 0.30
    """Share of a scale-up link that a layer's small collectives reach, sequential and without overlap."""
    bulk_link_share: float = 0.50
    """Share of any link's bandwidth that transfers of many megabytes reach."""
    hop_seconds: float = 75e-6
    """Latency of one collective that leaves the scale-up domain."""
    activation_passes: float = 5.0
    """Memory transfers per activation in a forward pass: written, read by the next operation, and copied, cast or
    sorted in between."""
    cache_passes: float = 1.0
    """Memory transfers of a sequence's keys and values in a decode step: one if kernels read them in place, three if
    they are gathered first."""
    launch_seconds: float = 1.5e-3
    """Host time to launch one layer's forward and backward kernels in training: the lower bound for small
    micro-batches."""
    expert_launch_seconds: float = 0.7e-3
    """The same for each expert on a device: its casts and matmuls are separate kernels."""
    switch_seconds: float = 9.0
    """Time to put a co-located engine to sleep and wake it: memory mapped and unmapped, caches allocated, graphs
    checked."""
    channel_factor: float = 1.0
    """Correction factor on the weight transfer times of the channel table: one unless fitted on a run."""
    packing_share: float = 0.80
    """Fill level of the fullest device's packed micro-batches if lengths differ: the other devices wait for it."""
    response_seconds: float = 5e-3
    """Host time per response between generation and training: text, rule, advantage, packing, logging."""
    reserve_bytes: float = 3.9e9
    """Memory of a process on a device: contexts, kernels and allocator slack 3.5 GB, collectives 0.4
    (aiconfigurator's)."""
    heap_factor: float = 1.0
    """Allocated bytes per byte of activations in use. 1 on a GPU, whose slack is part of the reserve; the malloc of a
    CPU splits freed memory and keeps the fragments, as calibration measures."""
    graph_bytes: float = 1.0e9
    """Memory of an engine's captured decode graphs."""
    length_spread: float = 1.0
    """Coefficient of variation of response lengths, where only the mean is known."""

    def changed(self, overrides: Mapping[str, float]) -> Constants:
        names = [field.name for field in fields(self)]
        for name, value in overrides.items():
            if name not in names:
                raise ConfigError(f"unknown constant {name!r}; {nearest(name, names)}")
            if not value > 0:
                raise ConfigError(f"constant {name} = {value}: expected more than zero")
        return replace(self, **overrides)
