"""The engine: generates, scores and computes log-probs with a module that it does not own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn

from plaudit.collector import uncollected
from plaudit.core.branches import Branches
from plaudit.core.device.backend import Backend
from plaudit.core.device.choose import backend_of
from plaudit.core.device.lockstep import Leader, RankGroups
from plaudit.core.intake import Intake, as_list
from plaudit.core.kv.handover import Handover
from plaudit.core.kv.memory import blocks_for
from plaudit.core.model.readouts import Read
from plaudit.core.proof.support import inspect
from plaudit.core.recurrent import refuse_handover, reserve_states
from plaudit.core.runner import Runner
from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.core.scoring import read_rows
from plaudit.core.sequence import Request, Update
from plaudit.core.states import EVERY
from plaudit.core.stats import Stats
from plaudit.errors import RequestError
from plaudit.records import NEXT, ItemError, Sample

Prompt = str | Sequence[int]
Result = TypeVar("Result")

CHECK_EVERY = 5.0  # seconds between two integrity checks of an idle engine


class Engine:
    """Runs one decoder without gradients. Not thread-safe: one thread calls it at a time.

    kv_bytes     KV pool in bytes, or as a fraction of the free memory; allocated on first use, never exceeded
    budget       tokens per step
    max_running  maximum number of sequences that decode together
    look_every   decode steps between two returns to the host, which then handles stop strings, callbacks and new
                 requests; by default `generate` returns less often while nothing waits
    seed         for requests without a seed of their own, combined with the submission number
    channel      to the other ranks that run shards of the same module (see lockstep.py); this is rank 0
    exact        in half precision on a GPU, float32 on a CPU: the learner's bits, in any batch; slower for few rows
    state_every  for models with recurrent layers: tokens between two stored states, a multiple of the block size; a
                 prefix is shared up to the last of them
    record_experts   for a mixture of experts on a CPU: samples record the experts of each token (Sample.experts)
    """

    def __init__(
        self, module: nn.Module, tokenizer: Any = None, *, kv_bytes: int | float | None = None,
        budget: int | None = None, max_running: int | None = None, look_every: int | None = None, seed: int = 0,
        version: int = 0, channel: RankGroups | None = None, exact: bool = True, state_every: int = EVERY,
        record_experts: bool = False,
    ) -> None:  # fmt: skip
        self.decoder = inspect(module, tokenizer)
        self.tokenizer = tokenizer
        self.backend: Backend = backend_of(self.decoder)
        self.backend.exact = exact
        if channel is not None:
            self.backend = Leader(self.backend, channel)
        if record_experts:
            self.backend.record_experts()
        budget = self.backend.budget if budget is None else budget
        max_running = min(self.backend.max_running, budget) if max_running is None else max_running
        window = self.backend.window if look_every is None else look_every
        look_every = self.backend.look_every if look_every is None else look_every
        if not 1 <= max_running <= budget:
            raise RequestError(f"max_running {max_running} must be from 1 to the budget of {budget} tokens per step")
        self.budget = budget
        max_running, state_bytes = reserve_states(self.backend, kv_bytes, max_running, state_every)
        blocks = blocks_for(
            self.decoder, self.backend.block_size, kv_bytes, max_running, self.backend.spare, state_bytes
        )
        self._runner = Runner(
            self.decoder, self.backend, blocks, budget=budget, max_running=max_running, look_every=look_every,
            window=window, tokenizer=tokenizer,
        )  # fmt: skip
        self._runner.version = version
        self._intake = Intake(self.decoder, tokenizer, blocks, self.backend.block_size, seed)
        self._requests: dict[int, Request] = {}
        self._failed_requests: list[Request] = []  # of failed calls, until they are released
        self._checked = float("-inf")
        self._paused = False
        self._asleep = False
        self._home: torch.device | None = None
        self._extra_computed = 0
        self._extra_shared = 0
        self._adapters = self.decoder.adapter_state()

    @classmethod
    def load(
        cls, path: str | Path, *, device: str = "auto", dtype: str = "float32", kv_bytes: int | float | None = None,
        **options: Any,
    ) -> Engine:  # fmt: skip
        """Load a model directory, or a model that comes with Plaudit by name. `auto` is the GPU if there is one."""
        from plaudit.models import choose_device, load_any

        loaded = load_any(path, dtype=dtype, device=choose_device(device))
        return cls(loaded.module, loaded.tokenizer, kv_bytes=kv_bytes, **options)

    # Generating

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
        begun: Sequence[Sequence[Sample]] | None = None, *, seeds: Sequence[int] | None = None, text: bool = True,
    ) -> list[Sample]:  # fmt: skip
        """n samples of each prompt, in order: all of the first prompt's, then the second's. `group` is the prompt's
        index, `index` the sample's.

        begun   per prompt, unfinished samples of this or another engine to continue, instead of n new ones
        seeds   one seed per prompt, instead of its params'
        text    False: samples without text, for callers that need only the tokens
        """
        self.check_ready()
        requests = self._intake.generations(prompts, params, begun, seeds)
        for request in requests:
            request.whole, request.text = True, text
        with uncollected():
            return self._call(requests, lambda: self._samples(requests))

    def _samples(self, requests: list[Request]) -> list[Sample]:
        wanted = [(r.number, s.index) for r in requests for s in r.sequences]
        finished: dict[tuple[int, int], Sample] = {}
        for update in self._drain(requests, alone=True):
            if update.sample is not None:
                finished[update.request, update.index] = update.sample
        return [finished[each] for each in wanted]

    def submit_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
        begun: Sequence[Sequence[Sample]] | None = None,
    ) -> list[int]:  # fmt: skip
        """Queue the requests of a `generate` call and return their numbers. Stepped to the end with nothing else
        queued, the samples are bit-equal to those of `generate`."""
        requests = self._intake.generations(prompts, params, begun)
        return self._call(requests, lambda: [request.number for request in requests])

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *,
        on_update: Callable[[Update], None] | None = None, stop_when: Callable[[list[int], str], bool] | None = None,
    ) -> int:  # fmt: skip
        """Queue a request and return its number. `step()` advances it and returns its updates.

        on_update   called with every update
        stop_when   called after every token with the tokens and the text so far; True ends the sample
        """
        request = self._intake.generation(prompt, params or SamplingParams(), stream=True)
        request.on_update, request.stop_when = on_update, stop_when
        return self._call([request], lambda: request.number)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Update]:
        """Yield the updates of one request; closing the iterator aborts it."""
        self.check_ready()
        number: int | None = None
        try:
            number = self.submit(prompt, params)
            yield from self._drain([self._requests[number]])
        finally:
            if number is not None:
                self.abort(number)

    def step(self) -> list[Update]:
        """Compute one step of the queued requests and return the new updates; empty if there is nothing to do."""
        self._step(alone=False)
        return self._collect()

    def _step(self, alone: bool) -> None:
        if self._runner.active:
            raise RequestError("a callback has called step() during a step: return from the callback first")
        if self._paused or self._asleep:
            return
        self._release_failed()
        self._expire()
        training = self.decoder.module.training
        try:
            if training:
                self.decoder.module.eval()
            with torch.inference_mode():
                self._runner.step(self._key(), alone)
        finally:
            if training:
                self.decoder.module.train()
        if self._runner.scheduler.idle and time.monotonic() - self._checked > CHECK_EVERY:
            self._runner.check()
            self._checked = time.monotonic()

    def abort(self, number: int) -> None:
        """End a request now; the next step returns its samples as finish_reason "abort". Ignores unknown numbers."""
        request = self._requests.get(number)
        if request is not None:
            self._stop(request, None)

    @property
    def open_requests(self) -> frozenset[int]:
        """The numbers of unfinished requests."""
        return frozenset(self._requests)

    def discard(self, numbers: Collection[int]) -> None:
        """End these requests without any further update."""
        self._failed_requests += [request for number, request in self._requests.items() if number in numbers]
        self._release_failed()

    @property
    def end_tokens(self) -> frozenset[int]:
        """The model's end-of-sequence tokens."""
        return self._intake.end_tokens

    @property
    def busy(self) -> bool:
        """Whether `step()` has something to compute or to return."""
        runner = self._runner
        return not runner.scheduler.idle or bool(runner.late or runner.pending_updates)

    @property
    def failure(self) -> Exception | None:
        """The error of the last step, if it failed; its samples have ended with this error."""
        return self._runner.failure

    # KV transfer

    def export_kv(self, prompt: Sequence[int], salt: str = "") -> Handover:
        """The cached KV of a prompt, for another engine with the same weights to continue from."""
        refuse_handover(self.decoder)
        with torch.inference_mode():
            return self._runner.export_kv(self._key(), self._intake.tokens(prompt), salt)

    def import_kv(self, handover: Handover) -> int:
        """Insert the KV of another engine; returns how many tokens fit. The rest will be recomputed."""
        self.check_ready()
        refuse_handover(self.decoder)
        with torch.inference_mode():
            return self._runner.import_kv(self._key(), handover)

    # Scoring

    def score(
        self, sequences: Prompt | Sequence[Prompt], *, positions: Sequence[Sequence[int]] | None = None,
        columns: Sequence[int] | None = None, logprobs: bool = False, cache: bool = False, hidden: bool = False,
        share: bool = True,
    ) -> list[np.ndarray]:  # fmt: skip
        """The head's outputs in float32, per sequence.

        positions   None: the last token, giving (labels,); else the tokens to read, giving (positions, labels)
        columns     of a causal LM: the token ids whose logits to read, in place of a class head's labels
        logprobs    read the columns' log-probs, not their logits; NEXT among them is the token that follows
        cache       keep the KV, so that a later call computes only new tokens (a search does this); without it the
                    sequences of this call still share common prefixes
        hidden      append the hidden row to each output
        share       without a cache: whether the sequences may share common prefixes
        """
        ids = [self._intake.tokens(s) for s in as_list(sequences)]
        reads = self._intake.reads(ids, positions, columns, logprobs)
        if hidden:
            reads = [replace(read, hidden=True) for read in reads]
        values = self._read(ids, reads, cache, share)
        return [v[0] for v in values] if positions is None else values

    def logprobs(self, sequences: Sequence[Sequence[int]], *, cache: bool = False) -> list[np.ndarray]:
        """The log-probs of each sequence's tokens after the first, at temperature 1."""
        ids = [self._intake.tokens(s) for s in as_list(sequences)]
        reads = [Read("logprobs", tuple(range(len(s) - 1)), (NEXT,)) for s in ids]
        return [values.reshape(-1) for values in self._read(ids, reads, cache)]

    def submit_score(
        self, sequence: Prompt, *, positions: Sequence[int] | None = None, columns: Sequence[int] | None = None,
        logprobs: bool = False, params: SamplingParams | None = None,
    ) -> int:  # fmt: skip
        """Queue one sequence for scoring; `step()` reports its `values`. Of `params`, uses priority and deadline."""
        ids = self._intake.tokens(sequence)
        read = self._intake.reads([ids], None if positions is None else [positions], columns, logprobs)[0]
        request = self._intake.scoring(ids, read, params or SamplingParams())
        return self._call([request], lambda: request.number)

    def _read(self, ids: list[list[int]], reads: list[Read], cache: bool, share: bool = True) -> list[np.ndarray]:
        self.check_ready()
        if not ids:
            return []
        if cache:
            params = SamplingParams()
            scoring = [self._intake.scoring(s, r, params) for s, r in zip(ids, reads, strict=True)]
            with uncollected():
                return self._call(scoring, lambda: self._scores(scoring))
        training = self.decoder.module.training
        try:
            if training:
                self.decoder.module.eval()
            with torch.inference_mode():
                values, computed, shared = read_rows(self.backend, ids, reads, self.budget, share)
        finally:
            if training:
                self.decoder.module.train()
        self._extra_computed += computed
        self._extra_shared += shared
        if not all(np.isfinite(value).all() for value in values):
            raise RequestError(f"{self.decoder.name} gave scores that are not finite numbers")
        return values

    def _scores(self, requests: list[Request]) -> list[np.ndarray]:
        by_number = {u.request: u for u in self._drain(requests)}
        return [_values(by_number[r.number]) for r in requests]

    def branches(self) -> Branches:
        """For tree search: continue from computed paths, level by level. Requires `branching`."""
        return Branches(self._runner, self._intake, self._exclusively)

    @property
    def branching(self) -> bool:
        """Whether `branches` works: it copies only KV, so no recurrent states and no recorded experts."""
        return self.backend.states is None and not self.decoder.record_bytes

    def _exclusively(self, work: Callable[[Hashable], Result]) -> Result:
        self.check_ready()
        training = self.decoder.module.training
        try:
            if training:
                self.decoder.module.eval()
            with torch.inference_mode(), uncollected():
                return self._runner.exclusively(lambda: work(self._key()))
        finally:
            if training:
                self.decoder.module.train()

    # Weights and memory

    @property
    def version(self) -> int:
        return self._runner.version

    def pause(self) -> None:
        """step() computes nothing until resume(); requests stay queued."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def new_version(self, version: int | None = None, keep: Literal["recompute", "continue"] = "recompute") -> int:
        """Declare that the module's weights have changed, which invalidates everything cached.

        keep   sequences in flight keep their tokens: "recompute" computes their KV again with the new weights,
               "continue" goes on with their old KV
        """
        if keep not in ("recompute", "continue"):
            raise RequestError(f"keep is {keep!r}, and must be 'recompute' or 'continue'")
        if keep == "recompute":
            self._runner.forget()
        else:
            self._runner.detach()
        self._runner.version = self._runner.version + 1 if version is None else version
        return self._runner.version

    def sleep(self, *, weights: bool = False) -> None:
        """Free the KV, and with `weights` move the module to host memory. Requests in flight keep their tokens."""
        self._runner.close()
        self._asleep = True
        if weights and self.decoder.device.type != "cpu":
            self._home = self.decoder.device
            self.decoder.module.to("cpu")

    def wake(self) -> None:
        if self._home is not None:
            self.decoder.module.to(self._home)
            self._home = None
        self._asleep = False

    def kv_held(self) -> int:
        """Bytes of KV memory in use: 0 before the first step and while asleep."""
        return self.backend.kv_bytes(self._runner.pool.reached)

    def shrink(self, smallest: int) -> None:
        """Halve the token budget after an out-of-memory error, but not below `smallest`, and never raise it."""
        self.budget = min(self.budget, max(smallest, self.budget // 2))
        self._runner.scheduler.budget = self.budget

    def stats(self) -> Stats:
        runner, scheduler, states = self._runner, self._runner.scheduler, self.backend.states
        private = sum(max(0, s.computed - sum(len(n.tokens) for n in s.chain.nodes)) for s in scheduler.running)
        return Stats(
            tokens_computed=runner.tokens_computed + self._extra_computed,
            tokens_shared=scheduler.tokens_shared + self._extra_shared,
            tokens_resident=runner.tree.tokens + private,
            blocks_in_use=runner.pool.in_use,
            blocks_total=runner.pool.blocks,
            kv_bytes=runner.pool.blocks * self.backend.block_size * self.decoder.token_bytes()
            + (states.slots * self.decoder.state_bytes() if states else 0),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            evictions=runner.tree.evictions,
            states_in_use=states.in_use if states else 0,
            states_total=states.slots if states else 0,
            states_dropped=states.dropped if states else 0,
            steps=runner.steps,
            version=runner.version,
        )

    def check(self) -> None:
        """Raise if blocks, tree and sequences are inconsistent. Also run every few seconds when the queue is empty."""
        self._release_failed()
        self._runner.check()

    # Internal

    def _key(self) -> Hashable:
        """The prefix tree's key: module, adapters, version. If adapters have changed, requeues running sequences."""
        adapters = self.decoder.adapter_state()
        if adapters != self._adapters:
            self._runner.requeue()
            self._adapters = adapters
        return id(self.decoder.module), adapters, self._runner.version

    def check_ready(self) -> None:
        if self._paused or self._asleep:
            state, cure = ("asleep", "wake()") if self._asleep else ("paused", "resume()")
            raise RequestError(f"the engine is {state}: call {cure} first")
        self._release_failed()

    def _call(self, requests: list[Request], result: Callable[[], Result]) -> Result:
        """Queue the requests of one call and return its result. If the call fails, its requests are released."""
        try:
            self._release_failed()
            self._requests.update((request.number, request) for request in requests)
            sequences = [sequence for request in requests for sequence in request.sequences]
            self._runner.add(sequences)
            for sequence in sequences:
                if sequence.generated:  # started by an earlier call or another engine
                    with torch.inference_mode():
                        self._runner.adopt(self._key(), sequence)
            return result()
        except BaseException:
            self._failed_requests += requests
            self._release_failed()
            raise

    def _release_failed(self) -> None:
        """Release the requests of failed calls. If a second Ctrl-C interrupts this, the next call does it."""
        self._runner.repair()
        if not self._failed_requests:
            return
        self._runner.discard([sequence for request in self._failed_requests for sequence in request.sequences])
        failed = {request.number for request in self._failed_requests}
        self._requests = {number: request for number, request in self._requests.items() if number not in failed}
        self._runner.pending_updates = [u for u in self._runner.pending_updates if u.request not in failed]
        self._failed_requests = []

    def _drain(self, requests: Sequence[Request], alone: bool = False) -> Iterator[Update]:
        """Step until these requests have finished; updates of others stay for step(). Raises if a step fails. alone:
        the caller needs only the final result, so nothing can interrupt a long decode window."""
        mine = {r.number for r in requests}
        while any(r.number in self._requests for r in requests):
            self.check_ready()  # the caller may have paused the engine between two updates
            self._step(alone)
            yield from self._collect(mine)
            if self._runner.failure is not None:
                raise self._runner.failure

    def _collect(self, numbers: set[int] | None = None) -> list[Update]:
        """Take the pending updates of these requests, or of all."""
        updates, left = self._runner.pending_updates, list[Update]()
        if numbers is not None and (left := [update for update in updates if update.request not in numbers]):
            updates = [update for update in updates if update.request in numbers]
        for update in updates:
            final = update.sample is not None or update.values is not None
            if final and (request := self._requests.get(update.request)) is not None:
                request.open.discard(update.index)
                if not request.open:
                    del self._requests[update.request]
                    request.sequences.clear()  # they refer to their request: break the reference cycle
        self._runner.pending_updates = left  # last: if interrupted before this, the call can be repeated
        return updates

    def _expire(self) -> None:
        now: float | None = None
        for request in list(self._requests.values()):
            if request.deadline is None:
                continue
            now = time.monotonic() if now is None else now
            if now > request.deadline:
                seconds = request.params.deadline
                self._stop(request, ItemError("Aborted", f"ran past its deadline of {seconds} s"))

    def _stop(self, request: Request, error: ItemError | None) -> None:
        for sequence in request.sequences:
            if sequence in self._runner.scheduler.live:
                self._runner.abort(sequence, error)


def _values(update: Update) -> np.ndarray:
    if update.values is None:
        error = update.sample.error if update.sample is not None else None
        raise RequestError(f"scoring failed: {error.message if error else 'aborted'}")
    return update.values
