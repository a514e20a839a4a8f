"""Prompts read by some engines and continued by others, each kind a pool that grows and shrinks by itself.

A prefill engine reads a prompt, draws the first token of each sample, and leaves the prompt's KV where a decode engine
can map it. The decode engine takes it in and goes on: its steps are never held up by a long prompt. The samples are
those of one engine. If a decode engine fails, another takes the same KV; if the KV is lost, it reads the prompt again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from plaudit.core import Engine, SamplingParams
from plaudit.core.sampling.noise import mix64
from plaudit.errors import RequestError
from plaudit.place.workers.kv_transfer import KV, Parcel, take
from plaudit.place.workers.pool import EnginePool
from plaudit.records import Sample

PIECE = 8  # prompts that go together: while one piece is decoded, the next is read


class CoreRole:
    """A core engine of this process that has one of the two roles. One call at a time."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self._lock = threading.Lock()

    @property
    def version(self) -> int | None:
        return self.engine.version

    def healthy(self) -> bool:
        with self._lock:
            return bool(self.engine.generate([[0]], SamplingParams(max_tokens=1, seed=0)))

    def close(self) -> None: ...


class PrefillEngine(CoreRole):
    """Gives samples of one token. Those that can go on have their prompt's parcel, which lives until it is released."""

    def __init__(self, name: str, engine: Engine) -> None:
        super().__init__(name, engine)
        self._parcels: dict[str, Parcel] = {}

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], begun: list[list[Sample]] | None = None
    ) -> list[Sample]:
        assert begun is None, "a prefill engine begins"
        with self._lock:
            samples = self.engine.generate(prompts, params)
            messages = [self._pack(prompt, option.salt) for prompt, option in zip(prompts, params, strict=True)]
        prompt_limit = self.engine.decoder.max_positions - 1
        return [
            replace(s, extra={**s.extra, KV: messages[s.group]}) if len(s.prompt_ids) < prompt_limit else s
            for s in samples
        ]

    def release(self, number: str) -> None:
        parcel = self._parcels.pop(number, None)
        if parcel is not None:
            parcel.close()

    def close(self) -> None:
        for number in list(self._parcels):
            self.release(number)

    def _pack(self, prompt: list[int], salt: str) -> dict[str, Any]:
        parcel = Parcel(self.engine.export_kv(prompt, salt))
        self._parcels[parcel.message["id"]] = parcel
        return parcel.message


class DecodeEngine(CoreRole):
    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], begun: list[list[Sample]] | None = None
    ) -> list[Sample]:
        with self._lock:
            for samples in begun or ():
                take(self.engine, samples[0].extra[KV])
            return self.engine.generate(prompts, params, begun)


class PrefillDecode:
    """Two pools as one engine."""

    def __init__(self, prefill: EnginePool, decode: EnginePool, *, seed: int = 0, piece: int = PIECE) -> None:
        self.prefill = prefill
        self.decode = decode
        self.piece = piece
        self._seed = seed
        self._number = 0

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Sample]:
        if len(prompts) != len(params):
            raise RequestError(f"{len(prompts)} prompts and {len(params)} SamplingParams: give one each")
        seeded = [self._seeded(option) for option in params]
        starts = range(0, len(prompts), self.piece)
        threads = 2 * max(1, len(self.prefill.members) + len(self.decode.members))
        with ThreadPoolExecutor(threads, thread_name_prefix="prefill-decode") as pool:
            pieces = [
                pool.submit(self._piece, at, list(prompts[at : at + self.piece]), seeded[at : at + self.piece])
                for at in starts
            ]
            return [sample for piece in pieces for sample in piece.result()]

    def new_version(self, version: int) -> None:
        self.prefill.new_version(version)
        self.decode.new_version(version)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        """Two engines draw one sample: they need one seed."""
        self._number += 1
        return params if params.seed is not None else replace(params, seed=mix64(self._seed ^ self._number) >> 1)

    def _piece(self, first: int, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sample]:
        begun = self.prefill.generate(prompts, [opening(option) for option in params])
        try:
            done = {(s.group, s.index): s for s in begun} | self._go_on(prompts, params, begun)
        finally:
            self._release({s.extra[KV]["id"] for s in begun if KV in s.extra})
        return [replace(without_kv(done[key]), group=first + key[0]) for key in sorted(done)]

    def _go_on(
        self, prompts: list[list[int]], params: list[SamplingParams], begun: Sequence[Sample]
    ) -> dict[tuple[int, int], Sample]:
        groups = unfinished(params, begun)
        live = sorted(groups)
        if not live:
            return {}
        samples = self.decode.generate([prompts[g] for g in live], [params[g] for g in live], [groups[g] for g in live])
        return {(live[s.group], s.index): replace(s, group=live[s.group]) for s in samples}

    def _release(self, numbers: set[str]) -> None:
        for member in self.prefill.members:
            if isinstance(member.engine, PrefillEngine):
                for number in numbers:
                    member.engine.release(number)


def opening(params: SamplingParams) -> SamplingParams:
    """The prefill engine's request: the first token."""
    return replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))


def unfinished(params: Sequence[SamplingParams], begun: Sequence[Sample]) -> dict[int, list[Sample]]:
    """Samples that go on, by prompt."""
    groups: dict[int, list[Sample]] = {}
    for sample in begun:
        if sample.finish_reason == "length" and KV in sample.extra and params[sample.group].max_tokens != 1:
            groups.setdefault(sample.group, []).append(sample)
    return groups


def without_kv(sample: Sample) -> Sample:
    return replace(sample, extra={name: value for name, value in sample.extra.items() if name != KV})
