"""Runs one step: plan, forward, sample, update the sequences."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from plaudit.core.device.backend import Backend, DecodeBatch, Decoded, Span
from plaudit.core.draws import accept, accept_all, by_row, note_prompt, padded
from plaudit.core.kv import handover
from plaudit.core.kv.handover import Handover
from plaudit.core.kv.prefix import Chain, Place
from plaudit.core.late import LateScores, scored
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import send
from plaudit.core.model.readouts import Reading, take
from plaudit.core.recurrent import scheduler_for
from plaudit.core.sampling.noise import token_hashes
from plaudit.core.sampling.sampler import Sampler
from plaudit.core.scheduler import Chunk, Plan
from plaudit.core.sequence import Sequence as Seq
from plaudit.core.sequence import Update
from plaudit.core.transaction import Transactional, transaction
from plaudit.records import ItemError

T = TypeVar("T")


class Runner(Transactional):
    """Owns the scheduler, the blocks and the tree, and computes on the back end. Every change of them is a transaction.
    `version` is the version of the weights."""

    def __init__(
        self, decoder: Decoder, backend: Backend, blocks: int, *, budget: int, max_running: int, look_every: int,
        window: int, tokenizer: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.decoder = decoder
        self.backend = backend
        self.scheduler = scheduler_for(
            backend, blocks, budget=budget, max_running=max_running, look_every=look_every, window=window
        )
        self.scheduler.overlaps = backend.overlaps
        self.pool, self.tree = self.scheduler.pool, self.scheduler.tree
        self.tokenizer = tokenizer
        self.version = 0
        self.tokens_computed = 0
        self.steps = 0
        self.failure: Exception | None = None  # of the last step
        self.pending_updates: list[Update] = []  # not yet returned by Engine.step
        self.late: list[LateScores] = []  # scores of the last step, reported while the next one is computed
        self._opened = False
        self.hashes = token_hashes(decoder.vocab_size, decoder.device)
        self._sampler: tuple[list[Seq], Sampler] | None = None

    @transaction
    def step(self, key: Hashable, alone: bool = False) -> None:
        """Compute one step; its updates go to `pending_updates`. An error of the computation is stored in `failure` and
        ends the step's sequences; after any other exception the sequences are reset to what was last reported."""
        self.failure = None
        self._step(key, alone)

    def rebuild(self) -> None:
        """Empty the blocks and the tree, and requeue every unfinished sequence; its KV is recomputed."""
        reported = {(u.request, u.index) for u in self.pending_updates if u.sample is not None or u.values is not None}
        reported |= {(s.request.number, s.index) for late in self.late for s in late.sequences}  # soon reported
        left = [s for s in self.scheduler.live if (s.request.number, s.index) not in reported]
        self.tree.reset()
        self.pool.reset()
        self.scheduler.restart(left)
        self._sampler = None  # this ends the back end's decode window too

    def _step(self, key: Hashable, alone: bool) -> None:
        self.scheduler.ahead = sum(step.tokens for step in self.late)
        plan = self.scheduler.plan(key, alone)
        if not plan.chunks:
            self.report_late()
            return
        scoring = all(chunk.sequence.request.read is not None for chunk in plan.chunks)
        if not scoring:
            self.report_late()  # this step waits for the device anyway
            if self.failure is not None:
                return  # the state was rebuilt, so the plan is invalid
        self._open()
        self.steps += 1
        try:
            if plan.decode_steps:
                self._decode(plan, key)
            late = not plan.decode_steps and self._forward(plan, scoring and self.backend.overlaps)
        except Exception as error:
            self._failed(plan, error)
            self.report_late()
            return
        self.scheduler.done(plan)
        for chunk in plan.chunks:
            if chunk.sequence in self.scheduler.live:  # a callback of an earlier sequence may have aborted it
                self._finish_step(chunk.sequence, key)
        self.report_late(keep=int(late))
        if self.scheduler.idle:
            self._sampler = None  # it references the sequences it was created for

    def report_late(self, keep: int = 0) -> None:
        """Wait for the scores the device is computing and report them, except those of the last `keep` steps."""
        while len(self.late) > keep:
            first = self.late[0]
            try:
                updates = first.updates(self.decoder.name)
            except Exception as error:  # errors of the asynchronous step surface here
                self.failure = error
                self.rebuild()  # as after any failed step
                updates = first.failed(error)
            at, rest = len(self.pending_updates), self.late[1:]
            self.pending_updates[at:], self.late = updates, rest  # one statement: Ctrl-C cannot lose or repeat updates

    def export_kv(self, key: Hashable, tokens: Sequence[int], salt: str) -> Handover:
        """A copy of the cached KV of these tokens."""
        self.repair()
        self._open()
        return handover.export_kv(self.tree, self.backend, key, tokens, self.version, salt)

    def import_kv(self, key: Hashable, received: Handover) -> int:
        """Insert the KV of another engine, leaving a free block per running sequence; returns how many tokens fit."""
        self._open()
        handover.check(received, self.backend, self.version)
        return self._import_kv(key, received)

    @transaction
    def _import_kv(self, key: Hashable, received: Handover) -> int:
        return handover.import_kv(self.tree, self.backend, key, received, reserve=len(self.scheduler.running))

    @transaction
    def adopt(self, key: Hashable, sequence: Seq) -> None:
        """Let a waiting sequence decode from the next step on if the tree has all of its KV; if not it stays queued."""
        scheduler, size = self.scheduler, self.backend.block_size
        match = self.tree.match((key, sequence.request.params.salt), sequence.tokens, sequence.shareable)
        have = len(match.nodes) * size + match.partial_tokens
        room = self.pool.free > len(scheduler.running) and len(scheduler.running) < scheduler.max_running
        # The state of a partial block belongs to another sequence, and recorded experts are not copied.
        state = match.partial is None or (self.backend.states is None and not self.decoder.record_bytes)
        if have < sequence.shareable or not room or not state:
            return
        for node in match.nodes:
            self.pool.retain(node.block)
        sequence.chain = Chain([node.block for node in match.nodes], list(match.nodes))
        if match.partial is not None:
            sequence.chain.blocks.append(own := self.pool.allocate())
            at = send(np.arange(match.partial_tokens, dtype=np.int64), self.decoder.device)
            self.backend.write(own * size + at, *self.backend.read(match.partial.block * size + at))
        sequence.computed = have
        scheduler.tokens_shared += have
        del scheduler.waiting[sequence]
        scheduler.running[sequence] = None

    def _open(self) -> None:
        if not self._opened:
            self.backend.open(self.pool.blocks)
            self._opened = True

    def close(self) -> None:
        """Free the KV; running sequences are requeued and recomputed from their tokens."""
        self.forget()
        self._opened = False  # before close(): opening an open back end again is fine, using a closed one is not
        self.backend.close()
        self.pool.reached = 0

    @transaction
    def requeue(self) -> None:
        """Preempt every running sequence: its KV will be recomputed."""
        for sequence in list(self.scheduler.running):
            self.scheduler.preempt(sequence)

    @transaction
    def forget(self) -> None:
        """Preempt every running sequence and empty the tree."""
        self.report_late()
        self.requeue()
        self.tree.clear()

    @transaction
    def detach(self) -> None:
        """Empty the tree; running sequences keep their KV, which is never inserted in the tree again."""
        self.report_late()
        for sequence in self.scheduler.running:
            sequence.cacheable = False
            sequence.chain.nodes.clear()
        self.tree.clear()

    @transaction
    def free_paths(self, places: Sequence[Place]) -> int:
        """See PrefixTree.free_path."""
        return sum(map(self.tree.free_path, places))

    @transaction
    def exclusively(self, work: Callable[[], T]) -> T:
        """Run work that changes the blocks or the tree outside of steps."""
        self.report_late()
        self._open()
        return work()

    @transaction
    def abort(self, sequence: Seq, error: ItemError | None) -> None:
        """End a sequence now."""
        sequence.finish, sequence.error = "abort", error
        self._report(sequence)

    @transaction
    def add(self, sequences: Iterable[Seq]) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    @transaction
    def discard(self, sequences: Iterable[Seq]) -> None:
        """End sequences without reporting them."""
        for sequence in sequences:
            sequence.finish = "abort"
            self.scheduler.end(sequence)

    def _forward(self, plan: Plan, overlap: bool) -> bool:
        """Compute the plan's chunks. With `overlap` it does not wait for final scores; True if they come late."""
        spans = [_span(chunk) for chunk in plan.chunks]
        rows = self.backend.forward(spans, [copy for copies in plan.copies.values() for copy in copies])
        drawing: list[tuple[Seq, int]] = []
        readings: list[tuple[Seq, Reading]] = []
        read_rows: list[int] = []
        at = 0
        for chunk, span in zip(plan.chunks, spans, strict=True):
            sequence = chunk.sequence
            sequence.computed += chunk.tokens
            self.tokens_computed += chunk.tokens
            draws = int(sequence.request.read is None and sequence.pending == 0)  # from the last wanted row
            if (count := len(span.wanted) - draws) and (read := sequence.reading) is not None:
                positions = [span.start + w for w in span.wanted[:count]]
                readings.append((sequence, Reading(read, sequence.tokens, positions)))
                read_rows += range(at, at + count)
            if draws:
                drawing.append((sequence, at + count))
            at += len(span.wanted)
        if readings:
            chosen = rows[send(np.array(read_rows, dtype=np.int64), rows.device)]
            readout = take(self.decoder, chosen, [r for _, r in readings])
            sequences = [sequence for sequence, _ in readings]
            if overlap and not any(sequence.pending or sequence.values for sequence in sequences):
                tokens = sum(chunk.tokens for chunk in plan.chunks)
                self.late.append(LateScores(dict.fromkeys(sequences), readout, tokens))
                return True
            for sequence, value in zip(sequences, readout.arrays(), strict=True):
                sequence.values.append(value)
                if sequence.request.read is None:
                    note_prompt(sequence)
        if drawing:
            self._draw([s for s, _ in drawing], rows[send(np.array([i for _, i in drawing]), rows.device)])
        return False

    def _draw(self, sequences: list[Seq], rows: torch.Tensor) -> None:
        sampler = self._sampler_of(sequences)
        drawn_before = send(np.array([s.generated for s in sequences]), rows.device)
        drawn = sampler.draw(self.decoder.logits(rows), drawn_before)
        decoded = Decoded.of([(drawn, torch.ones_like(drawn.tokens, dtype=torch.bool))])
        for _ in self._accept(sequences, decoded):
            pass

    def _accept(self, sequences: list[Seq], decoded: Decoded) -> Iterator[tuple[Seq, int]]:
        """Append the drawn tokens to unfinished sequences; yields how many tokens each one accepted."""
        sound = bool(decoded.raw_logprobs.isfinite().all())
        for sequence, draws in zip(sequences, by_row(sequences, decoded), strict=True):
            if not draws.tokens or sequence.finish is not None:
                continue
            if sound and sequence.plain:
                yield sequence, accept_all(sequence, draws, self.version)
            else:
                yield sequence, accept(sequence, draws, self.version, self.decoder.name)

    def _sampler_of(self, sequences: list[Seq]) -> Sampler:
        if self._sampler is None or self._sampler[0] != sequences:
            sampler = Sampler(
                [s.request.params for s in sequences],
                [s.noise_key for s in sequences],
                [s.request.stop_ids for s in sequences],
                self.hashes,
            )
            self._sampler = (sequences, sampler)
        so_far = zip(*((s.tokens, s.prompt_len, s.constraint) for s in sequences), strict=True)
        self._sampler[1].begin(*so_far)
        return self._sampler[1]

    def _decode(self, plan: Plan, key: Hashable) -> None:
        sequences = [chunk.sequence for chunk in plan.chunks]
        batch = self._batch(sequences)
        for decoded in self.backend.decode(batch, plan.decode_steps):
            self._accept_decoded(sequences, decoded, key)

    def _accept_decoded(self, sequences: list[Seq], decoded: Decoded, key: Hashable) -> None:
        for sequence, accepted in self._accept(sequences, decoded):
            if sequence not in self.scheduler.running:  # aborted by its own stop_when
                continue
            sequence.computed += accepted
            self.tokens_computed += accepted
            self._insert(sequence, key)

    def _batch(self, sequences: list[Seq]) -> DecodeBatch:
        device = self.hashes.device
        lengths = [len(s.tokens) for s in sequences]
        tables = padded([s.chain.blocks for s in sequences], 0)
        stops = padded([s.request.stop_ids for s in sequences], -1)

        def column(values: Sequence[int]) -> torch.Tensor:
            return send(np.array(values, dtype=np.int64), device)

        return DecodeBatch(
            tokens=column([s.tokens[-1] for s in sequences]),
            positions=column([n - 1 for n in lengths]),
            drawn=column([s.generated for s in sequences]),
            left=column([s.remaining for s in sequences]),
            alive=torch.ones(len(sequences), dtype=torch.bool, device=device),
            stops=send(stops, device),
            tables=send(tables, device),
            sampler=self._sampler_of(sequences),
            lengths=lengths,
        )

    def _finish_step(self, sequence: Seq, key: Hashable) -> None:
        """After a step: insert full blocks in the tree, report new tokens, and remove a finished sequence."""
        done = sequence.request.read is not None and sequence.pending == 0
        finished = sequence.finish is not None or done
        self._insert(sequence, key, partial=finished)
        if done:
            if not self.late or sequence not in self.late[-1].sequences:
                values = np.concatenate(sequence.values or [np.empty(0, dtype=np.float32)])
                self.pending_updates.append(scored(sequence, values, self.decoder.name))
            self.scheduler.end(sequence)
            return
        if not finished and sequence.request.whole and sequence.stream is None:
            sequence.reported = sequence.generated  # no partial updates
        elif finished or sequence.generated != sequence.reported:
            self._report(sequence)

    def _insert(self, sequence: Seq, key: Hashable, partial: bool = False) -> None:
        """Insert a sequence's computed tokens in the tree if a new block is full, or if `partial`."""
        full = sequence.computed // self.backend.block_size > len(sequence.chain.nodes)
        if sequence.cacheable and (full or partial):
            under = (key, sequence.request.params.salt)
            self.tree.extend(under, sequence.chain, sequence.tokens, sequence.computed, stored=True)

    def _report(self, sequence: Seq) -> None:
        """Add an update with the new tokens of a sequence; remove it if it has finished."""
        request, stream = sequence.request, sequence.stream
        new, finished = tuple(sequence.tokens[sequence.prompt_len + sequence.reported :]), sequence.finish is not None
        sequence.experts = self.backend.experts_at(sequence.chain.blocks, sequence.computed) if finished else None
        sample = sequence.sample(self._text(sequence)) if finished else None
        piece = stream.piece(sequence.reported_chars, last=finished) if stream is not None else ""
        raws = tuple(sequence.raw_logprobs[sequence.reported :]) if stream is not None else ()
        tops = tuple(sequence.tops[sequence.reported :]) if stream is not None else ()
        update = Update(request.number, sequence.index, new, piece, sample, raw_logprobs=raws, top_logprobs=tops)
        # Before the sequence is removed, or an interruption could lose it without an update. In one statement without a
        # call that Ctrl-C could interrupt, so that an added update always counts as reported.
        at, reported, chars = len(self.pending_updates), sequence.generated, sequence.reported_chars + len(piece)
        self.pending_updates[at:], sequence.reported, sequence.reported_chars = [update], reported, chars
        if finished:
            self.scheduler.end(sequence)
        if request.on_update is None or sequence.error is not None:
            return
        try:
            request.on_update(update)
        except Exception as error:
            if not finished and sequence not in self.scheduler.live:
                return  # the callback aborted its own request before it failed
            sequence.finish = "error"
            sequence.error = ItemError(type(error).__name__, f"the callback failed: {error}")
            self.pending_updates[at] = replace(update, sample=sequence.sample(self._text(sequence)))
            self.scheduler.end(sequence)

    def _text(self, sequence: Seq) -> str:
        if sequence.stream is not None:
            return sequence.stream.finish(sequence.reported_chars)
        if self.tokenizer is None or not sequence.request.text:
            return ""
        tokens = sequence.tokens[sequence.prompt_len :]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""
        return text

    def _failed(self, plan: Plan, error: Exception) -> None:
        """Handle a failed step: its sequences end, all others are recomputed. Half-written blocks leave the tree."""
        self.failure = error
        self.rebuild()  # first: reference counts may be inconsistent, and ending a sequence releases blocks
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence in self.scheduler.live:
                sequence.finish, sequence.error = "error", ItemError(type(error).__name__, f"the step failed: {error}")
                self._report(sequence)

    def check(self) -> None:
        """Raise unless blocks, tree and sequences are consistent."""
        self.repair()
        holders = [s.chain.blocks for s in (*self.scheduler.running, *self.scheduler.waiting)]
        self.pool.check([*holders, [node.block for node in self.tree.nodes()]])
        self.tree.check()
        self.scheduler.check()


def _span(chunk: Chunk) -> Span:
    sequence = chunk.sequence
    start, end = sequence.computed, sequence.computed + chunk.tokens
    read = sequence.reading
    read_at = [p - start for p in read.within(start, end)] if read is not None else []
    if sequence.request.read is None and end == len(sequence.tokens):
        read_at.append(chunk.tokens - 1)
    return Span(sequence.tokens[start:end], start, sequence.chain.blocks, read_at)
