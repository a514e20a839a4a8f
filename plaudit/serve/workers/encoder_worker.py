"""The process that runs a sentence encoder: `python -m plaudit.serve.workers.encoder_worker FD`, started by `link.py`.

It takes Works as the worker of a reward model does and answers each with one row, its vector.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress

import msgspec
import numpy as np
import torch

from plaudit.config.reward import EmbeddingTable, parse_reward
from plaudit.core.kv.memory import limit_memory
from plaudit.errors import PlauditError
from plaudit.models import choose_device
from plaudit.models.encoder import Encoder, load_encoder
from plaudit.models.text import tokenizer_parts
from plaudit.reward.load import file_hashes, model_files
from plaudit.reward.version import model_digest
from plaudit.reward.work import ModelInfo
from plaudit.serve.workers import frames
from plaudit.serve.workers.worker import ALIVE_EVERY, fail, first_frame


class EncoderWorker:
    def __init__(self, sock: socket.socket, encoder: Encoder, budget: int) -> None:
        self.sock = sock
        self.encoder = encoder
        self.budget = budget
        self._incoming = select.poll()
        self._incoming.register(sock, select.POLLIN)
        self._unpacker = frames.Unpacker()
        self._waiting: OrderedDict[int, list[int]] = OrderedDict()
        self._sending = threading.Lock()
        self._computed = self._steps = 0

    def send(self, frame: frames.Frame) -> None:
        with self._sending:
            self.sock.sendall(frames.pack(frame))

    def run(self) -> None:
        threading.Thread(target=self._say_alive, daemon=True).start()
        while self._receive(block=not self._waiting):
            if self._waiting:
                self._step(self._next())

    def _say_alive(self) -> None:
        with suppress(OSError):
            while True:
                time.sleep(ALIVE_EVERY)
                self.send(frames.Alive())

    def _receive(self, block: bool) -> bool:
        while self._incoming.poll(None if block else 0):
            data = self.sock.recv(1 << 20)
            if not data:
                return False
            for frame in self._unpacker.feed(data):
                if isinstance(frame, frames.Works):
                    self._waiting.update(zip(frame.ids, frames.cut(frame.tokens, frame.lengths), strict=True))
                elif isinstance(frame, frames.Cancel):
                    for id in frame.ids:
                        self._waiting.pop(id, None)
            block = False
        return True

    def _next(self) -> list[int]:
        """The first that waits, and those nearest to it in length, for they are padded to one: within the budget."""
        first = len(next(iter(self._waiting.values())))
        chosen: list[int] = []
        longest = 0
        for id, row in sorted(self._waiting.items(), key=lambda item: abs(len(item[1]) - first)):
            longest = max(longest, len(row))
            if chosen and longest * (len(chosen) + 1) > self.budget:
                break
            chosen.append(id)
        return chosen

    def _step(self, ids: list[int]) -> None:
        rows = [self._waiting.pop(id) for id in ids]
        errors: list[tuple[int, str, str]] = []
        try:
            vectors = self.encoder.embed(rows)
        except (RuntimeError, MemoryError) as error:
            if len(ids) > 1:  # alone each shows whose it is
                for id, row in zip(ids, rows, strict=True):
                    self._waiting[id] = row
                    self._step([id])
                return
            vectors, ids, errors = np.empty((0, 0)), [], [(ids[0], "compute_failed", f"the step failed: {error}")]
        self._computed += sum(map(len, rows))
        self._steps += 1
        finite = np.isfinite(vectors).all(axis=1)
        errors += [(id, "nonfinite_score", "not finite") for id, good in zip(ids, finite, strict=True) if not good]
        sound = [id for id, good in zip(ids, finite, strict=True) if good]
        values = np.ascontiguousarray(vectors[finite], dtype="<f4")
        width = values.shape[1]
        self.send(
            frames.Results(
                sound, [1] * len(sound), [width] * len(sound), values.tobytes(), errors, [], self._computed, 0,
                self._steps, self.budget,
            )
        )  # fmt: skip


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    start = first_frame(sock)
    try:
        table = parse_reward(start.table, "the model's table")
        assert isinstance(table, EmbeddingTable)
        device = choose_device(table.device)
        if table.memory_fraction is not None:
            limit_memory(device, table.memory_fraction)
        if table.threads is not None:
            torch.set_num_threads(table.threads)
        encoder = load_encoder(table.path, table.dtype, device)
        facts = ModelInfo(
            type(encoder.module).__name__, encoder.module.config.vocab_size, encoder.limit, (), False  # type: ignore[union-attr, arg-type]
        )  # fmt: skip
        encoder.embed([[0] * encoder.limit] * max(1, table.budget // encoder.limit))  # the most memory it will need
    except (PlauditError, OSError, ValueError, RuntimeError, MemoryError) as error:
        fail(sock, error)
    with suppress(BrokenPipeError, ConnectionResetError):  # the front is gone
        worker = EncoderWorker(sock, encoder, table.budget)
        parts = tokenizer_parts(encoder.tokenizer)
        pooling = f"{encoder.pool} {encoder.normalise} {encoder.limit}"
        digest = model_digest(table, file_hashes(model_files(encoder.path)), parts, pooling)
        worker.send(frames.Hello(digest, msgspec.to_builtins(facts), table.budget, *parts))
        worker.send(frames.Ready())
        worker.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
