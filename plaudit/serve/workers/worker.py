"""The worker process of a model: `python -m plaudit.serve.workers.worker FD`, started by `link.py` on a socket pair.

In a loop it reads the received frames, runs one step of the scheduler, and sends the finished results. It exits when
the other end closes. An item whose step failed is computed again alone, so that a bad item fails alone; an error after
which the device cannot be trusted ends the process, and the server restarts it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch

from plaudit.config.reward import LogprobsTable, OutcomeTable, ProcessTable, ReadByEngine, parse_reward
from plaudit.core import Engine, SamplingParams
from plaudit.core.kv.memory import limit_memory
from plaudit.core.sequence import Update
from plaudit.errors import ModelError, RankLost, RequestError
from plaudit.models import choose_device
from plaudit.models.text import tokenizer_parts
from plaudit.models.text_classifier import TextClassifier
from plaudit.process.framing import FrameReader
from plaudit.process.worker import SocketWorker, run_worker
from plaudit.records import ItemError
from plaudit.reward.load import load_model
from plaudit.serve.workers import frames
from plaudit.serve.workers.encoder_worker import EncoderWorker, classifier_worker, device_bytes
from plaudit.serve.workers.ranks import lead, leave

BROKEN_DEVICE = ("CUDA error", "device-side assert", "illegal memory access", "cuBLAS", "CUDNN")
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
SMALLEST_BUDGET = 256
SHORT = 16  # tokens, a block of KV: to look it up and to store it would take longer than to compute it again
NARROW = 192  # hidden size below which threads that sleep while waiting cost more than they save


@dataclass(slots=True)
class _PendingRequest:
    """One work or prompt received from the server."""

    id: int
    tokens: list[int]
    params: SamplingParams
    positions: tuple[int, ...] | None = None  # of a work; None for a prompt
    columns: tuple[int, ...] | None = None
    logprobs: bool = False
    stream: bool = False
    retried: bool = False
    ended: int = 0  # finished samples of a prompt
    error: ItemError | None = None
    whole: list[frames.TextPiece] = field(default_factory=list)  # finished samples, until all are finished
    # of a stream: tokens and characters sent, by sample
    reported: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def short(self) -> bool:
        """Whether it is a work that is read without KV."""
        return self.positions is not None and len(self.tokens) <= SHORT

    def begin_again(self) -> None:
        self.ended, self.error, self.whole, self.reported = 0, None, [], {}


class Worker(SocketWorker[frames.Frame]):
    def __init__(self, sock: socket.socket, reader: FrameReader[frames.Frame], engine: Engine) -> None:
        super().__init__(sock, reader)
        self.engine = engine
        self._requests: dict[int, _PendingRequest] = {}  # by the engine's request number
        self._numbers: dict[int, int] = {}  # the server's id -> the engine's request number
        self._waiting: deque[_PendingRequest] = deque()  # received, not yet submitted to the engine
        self._alone: deque[_PendingRequest] = deque()  # to be computed again, one at a time, before the others
        self._reads_short = not engine.backend.overlaps
        self._short_steps = 0
        self._timer = frames.Timer()
        self._before = engine.stats()  # excludes the warm-up from the counters

    def warm_up(self) -> None:
        """Run every kind of step once, so that memory is allocated and kernels are selected before the first
        request."""
        vocabulary, most = self.engine.decoder.vocab_size, min(self.engine.decoder.max_positions, self.engine.budget)
        columns = [0] if self.engine.decoder.kind == "causal" else None
        for lengths in ([1], [2, 7, 16], [most], [most // 2 or 1] * 2):
            ids = [[(7 * i + n) % vocabulary for i in range(length)] for n, length in enumerate(lengths)]
            # a damaged model may return no number for some token; that error goes to the request with the token
            with suppress(RequestError):
                self.engine.score(ids, columns=columns, cache=True)
        try:
            self.engine.score([[0]], columns=columns)
        except RequestError as error:
            raise ModelError(f"it cannot score even one token ({error}); its weights are damaged") from error
        self.engine.new_version(self.engine.version)  # removes the warm-up from the prefix tree
        self._before = self.engine.stats()

    def device_bytes(self) -> int:
        return device_bytes(self.engine.decoder.module)

    @property
    def busy(self) -> bool:
        return bool(self.engine.busy or self._alone or self._waiting)

    def step(self) -> None:
        if self._reads_short and not self._alone:
            self._read_short()
        self._submit_next()
        self._report(self.engine.step())

    def _read_short(self) -> None:
        """Compute the short sequences that wait in one pass without KV, which costs a third of what the engine's queue
        and its prefix tree do."""
        first = next((each for each in self._waiting if each.short), None)
        if first is None:
            return
        room = self.engine.budget // SHORT
        now, later = list[_PendingRequest](), deque[_PendingRequest]()
        for each in self._waiting:
            together = each.short and each.columns == first.columns and each.logprobs == first.logprobs
            (now if together and len(now) < room else later).append(each)
        try:
            values = self.engine.score(
                [each.tokens for each in now], positions=[each.positions or () for each in now], columns=first.columns,
                logprobs=first.logprobs, share=False,
            )  # fmt: skip
        except Exception:  # one of them is at fault: the engine's queue finds out which, and reports its error
            for each in now:
                self._submit(each)
        else:
            self._short_steps += 1
            self._send_results([(each.id, value) for each, value in zip(now, values, strict=True)], [], [])
        self._waiting = later

    def _submit_next(self) -> None:
        """Submit everything queued; but while a request must be computed alone, only that one."""
        if self._alone:
            if not self.engine.busy:
                self._submit(self._alone.popleft())
            return
        while self._waiting:
            self._submit(self._waiting.popleft())

    def take(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Works():
                tokens = frames.cut(frame.tokens, frame.lengths)
                positions = frames.cut(frame.positions, frame.counts)
                parts = zip(
                    frame.ids, tokens, map(_salted, frame.salts), map(tuple, positions), frame.columns, frame.logprobs,
                    strict=True,
                )  # fmt: skip
                self._waiting += [_PendingRequest(*part) for part in parts]
                self._timer.take(frame.ids if frame.timed else ())
            case frames.GenerateFrame():
                (ids,) = frames.cut(frame.tokens, [len(frame.tokens) // 4])
                try:
                    params = SamplingParams(**msgspec.structs.asdict(frame.sampling), salt=frame.salt)
                except RequestError as error:
                    self._send_results([], [(frame.id, "refused", str(error))], [])
                else:
                    self._waiting.append(_PendingRequest(frame.id, ids, params, stream=frame.stream))
                    self._timer.take([frame.id] if frame.timed else ())
            case frames.Cancel():
                cancelled = set(frame.ids)
                self._timer.end(cancelled)
                self._waiting = deque(request for request in self._waiting if request.id not in cancelled)
                self._alone = deque(request for request in self._alone if request.id not in cancelled)
                for id in cancelled & self._numbers.keys():
                    self.engine.abort(self._numbers[id])
            case _:
                raise ValueError(f"unexpected frame {type(frame).__name__} for a worker")

    def _submit(self, request: _PendingRequest) -> None:
        try:
            if request.positions is None:
                number = self.engine.submit(request.tokens, request.params)
            else:
                number = self.engine.submit_score(
                    request.tokens,
                    positions=request.positions,
                    columns=request.columns,
                    logprobs=request.logprobs,
                    params=request.params,
                )
        except RequestError as error:
            self._send_results([], [(request.id, "refused", str(error))], [])
            return
        self._requests[number] = request
        self._numbers[request.id] = number

    def _report(self, updates: list[Update]) -> None:
        values: list[tuple[int, np.ndarray]] = []
        errors: list[tuple[int, str, str]] = []
        pieces: list[frames.TextPiece] = []
        for update in updates:
            request = self._requests[update.request]
            pieces += _pieces(request, update)
            if update.values is None and update.sample is None:
                continue  # unfinished
            request.ended += 1
            if update.sample is not None:
                request.error = request.error or update.sample.error
                if request.positions is None and request.ended < request.params.n:
                    continue
            del self._requests[update.request], self._numbers[request.id]
            if update.values is not None:
                values.append((request.id, update.values))
            elif request.error is not None:
                errors += self._failed(request, request.error)
            else:
                pieces += request.whole
        if any(u.sample is not None and u.sample.error and u.sample.error.type in OUT_OF_MEMORY for u in updates):
            self.engine.shrink(SMALLEST_BUDGET)  # once per step, however many items it had
        if values or errors or pieces:
            self._send_results(values, errors, pieces)

    def _failed(self, request: _PendingRequest, error: ItemError) -> list[tuple[int, str, str]]:
        if error.type == RankLost.__name__:
            os._exit(RankLost.exit_code)
        if any(sign in error.message for sign in BROKEN_DEVICE) and error.type not in OUT_OF_MEMORY:
            os._exit(3)  # nothing computed on this device from now on can be trusted
        if error.type == "NotANumber":
            # It affects all requests with the same prefix: drop the cache, and compute each alone to find the cause.
            self.engine.new_version(self.engine.version)
        if request.retried:
            type = "nonfinite_score" if error.type == "NotANumber" else "compute_failed"
            return [(request.id, type, error.message)]
        request.retried = True
        request.begin_again()
        self._alone.append(request)
        return []

    def _send_results(
        self, values: list[tuple[int, np.ndarray]], errors: list[tuple[int, str, str]], pieces: list[frames.TextPiece]
    ) -> None:
        stats = self.engine.stats()
        self.send(
            frames.Results(
                ids=[id for id, _ in values],
                rows=[v.shape[0] for _, v in values],
                columns=[v.shape[1] for _, v in values],
                values=b"".join(np.ascontiguousarray(v, dtype="<f4").tobytes() for _, v in values),
                errors=errors,
                texts=[],
                tokens_computed=stats.tokens_computed - self._before.tokens_computed,
                tokens_shared=stats.tokens_shared - self._before.tokens_shared,
                steps=stats.steps - self._before.steps + self._short_steps,
                budget=self.engine.budget,
                pieces=pieces,
                seconds=self._timer.end([id for id, _ in values] + [piece.id for piece in pieces if piece.finish]),
            )
        )


def _pieces(request: _PendingRequest, update: Update) -> list[frames.TextPiece]:
    """The new part of a stream. Without streaming, a sample is kept and sent together with those of the same prompt: if
    one fails, all are sampled again."""
    sample, index = update.sample, update.index
    if update.values is not None or (sample is not None and (sample.error or sample.finish_reason == "abort")):
        return []
    if request.stream:
        at, begin = request.reported.get(index, (0, 0))
        request.reported[index] = (at + len(update.token_ids), begin + len(update.text))
        finish = "" if sample is None else sample.finish_reason
        new = (at, list(update.token_ids), list(update.raw_logprobs), begin, update.text, finish)
        stop = "" if sample is None else sample.stop
        return [frames.TextPiece(request.id, index, *new, top=list(update.top_logprobs), stop=stop)]
    if sample is not None:
        rows = (0, list(sample.token_ids), list(sample.raw_logprobs), 0, sample.text, sample.finish_reason)
        piece = frames.TextPiece(request.id, index, *rows, top=list(sample.top_logprobs or ()), stop=sample.stop)
        piece.prompt, piece.prompt_top = sample.prompt_logprobs, sample.prompt_top_logprobs
        piece.prompt_ranks = sample.prompt_ranks
        request.whole.append(piece)
    return []


@lru_cache(maxsize=1024)
def _salted(salt: str) -> SamplingParams:
    """Only the salt matters for a work; created once for each API key."""
    return SamplingParams(salt=salt)


def main(fd: int) -> None:
    run_worker(fd, frames.DECODER, frames.Start, _started)


def _started(
    start: frames.Start, sock: socket.socket, reader: FrameReader[frames.Frame]
) -> Worker | EncoderWorker:  # fmt: skip
    model, hello = _load(start.table)
    if isinstance(model, TextClassifier):
        return classifier_worker(sock, reader, model, hello)
    worker = Worker(sock, reader, model)
    worker.send(hello)
    worker.warm_up()
    worker.send(frames.Ready())
    return worker


def _load(tree: dict[str, Any]) -> tuple[Engine | TextClassifier, frames.Hello]:
    table = parse_reward(tree, "the model's table")
    if isinstance(table, ReadByEngine) and table.memory_fraction is not None:
        limit_memory(choose_device(table.device), table.memory_fraction)
    model: Engine | TextClassifier
    if isinstance(table, OutcomeTable | ProcessTable | LogprobsTable) and table.ranks > 1:
        group = lead(tree, table)
        group.on_loss = leave
        model, facts, tokenizer, digest = group.loaded()
    else:
        model, facts, tokenizer, digest = load_model(table)
    module = model.module if isinstance(model, TextClassifier) else model.decoder.module
    width = module.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    if width < NARROW and next(module.parameters()).device.type == "cpu" and getattr(table, "threads", None) is None:
        torch.set_num_threads(1)
    return model, frames.Hello(digest, msgspec.to_builtins(facts), model.budget, *tokenizer_parts(tokenizer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
