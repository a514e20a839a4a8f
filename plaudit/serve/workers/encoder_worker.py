"""The process that runs a sentence encoder: `python -m plaudit.serve.workers.encoder_worker FD`, started by `link.py`.

It takes Works as the worker of a reward model does and answers each with one row, its vector.
"""

from __future__ import annotations

import socket
import sys
from collections import OrderedDict

import msgspec
import numpy as np
import torch

from plaudit.config.reward import EmbeddingTable, parse_reward
from plaudit.core.kv.memory import limit_memory
from plaudit.models import choose_device
from plaudit.models.encoder import Encoder, load_encoder
from plaudit.models.text import tokenizer_parts
from plaudit.process.framing import FrameReader
from plaudit.process.worker import SocketWorker, run_worker
from plaudit.reward.load import file_hashes, model_files
from plaudit.reward.version import model_digest
from plaudit.reward.work import ModelInfo
from plaudit.serve.workers import frames


class EncoderWorker(SocketWorker[frames.Frame]):
    def __init__(
        self, sock: socket.socket, reader: FrameReader[frames.Frame], encoder: Encoder, budget: int
    ) -> None:  # fmt: skip
        super().__init__(sock, reader)
        self.encoder = encoder
        self.budget = budget
        self._waiting: OrderedDict[int, list[int]] = OrderedDict()
        self._computed = self._batches = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def take(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Works():
                self._waiting.update(zip(frame.ids, frames.cut(frame.tokens, frame.lengths), strict=True))
            case frames.Cancel():
                for id in frame.ids:
                    self._waiting.pop(id, None)
            case _:
                raise ValueError(f"an encoder's worker takes no {type(frame).__name__}")

    def step(self) -> None:
        if self._waiting:
            self._embed(self._next())

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

    def _embed(self, ids: list[int]) -> None:
        rows = [self._waiting.pop(id) for id in ids]
        errors: list[tuple[int, str, str]] = []
        try:
            vectors = self.encoder.embed(rows)
        except (RuntimeError, MemoryError) as error:
            if len(ids) > 1:  # alone each shows whose it is
                for id, row in zip(ids, rows, strict=True):
                    self._waiting[id] = row
                    self._embed([id])
                return
            vectors, ids, errors = np.empty((0, 0)), [], [(ids[0], "compute_failed", f"the step failed: {error}")]
        self._computed += sum(map(len, rows))
        self._batches += 1
        finite = np.isfinite(vectors).all(axis=1)
        errors += [(id, "nonfinite_score", "not finite") for id, good in zip(ids, finite, strict=True) if not good]
        sound = [id for id, good in zip(ids, finite, strict=True) if good]
        values = np.ascontiguousarray(vectors[finite], dtype="<f4")
        width = values.shape[1]
        self.send(
            frames.Results(
                sound, [1] * len(sound), [width] * len(sound), values.tobytes(), errors, [], self._computed, 0,
                self._batches, self.budget,
            )
        )  # fmt: skip


def main(fd: int) -> None:
    run_worker(fd, frames.DECODER, frames.Start, _started)


def _started(start: frames.Start, sock: socket.socket, reader: FrameReader[frames.Frame]) -> EncoderWorker:
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
    worker = EncoderWorker(sock, reader, encoder, table.budget)
    parts = tokenizer_parts(encoder.tokenizer)
    pooling = f"{encoder.pool} {encoder.normalise} {encoder.limit}"
    digest = model_digest(table, file_hashes(model_files(encoder.path)), parts, pooling)
    worker.send(frames.Hello(digest, msgspec.to_builtins(facts), table.budget, *parts))
    worker.send(frames.Ready())
    return worker


if __name__ == "__main__":
    main(int(sys.argv[1]))
