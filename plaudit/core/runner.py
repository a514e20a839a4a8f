"""One step: plan, compute, take in what came out."""

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
from plaudit.core.transaction import Books, transaction
from plaudit.records import ItemError

T = TypeVar("T")


class Runner(Books):
    """Owns the scheduler, the blocks and the tree; computes on the back end. `version` is the weights' version.
    These are its books; every change of them is a transaction."""

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
        self.outbox: list[Update] = []  # what is new, until somebody takes it
        self.late: list[LateScores] = []  # of the last step, reported while the next one is computed
        self._opened = False
        self.hashes = token_hashes(decoder.vocab_size, decoder.device)
        self._sampler: tuple[list[Seq], Sampler] | None = None

    @transaction
    def step(self, key: Hashable, alone: bool = False) -> None:
        """Advance what is queued; what is new goes to `outbox`. An exception of the computation ends what the step was
        to compute, and is `failure`; after any other the sequences stand where they were last reported."""
        self.failure = None
        self._step(key, alone)

    def rebuild(self) -> None:
        """Empty blocks and tree, and let every sequence that has not ended wait, to be read again from its tokens."""
        reported = {(u.request, u.index) for u in self.outbox if u.sample is not None or u.values is not None}
        reported |= {(s.request.number, s.index) for late in self.late for s in late.sequences}  # or will be
        left = [s for s in self.scheduler.live if (s.request.number, s.index) not in reported]
        self.tree.reset()
        self.pool.reset()
        self.scheduler.restart(left)
        self._sampler = None  # nor does a decode window go on without it

    def _step(self, key: Hashable, alone: bool) -> None:
        self.scheduler.ahead = sum(step.tokens for step in self.late)
        plan = self.scheduler.plan(key, alone)
        if not plan.chunks:
            self.report_late()
            return
        scoring = all(chunk.sequence.request.read is not None for chunk in plan.chunks)
        if not scoring:
            self.report_late()  # this step waits for its own end
            if self.failure is not None:
                return  # the plan is of books that are no more
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
            if chunk.sequence in self.scheduler.live:  # a callback of one before it may have aborted it
                self._settle(chunk.sequence, key)
        self.report_late(keep=int(late))
        if self.scheduler.idle:
            self._sampler = None  # it holds on to the sequences it was made for

    def report_late(self, keep: int = 0) -> None:
        """Wait for what a device computes, but for the last `keep` steps."""
        while len(self.late) > keep:
            first = self.late[0]
            try:
                updates = first.updates(self.decoder.name)
            except Exception as error:  # a device reports here what went wrong in the step
                self.failure = error
                self.rebuild()  # as after any step that fails
                updates = first.failed(error)
            at, rest = len(self.outbox), self.late[1:]
            self.outbox[at:], self.late = updates, rest  # in one statement: for Ctrl-C each is in one of the two

    def give(self, key: Hashable, tokens: Sequence[int], salt: str) -> Handover:
        """A copy of the KV that there is of these tokens."""
        self.mend()
        self._open()
        return handover.give(self.tree, self.backend, key, tokens, self.version, salt)

    def take_in(self, key: Hashable, received: Handover) -> int:
        """KV of another engine; how many of its tokens there was room for, beside a block for each that runs."""
        self._open()
        handover.check(received, self.backend, self.version)
        return self._take_in(key, received)

    @transaction
    def _take_in(self, key: Hashable, received: Handover) -> int:
        return handover.take_in(self.tree, self.backend, key, received, reserve=len(self.scheduler.running))

    @transaction
    def adopt(self, key: Hashable, sequence: Seq) -> None:
        """Let a waiting sequence decode from the next step on, as if it had been read here, if the tree has all that it
        needs. Otherwise it waits for its turn."""
        scheduler, size = self.scheduler, self.backend.block_size
        match = self.tree.match((key, sequence.request.params.salt), sequence.tokens, sequence.shareable)
        have = len(match.nodes) * size + match.partial_tokens
        room = self.pool.free > len(scheduler.running) and len(scheduler.running) < scheduler.max_running
        # In a partial block a state is another's, and what is recorded beside KV is not copied.
        state = match.partial is None or (self.backend.states is None and not self.decoder.record_bytes)
        if have < sequence.shareable or not room or not state:
            return
        for node in match.nodes:
            self.pool.retain(node.block)
        sequence.chain = Chain([node.block for node in match.nodes], list(match.nodes))
        if match.partial is not None:
            sequence.chain.blocks.append(own := self.pool.take())
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
        """Free the KV; sequences that run will be computed again from their tokens."""
        self.forget()
        self._opened = False  # first: an open back end can be opened again, a closed one not be used
        self.backend.close()
        self.pool.reached = 0

    @transaction
    def requeue(self) -> None:
        """Send every running sequence back to wait: its tokens will be read again."""
        for sequence in list(self.scheduler.running):
            self.scheduler.preempt(sequence)

    @transaction
    def forget(self) -> None:
        """The same, and empty the tree."""
        self.report_late()
        self.requeue()
        self.tree.clear()

    @transaction
    def detach(self) -> None:
        """Empty the tree, but let running sequences keep their KV, which the tree must then never see again."""
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
    def apart(self, work: Callable[[], T]) -> T:
        """What changes the books besides steps."""
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
        """End them without a word: nobody is left who would listen."""
        for sequence in sequences:
            sequence.finish = "abort"
            self.scheduler.end(sequence)

    def _forward(self, plan: Plan, overlap: bool) -> bool:
        """Whether its scores come late: with `overlap` the host does not wait for those of sequences that end here."""
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
            draws = int(sequence.request.read is None and sequence.pending == 0)  # by the last of the wanted rows
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
        """Add what was drawn to the sequences that have not ended; how many tokens each of them has taken."""
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
            self._take(sequences, decoded, key)

    def _take(self, sequences: list[Seq], decoded: Decoded, key: Hashable) -> None:
        for sequence, accepted in self._accept(sequences, decoded):
            if sequence not in self.scheduler.running:  # aborted by its own stop test
                continue
            sequence.computed += accepted
            self.tokens_computed += accepted
            self._enter(sequence, key)

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

    def _settle(self, sequence: Seq, key: Hashable) -> None:
        """After a step: enter full blocks in the tree, say what is new, and let a finished sequence go."""
        done = sequence.request.read is not None and sequence.pending == 0
        finished = sequence.finish is not None or done
        self._enter(sequence, key, partial=finished)
        if done:
            if not self.late or sequence not in self.late[-1].sequences:
                values = np.concatenate(sequence.values or [np.empty(0, dtype=np.float32)])
                self.outbox.append(scored(sequence, values, self.decoder.name))
            self.scheduler.end(sequence)
            return
        if not finished and sequence.request.whole and sequence.stream is None:
            sequence.seen = sequence.generated  # nobody takes the news
        elif finished or sequence.generated != sequence.seen:
            self._report(sequence)

    def _enter(self, sequence: Seq, key: Hashable, partial: bool = False) -> None:
        """Put what a sequence has computed in the tree once there is a full block of it, or what there is."""
        full = sequence.computed // self.backend.block_size > len(sequence.chain.nodes)
        if sequence.cacheable and (full or partial):
            under = (key, sequence.request.params.salt)
            self.tree.extend(under, sequence.chain, sequence.tokens, sequence.computed, stored=True)

    def _report(self, sequence: Seq) -> None:
        """What is new of a sequence goes out; if it has finished, it is over."""
        request, stream = sequence.request, sequence.stream
        new, finished = tuple(sequence.tokens[sequence.prompt_len + sequence.seen :]), sequence.finish is not None
        sequence.experts = self.backend.experts_at(sequence.chain.blocks, sequence.computed) if finished else None
        sample = sequence.sample(self._text(sequence)) if finished else None
        piece = stream.piece(sequence.given, last=finished) if stream is not None else ""
        raws = tuple(sequence.raw_logprobs[sequence.seen :]) if stream is not None else ()
        tops = tuple(sequence.tops[sequence.seen :]) if stream is not None else ()
        update = Update(request.number, sequence.index, new, piece, sample, raw_logprobs=raws, top_logprobs=tops)
        # Out before the sequence ends: one that had ended with nothing said would be lost to an interruption. And in
        # one statement, with no call in which Ctrl-C could come: what is out counts as seen.
        at, seen, given = len(self.outbox), sequence.generated, sequence.given + len(piece)
        self.outbox[at:], sequence.seen, sequence.given = [update], seen, given
        if finished:
            self.scheduler.end(sequence)
        if request.on_update is None or sequence.error is not None:
            return
        try:
            request.on_update(update)
        except Exception as error:
            if not finished and sequence not in self.scheduler.live:
                return  # it has aborted its request before it failed
            sequence.finish = "error"
            sequence.error = ItemError(type(error).__name__, f"the callback failed: {error}")
            self.outbox[at] = replace(update, sample=sequence.sample(self._text(sequence)))
            self.scheduler.end(sequence)

    def _text(self, sequence: Seq) -> str:
        if sequence.stream is not None:
            return sequence.stream.finish(sequence.given)
        if self.tokenizer is None or not sequence.request.text:
            return ""
        tokens = sequence.tokens[sequence.prompt_len :]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""
        return text

    def _failed(self, plan: Plan, error: Exception) -> None:
        """The device failed in the middle of a step: what it was to compute ends with the error, the rest starts
        again, and nothing that may be half-written can be found in the tree."""
        self.failure = error
        self.rebuild()  # first: a sequence that ends gives blocks back, and the error may have come between two counts
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence in self.scheduler.live:
                sequence.finish, sequence.error = "error", ItemError(type(error).__name__, f"the step failed: {error}")
                self._report(sequence)

    def check(self) -> None:
        """Blocks, tree and sequences agree."""
        self.mend()
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
