"""The constants of all time formulas: few, physical, the same for every model, system and accelerator.

Fitted on published measurements, group by group against the others (benchmarks/planner_validation.py), then rounded.
`plaudit plan --calibrate` measures those of the machine at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from plaudit.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Constants:
    bandwidth_share: float = 0.93
    """Of peak memory bandwidth that long streaming reads reach: refresh, row switches. GB200 was measured at 0.92."""
    gemm_share: float = 0.70
    """Of the dense bf16 rate that large matrix products reach: the clock under load is below the one of the data sheet,
    and tiles leave edges."""
    narrow_gemm_share: float = 0.70
    """The same for fp8 and fp4, where feeding the units and the scales takes a larger part."""
    unpack_share: float = 0.45
    """Of both rates, reading and multiplying, that weights reach in a format the chip has no units for (four bits on
    Hopper or MI300X): each is widened to bf16 in registers before it is used."""
    attention_share: float = 0.60
    """Of the bf16 rate that fused attention reaches: the softmax between its two products runs on other units."""
    layer_seconds: float = 61e-6
    """Fixed cost of one layer of a decode step: a dozen dependent kernels of 5 µs that fill no device, graph or not."""
    expert_layer_seconds: float = 80e-6
    """What a layer with experts adds: routing, sorting, two more kernels and their joins."""
    step_seconds: float = 0.35e-3
    """Of one decode step, whatever the model: schedule, sample, stop tests, the host's turn."""
    sequence_seconds: float = 8e-6
    """Of one sequence in a decode step, on the host: its tables, its token, its stop test, its text."""
    link_share: float = 0.30
    """Of a scale-up link that the small collectives of a layer reach, one after the other and unhidden."""
    bulk_link_share: float = 0.50
    """Of any link that transfers of many megabytes reach."""
    hop_seconds: float = 75e-6
    """Latency of one collective that leaves the scale-up domain."""
    activation_passes: float = 5.0
    """How often each activation crosses between memory and chip in a forward pass: written, read by what follows, and
    copied, cast or sorted on the way."""
    cache_passes: float = 1.0
    """How often the keys and values of a sequence cross in a decode step: once where kernels read them in place, three
    times where they are gathered first."""
    launch_seconds: float = 1.5e-3
    """Host time to launch one layer's forward and backward kernels in training: the floor for small micro-batches."""
    expert_launch_seconds: float = 0.7e-3
    """The same for each expert that a device holds: its casts and products are kernels of their own."""
    switch_seconds: float = 9.0
    """To put a co-located engine to sleep and wake it: memory mapped and unmapped, caches made, graphs checked."""
    channel_factor: float = 1.0
    """Seconds of a transfer of weights over those of the channel's table: one unless a run says otherwise."""
    packing_share: float = 0.80
    """How full the packed micro-batches of the fullest device are when lengths differ: the others wait for it."""
    response_seconds: float = 5e-3
    """Host work on one response between generation and training: text, rule, advantage, packing, log."""
    reserve_bytes: float = 3.9e9
    """Of a process on a device: contexts, kernels and allocator slack 3.5 GB, collectives 0.4 (aiconfigurator's)."""
    heap_factor: float = 1.0
    """Bytes that an allocator holds for each of the activations in use. 1 for a GPU's, whose slack is in the reserve;
    the malloc of a CPU splits what is freed and keeps the pieces, as calibration measures."""
    graph_bytes: float = 1.0e9
    """Captured decode graphs of an engine."""
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
