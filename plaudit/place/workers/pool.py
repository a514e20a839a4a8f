"""Several engines as one: routes prompts to engines, and reroutes them when an engine fails.

A prompt is routed by least cost: to the engine with the fewest outstanding tokens, not counting the prefix of the
prompt that the engine has cached. Engines join and leave while others generate. A failed engine costs time only:
nothing of a failed call is used, and all its prompts go to the others, with their seeds.

    ready -> (fails) -> lost -> (answers again, or is restarted) -> stale -> (weights) -> ready
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.errors import BadReply, ChannelError, EngineError, EngineLost
from plaudit.records import Sample

BLOCK = 16  # tokens: block size of the remembered prefixes
REMEMBERED = 1 << 16  # prefixes per engine
FAILURES = (EngineError, ChannelError, BadReply)


class PoolEngine(Protocol):
    """version   of its weights; None while it must not generate. `generate` may be called from any thread."""

    name: str

    @property
    def version(self) -> int | None: ...

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], begun: list[list[Sample]] | None = None
    ) -> list[Sample]:
        """`begun`: as in `Engine.generate`. An engine that cannot continue samples never receives any."""

    def healthy(self) -> bool:
        """Whether it can generate a token now."""

    def close(self) -> None: ...


@dataclass(eq=False)
class Member:
    """outstanding   tokens that it has still to prefill and decode
    leaving       gets no new requests, and is closed when its current ones are done
    lost          why it gets no requests
    """

    engine: PoolEngine
    outstanding: float = 0.0
    calls: int = 0
    leaving: bool = False
    lost: str | None = None
    read: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def cached_tokens(self, beginnings: Sequence[int]) -> int:
        """How many tokens of a prompt it has cached."""
        count = 0
        for beginning in beginnings:
            if beginning not in self.read:
                break
            self.read.move_to_end(beginning)
            count += BLOCK
        return count

    def remember(self, beginnings: Sequence[int]) -> None:
        self.read.update(dict.fromkeys(beginnings))
        while len(self.read) > REMEMBERED:
            self.read.popitem(last=False)


class EnginePool:
    """`restart_lost` is called when no engine is left, and returns whether one is available again; None: engines
    cannot be restarted."""

    def __init__(self, engines: Sequence[PoolEngine] = (), restart_lost: Callable[[], bool] | None = None) -> None:
        self.members: list[Member] = []
        self.restart_lost = restart_lost
        self.version: int | None = None
        self._lock = threading.Lock()
        self._length: float | None = None  # average length of past responses
        for engine in engines:
            self.add(engine)

    def add(self, engine: PoolEngine) -> None:
        """It gets requests as soon as it has the same weights as the others."""
        with self._lock:
            if any(member.engine.name == engine.name for member in self.members):
                raise EngineError(f"the pool has an engine {engine.name} already: give each a unique name")
            self.members.append(Member(engine))

    def remove(self, name: str) -> None:
        """It finishes its current requests; then it is closed."""
        with self._lock:
            member = self._member(name)
            member.leaving = True
        self._close_if_done(member)

    def lose(self, name: str, why: str) -> None:
        with self._lock:
            self._member(name).lost = why

    def regain(self, name: str) -> None:
        """It answers again. Its cache is empty, and it has no weights until it is sent some."""
        with self._lock:
            member = self._member(name)
            member.lost, member.outstanding = None, 0.0
            member.read.clear()

    def new_version(self, version: int) -> None:
        """From now on only engines with this version get requests; their cached prefixes are invalid."""
        with self._lock:
            self.version = version
            for member in self.members:
                member.read.clear()

    def look(self) -> dict[str, str]:
        """Check that every engine generates a token; names and reasons of lost ones. One that answers again is
        stale."""
        lost: dict[str, str] = {}
        for member in list(self.members):
            if member.leaving:
                continue
            if not member.engine.healthy():
                member.lost = member.lost or "does not generate a token"
                lost[member.engine.name] = member.lost
            elif member.lost is not None:
                self.regain(member.engine.name)
        return lost

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams],
        begun: Sequence[list[Sample]] | None = None,
    ) -> list[Sample]:  # fmt: skip
        """As `Engine.generate`. Raises the request's error, or EngineLost when no engine is left."""
        done: dict[int, list[Sample]] = {}
        left = list(range(len(prompts)))
        while left:
            shares = self._share(left, prompts, params)
            if not shares:
                if self.restart_lost is not None and self.restart_lost():
                    continue
                raise EngineLost(f"no engine is left to generate: {self._reasons()}")
            with ThreadPoolExecutor(len(shares), thread_name_prefix="pool") as threads:
                futures = [threads.submit(self._ask, m, share, prompts, params, begun) for m, share in shares.items()]
                for future in futures:
                    done |= future.result()
            left = [index for index in left if index not in done]
        return [sample for index in range(len(prompts)) for sample in done[index]]

    def close(self) -> None:
        for member in self.members:
            member.engine.close()

    # Internal

    def _share(
        self, left: Sequence[int], prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> dict[Member, list[int]]:
        with self._lock:
            ready = [m for m in self.members if self._ready(m)]
            shares: dict[Member, list[int]] = {}
            for index in left if ready else ():
                starts = _prefix_hashes(prompts[index], params[index].salt)
                member = min(ready, key=lambda m: m.outstanding - m.cached_tokens(starts))
                member.outstanding += len(prompts[index]) - member.cached_tokens(starts) + self._expected(params[index])
                member.remember(starts)
                shares.setdefault(member, []).append(index)
            for member in shares:
                member.calls += 1
            return shares

    def _ready(self, member: Member) -> bool:
        has = member.engine.version
        return member.lost is None and not member.leaving and has is not None and self.version in (None, has)

    def _expected(self, params: SamplingParams) -> float:
        length = self._length if self._length is not None else float(params.max_tokens or 256)
        return params.n * length

    def _ask(
        self, member: Member, share: Sequence[int], prompts: Sequence[list[int]], params: Sequence[SamplingParams],
        begun: Sequence[list[Sample]] | None,
    ) -> dict[int, list[Sample]]:  # fmt: skip
        """The samples of each prompt; empty if the engine failed."""
        done: dict[int, list[Sample]] = {}
        try:
            request = [prompts[i] for i in share], [params[i] for i in share]
            going_on = None if begun is None else [begun[i] for i in share]
            samples = member.engine.generate(*request, going_on)
            for sample in samples:
                at = share[sample.group]
                done.setdefault(at, []).append(replace(sample, group=at))
        except FAILURES as error:
            self.lose(member.engine.name, str(error))
            done = {}
        finally:
            with self._lock:
                member.calls -= 1
                if member.calls == 0:
                    member.outstanding = 0.0
                if done:
                    lengths = [len(s.token_ids) for samples in done.values() for s in samples]
                    mean = sum(lengths) / len(lengths)
                    self._length = mean if self._length is None else 0.9 * self._length + 0.1 * mean
            self._close_if_done(member)
        return done

    def _close_if_done(self, member: Member) -> None:
        with self._lock:
            if not member.leaving or member.calls or member not in self.members:
                return
            self.members.remove(member)
        member.engine.close()

    def _member(self, name: str) -> Member:
        for member in self.members:
            if member.engine.name == name:
                return member
        raise EngineError(f"the pool has no engine {name}: it has {[m.engine.name for m in self.members]}")

    def _reasons(self) -> str:
        if not self.members:
            return "the pool is empty"
        reasons = []
        for member in self.members:
            has = member.engine.version
            stale = f"has weights of version {has}, expected {self.version}"
            reasons.append(f"{member.engine.name}: {member.lost or ('is leaving' if member.leaving else stale)}")
        return "; ".join(reasons)


def _prefix_hashes(prompt: Sequence[int], salt: str) -> list[int]:
    """A hash for every prefix of whole blocks."""
    hashes, state = [], hash(salt)
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        state = hash((state, *prompt[end - BLOCK : end]))
        hashes.append(state)
    return hashes
