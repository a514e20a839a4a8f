"""Paths that grow level by level, as in a tree search: sampled and scored in whole batches, on an engine's KV pool.

A path carries its place in the prefix tree, the node in which it ends. So no path is looked up by all of its tokens, no
request is created for it, and its children start to decode at once: they copy the last block of the path and compute
its last token first. Samples are bit-equal to those of `Engine.generate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch

from plaudit.core.device.backend import Copy, DecodeBatch, Decoded, Span, copies_into
from plaudit.core.draws import padded
from plaudit.core.intake import Intake
from plaudit.core.kv.prefix import Chain, Node, Place
from plaudit.core.model.packing import send
from plaudit.core.model.readouts import PendingReadout, Read, Reading, take
from plaudit.core.runner import Runner
from plaudit.core.sampling.noise import row_key
from plaudit.core.sampling.sampler import Sampler
from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.core.scheduler import WORTH_COPYING
from plaudit.core.text import StopTokens, stop_tokens
from plaudit.errors import RequestError
from plaudit.records import FinishReason, Sample

T = TypeVar("T")


@dataclass(slots=True)
class Continuation:
    """One sample. logprob: the mean over its tokens, at temperature 1. place: the end of the extended path."""

    tokens: tuple[int, ...]
    finish: FinishReason
    logprob: float
    place: Place | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _End:
    """What ends a sample: one of the tokens in `stops`, or a stop string. The device pauses a row at any of the
    `pauses`, the tokens of both; the host then looks at its text."""

    stops: frozenset[int]
    text: StopTokens | None
    pauses: frozenset[int]

    def reached(self, drawn: Sequence[int]) -> bool:
        last = drawn[-1]
        return last in self.stops or (self.text is not None and last in self.pauses and self.text.complete(drawn))


@dataclass(slots=True, eq=False)
class _Row:
    """A sample in progress. tokens: the path and the tokens drawn; the first `computed` have their KV in the chain."""

    path: int
    tokens: list[int]
    begin: int  # where the path ends
    key: int
    left: int
    params: SamplingParams
    end: _End
    place: Place | None
    raws: list[float] = field(default_factory=list)
    chain: Chain[Node] = field(default_factory=Chain)
    computed: int = 0
    finish: FinishReason | None = None


class Branches:
    """Branches of one engine, which must not be used otherwise meanwhile. `exclusively` runs what changes the engine's
    pool and tree, with the tree's key."""

    def __init__(self, runner: Runner, intake: Intake, exclusively: Callable[[Callable[[Hashable], T]], T]) -> None:
        self._runner = runner
        self._intake = intake
        self._exclusively: Callable[[Callable[[Hashable], Any]], Any] = exclusively
        self._size = runner.backend.block_size
        self._sampler: tuple[list[_Row], Sampler] | None = None

    def sample(
        self, paths: Sequence[Sequence[int]], places: Sequence[Place | None], params: Sequence[SamplingParams],
        seeds: Sequence[int], steps: int | None = None,
    ) -> list[list[Continuation]]:  # fmt: skip
        """What `Engine.generate` gives for these prompts. What the host must check after every token is rejected:
        constraints, and stop strings for which `stop_tokens` has no ids. `steps`: the length that most samples are
        expected to have: after so many, those that have ended make way for others."""
        ends: dict[int, _End] = {}
        rows: list[_Row] = []
        for number, (path, place, options, seed) in enumerate(zip(paths, places, params, seeds, strict=True)):
            if id(options) not in ends:
                ends[id(options)] = self._end(options)
            tokens = self._intake.tokens(path) if place is None else list(path)
            most = self._intake.most(len(tokens), options)
            rows += [
                _Row(number, tokens.copy(), len(tokens), row_key(seed, i), most, options, ends[id(options)], place)
                for i in range(options.n)
            ]
        continuations: dict[_Row, Continuation] = self._exclusively(lambda key: self._sample(key, rows, steps))
        return [[continuations[row] for row in own] for _, own in groupby(rows, lambda row: row.path)]

    def read(
        self, sequences: Sequence[Sequence[int]], places: Sequence[Place | None], positions: Sequence[int],
        columns: Sequence[int] | None, hidden: bool,
    ) -> tuple[np.ndarray, list[Place | None]]:  # fmt: skip
        """What `Engine.score` returns for each sequence at one position, (sequences, values), and each sequence's
        place. `places`: of the beginnings of the sequences, where they are known."""
        ids = [self._intake.tokens(*pair) for pair in zip(sequences, map(_checked, places), strict=True)]
        first = self._intake.reads(ids[:1], [positions[:1]], columns)[0]
        read = Read(first.what, (), first.columns, hidden)
        for sequence, position in zip(ids, positions, strict=True):
            if not 0 <= position < len(sequence):
                raise RequestError(f"position {position} must lie in 0..{len(sequence) - 1}, the sequence's tokens")
        longest = max(map(len, ids))
        self._intake.check_pool(longest, f"a sequence of {longest} tokens")
        values, ends = self._exclusively(lambda key: self._read(key, ids, places, positions, read))
        if not np.isfinite(values).all():
            raise RequestError(f"{self._runner.decoder.name} gave scores that are not finite numbers")
        return values, ends

    def place(self, tokens: Sequence[int]) -> Place | None:
        """The place of a path that was computed by other calls."""
        place: Place | None = self._exclusively(lambda key: self._runner.tree.pin_path(key, tokens, len(tokens)))
        return place

    def continuation(self, sample: Sample) -> Continuation:
        """The same record for a sample of `Engine.generate`."""
        error = None if sample.error is None else sample.error.message
        place = self.place([*sample.prompt_ids, *sample.token_ids[:-1]]) if error is None else None
        logprob = sum(sample.raw_logprobs) / max(1, len(sample.token_ids))
        return Continuation(sample.token_ids, sample.finish_reason, logprob, place, error)

    def free_paths(self, places: Sequence[Place]) -> int:
        """Free the KV of pruned paths at once; returns the number of blocks freed. Without it they are evicted when the
        pool is full."""
        return self._runner.free_paths(places)

    # Sampling

    def _end(self, params: SamplingParams) -> _End:
        stops = self._intake.check_params(params)
        if params.json_schema is not None or params.regex is not None:
            raise RequestError("branches do not constrain samples by json_schema or regex: use Engine.generate")
        if not params.stop:
            return _End(stops, None, stops)
        text = stop_tokens(self._intake.tokenizer, params.stop)
        if params.min_tokens:
            raise RequestError(
                f"branches do not support min_tokens = {params.min_tokens} together with stop strings: use "
                "Engine.generate"
            )
        if text.ids is None:
            raise RequestError(
                f"the stop strings {list(params.stop)} have no list of token ids at which they can be complete: use "
                "Engine.generate, which checks the text after every token"
            )
        return _End(stops, text, stops | text.ids)

    def _sample(self, key: Hashable, rows: list[_Row], steps: int | None) -> dict[_Row, Continuation]:
        waiting, running, continuations = deque(rows), list[_Row](), dict[_Row, Continuation]()
        most = self._runner.scheduler.window if steps is None else min(self._runner.scheduler.window, steps)
        while waiting or running:
            begun = len(waiting)
            self._admit(key, waiting, running)
            # The last rows of a level are few and end soon: most of a whole window would be computed in vain.
            self._decode(running, self._window(key, waiting, running, most if len(waiting) < begun else -(-most // 8)))
            for row in running:
                if row.finish is not None:
                    continuations[row] = self._ended(key, row)
            running = [row for row in running if row.finish is None]
        self._sampler = None
        return continuations

    def _admit(self, key: Hashable, waiting: deque[_Row], running: list[_Row]) -> None:
        """Start rows while there are blocks: compute what is missing of their paths, except the last token."""
        batch, runner = _Batch(self._runner, key), self._runner
        most = max(1, runner.scheduler.max_running - len(runner.scheduler.running))
        while waiting and len(running) < most:
            row = waiting[0]
            last = len(row.tokens) - 1
            upto = last + min(row.left, runner.scheduler.look_every)
            chain = batch.begin(row.tokens, last, last, upto, row.place)
            if chain is None:
                break
            row.chain, row.computed = chain, last
            running.append(waiting.popleft())
        if not running:
            self._refuse(len(waiting[0].tokens))
        batch.compute([])

    def _window(self, key: Hashable, waiting: deque[_Row], running: list[_Row], most: int) -> int:
        """The number of decode steps of one call, with blocks allocated for them; where blocks are short the last rows
        wait."""
        scheduler = self._runner.scheduler
        steps = min(most, max(row.left for row in running))
        while True:
            ends = [row.computed + min(steps, row.left) for row in running]
            needs = [-(-end // self._size) - len(row.chain.blocks) for row, end in zip(running, ends, strict=True)]
            blocks = _allocate(self._runner, sum(need for need in needs if need > 0))
            if blocks is not None:
                break
            if steps > scheduler.look_every:
                steps = max(scheduler.look_every, steps // 2)
            elif len(running) > 1:
                row = running.pop()
                self._leave(key, row)
                waiting.appendleft(row)
            elif steps > 1:
                steps = 1
            else:
                self._refuse(len(running[0].tokens))
        for row, need in zip(running, needs, strict=True):
            if need > 0:
                row.chain.blocks += blocks[:need]
                del blocks[:need]
        return steps

    def _decode(self, running: list[_Row], steps: int) -> None:
        runner = self._runner
        pieces = list(runner.backend.decode(self._columns(running), steps))
        alive = np.concatenate([piece.alive.numpy() for piece in pieces])
        counts = alive.sum(axis=0).tolist()
        tokens, raws = (_by_row(pieces, name) for name in ("tokens", "raw_logprobs"))
        sound = all(bool(piece.raw_logprobs.isfinite().all()) for piece in pieces)
        for row, count, drawn, raw in zip(running, counts, tokens, raws, strict=True):
            row.tokens += drawn[:count]
            row.raws += raw[:count]
            row.left -= count
            row.computed += count
            if not sound and any(value != value for value in raw[:count]):
                row.finish = "error"
            elif row.end.reached(row.tokens[row.begin :]):
                row.finish = "stop"
            elif row.left == 0:
                row.finish = "length"
        runner.tokens_computed += sum(counts)
        runner.steps += 1

    def _columns(self, running: list[_Row]) -> DecodeBatch:
        device = self._runner.decoder.device
        lengths = [len(row.tokens) for row in running]
        numbers = (
            [row.tokens[-1] for row in running], [length - 1 for length in lengths],
            [length - row.begin for row, length in zip(running, lengths, strict=True)], [row.left for row in running],
        )  # fmt: skip
        tokens, positions, drawn, left = send(np.array(numbers, dtype=np.int64), device)
        return DecodeBatch(
            tokens=tokens, positions=positions, drawn=drawn, left=left,
            alive=torch.ones(len(running), dtype=torch.bool, device=device),
            stops=send(padded([row.end.pauses for row in running], -1), device),
            tables=send(padded([row.chain.blocks for row in running], 0), device),
            sampler=self._sampler_of(running), lengths=lengths,
        )  # fmt: skip

    def _sampler_of(self, running: list[_Row]) -> Sampler:
        """The same object for the same rows, so that a back end can reuse what it has prepared for them."""
        if self._sampler is None or self._sampler[0] != running:
            params, keys, ends = ([getattr(row, name) for row in running] for name in ("params", "key", "end"))
            self._sampler = list(running), Sampler(params, keys, [end.stops for end in ends], self._runner.hashes)
        sampler = self._sampler[1]
        sampler.begin([row.tokens for row in running], [row.begin for row in running], [None] * len(running))
        return sampler

    def _ended(self, key: Hashable, row: _Row) -> Continuation:
        assert row.finish is not None
        drawn = tuple(row.tokens[row.begin :])
        if row.finish == "error":
            _release(self._runner, row.chain)
            return Continuation(
                drawn, "error", 0.0, None, f"{self._runner.decoder.name} gave logits that are not numbers"
            )
        return Continuation(drawn, row.finish, sum(row.raws) / len(drawn), self._leave(key, row))

    def _leave(self, key: Hashable, row: _Row) -> Place | None:
        """Hand its KV over to the tree."""
        tree = self._runner.tree
        tree.extend(key, row.chain, row.tokens, row.computed, stored=True)
        place = tree.pin_path(key, row.tokens, row.computed, row.chain) if row.finish is not None else None
        _release(self._runner, row.chain)
        row.chain = Chain()
        return place

    def _refuse(self, tokens: int) -> None:
        pool = self._runner.pool
        raise RequestError(
            f"a path of {tokens} tokens and one more do not fit in the KV pool: of its {pool.blocks} blocks of "
            f"{self._size} tokens {pool.in_use} are in use; raise kv_bytes"
        )

    # Reading

    def _read(
        self, key: Hashable, sequences: Sequence[list[int]], places: Sequence[Place | None], positions: Sequence[int],
        read: Read,
    ) -> tuple[np.ndarray, list[Place | None]]:  # fmt: skip
        readouts: list[PendingReadout] = []
        ends: list[Place | None] = []
        while (first := len(ends)) < len(sequences):
            batch = _Batch(self._runner, key)
            for tokens, place, position in zip(sequences[first:], places[first:], positions[first:], strict=True):
                if batch.begin(tokens, position, len(tokens), len(tokens), place) is None:
                    break
            if not batch.chains:
                self._refuse(len(sequences[first]))
            count = len(batch.chains)
            rows = batch.compute(positions[first : first + count])
            readouts.append(take(self._runner.decoder, rows, [Reading(read, (), range(count))]))
            for tokens, chain in zip(sequences[first:], batch.chains, strict=False):
                ends.append(self._runner.tree.pin_path(key, tokens, len(tokens), chain))
                _release(self._runner, chain)
        self._runner.steps += len(readouts)
        return np.concatenate([readout.arrays()[0] for readout in readouts]), ends


class _Batch:
    """Paths that are computed in one step, up to its token budget."""

    def __init__(self, runner: Runner, key: Hashable) -> None:
        self.runner, self.key = runner, key
        self.chains: list[Chain[Node]] = []
        self._left = runner.scheduler.budget
        self._spans: list[tuple[list[int], int, Chain[Node]]] = []  # tokens to compute, and how many are before them
        self._copies: dict[int, list[Copy]] = {}
        self._sources: dict[int, Node] = {}  # of copies, by block

    def begin(
        self, tokens: list[int], share: int, compute: int, upto: int, place: Place | None
    ) -> Chain[Node] | None:  # fmt: skip
        """A chain with blocks for `upto` tokens, of which the first `compute` will be computed: at most `share` of them
        come from the tree. None if the pool or the budget is used up."""
        tree, pool, size = self.runner.tree, self.runner.pool, self.runner.backend.block_size
        match = tree.match(self.key, tokens, share, place)
        source, copied = match.partial, match.partial_tokens
        if source is None or (not match.nodes and copied < WORTH_COPYING):
            source, copied = None, 0
        have = len(match.nodes) * size + copied
        if compute - have > self._left and self._spans:
            return None
        chain = Chain([node.block for node in match.nodes], list(match.nodes))
        for block in chain.blocks:
            pool.retain(block)
        pinned = source is not None and source.block not in self._sources
        if source is not None and pinned:  # so that the copy's allocation does not evict it
            pool.retain(source.block)
            self._sources[source.block] = source
        own = _allocate(self.runner, -(-upto // size) - len(chain.blocks))
        if own is None and source is not None and pinned:  # then its block may be the one that is missing
            self._unpin(source)
            source, have = None, len(match.nodes) * size
            own = _allocate(self.runner, -(-upto // size) - len(chain.blocks))
        if own is None:
            _release(self.runner, chain)
            return None
        chain.blocks += own
        if source is not None:
            self._copies[own[0]] = copies_into(own[0], source.block, copied, self._copies)
        if have < compute:
            self._spans.append((tokens[have:compute], have, chain))
            self._left -= compute - have
            tree.extend(self.key, chain, tokens, compute, stored=False)  # what begins after it can share it
        self.runner.scheduler.tokens_shared += have
        self.chains.append(chain)
        return chain

    def compute(self, positions: Sequence[int]) -> torch.Tensor:
        """The rows at these positions, one per chain; empty without positions."""
        backend, budget = self.runner.backend, self.runner.scheduler.budget
        copies = [copy for each in self._copies.values() for copy in each]
        rows = torch.empty(0)
        spans = [Span(tokens, start, chain.blocks) for tokens, start, chain in self._spans]
        if positions:
            spans = [Span(s.tokens, s.start, s.blocks, [at - s.start]) for s, at in zip(spans, positions, strict=True)]
        while len(spans) == 1 and len(spans[0].tokens) > budget and (not positions or spans[0].wanted[0] >= budget):
            spans = self._pieces(spans[0], budget, copies)
            copies = []
        if spans:
            rows = backend.forward(spans, copies)
        elif copies:
            backend.copy(copies)
        self.runner.tokens_computed += sum(len(tokens) for tokens, _, _ in self._spans)
        for node in list(self._sources.values()):
            self._unpin(node)
        return rows

    def _pieces(self, span: Span, budget: int, copies: list[Copy]) -> list[Span]:
        """For a path longer than the budget: computes its first tokens, returns the rest."""
        self.runner.backend.forward([Span(span.tokens[:budget], span.start, span.blocks)], copies)
        later = [at - budget for at in span.wanted]
        return [Span(span.tokens[budget:], span.start + budget, span.blocks, later)]

    def _unpin(self, node: Node) -> None:
        del self._sources[node.block]
        self.runner.pool.release(node.block)
        self.runner.tree.released([node])


def _checked(place: Place | None) -> int:
    """The number of tokens of a path that were validated when they were new."""
    return 0 if place is None else place.tokens


def _allocate(runner: Runner, count: int) -> list[int] | None:
    """`count` blocks, if that leaves one for each running sequence; otherwise None."""
    pool, reserve = runner.pool, len(runner.scheduler.running)
    if pool.free < count + reserve:
        runner.tree.evict(count + reserve - pool.free)
        if pool.free < count + reserve:
            return None
    return [pool.allocate() for _ in range(count)]


def _release(runner: Runner, chain: Chain[Node]) -> None:
    for block in chain.blocks:
        runner.pool.release(block)
    runner.tree.released(chain.nodes[-1:])  # something goes on from all others


def _by_row(pieces: Sequence[Decoded], name: str) -> list[list[Any]]:
    columns = np.concatenate([getattr(piece, name).numpy() for piece in pieces])
    rows: list[list[Any]] = np.ascontiguousarray(columns.T).tolist()
    return rows
