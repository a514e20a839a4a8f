"""The inference core: packed forward, KV blocks with a prefix tree, scheduler, sampler, engine."""

from plaudit.core.engine import Engine
from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.core.sequence import Update
from plaudit.core.stats import Stats

__all__ = ["Engine", "SamplingParams", "Stats", "Update"]
