"""The worker process of an encoder: `python -m plaudit.serve.workers.encoder_worker FD`, started by `link.py`.

It accepts Works like the worker of a reward model and answers each with one row: a sentence encoder with its vector, a
text classifier (started by `worker.py`) with its logits.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from plaudit.config.reward import EmbeddingTable, parse_reward
from plaudit.core.kv.memory import limit_memory
from plaudit.models import choose_device
from plaudit.models.encoder import load_encoder
from plaudit.models.text import tokenizer_parts
from plaudit.models.text_classifier import TextClassifier, next_batch
from plaudit.process.framing import FrameReader
from plaudit.process.worker import SocketWorker, run_worker
from plaudit.reward.load import file_hashes, model_files
from plaudit.reward.version import model_digest
from plaudit.reward.work import ModelInfo
from plaudit.serve.workers import frames

Compute = Callable[[Sequence[Sequence[int]], Sequence[bytes]], np.ndarray]
"""Maps rows of tokens and their token types to (rows, columns)."""


class EncoderWorker(SocketWorker[frames.Frame]):
    def __init__(
        self, sock: socket.socket, reader: FrameReader[frames.Frame], compute: Compute, budget: int,
        module: torch.nn.Module,
    ) -> None:  # fmt: skip
        super().__init__(sock, reader)
        self.compute = compute
        self.budget = budget
        self._module = module
        self._waiting: dict[int, tuple[list[int], bytes]] = {}
        self._timer = frames.Timer()
        self._computed = self._batches = 0

    def device_bytes(self) -> int:
        return device_bytes(self._module)

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def take(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Works():
                rows = zip(frames.cut(frame.tokens, frame.lengths), frame.types or [b""] * len(frame.ids), strict=True)
                self._waiting.update(zip(frame.ids, rows, strict=True))
                self._timer.take(frame.ids if frame.timed else ())
            case frames.Cancel():
                self._timer.end(frame.ids)
                for id in frame.ids:
                    self._waiting.pop(id, None)
            case _:
                raise ValueError(f"unexpected frame {type(frame).__name__} for an encoder's worker")

    def step(self) -> None:
        if self._waiting:
            self._answer(next_batch({id: len(row) for id, (row, _) in self._waiting.items()}, self.budget))

    def _answer(self, ids: list[int]) -> None:
        taken = [self._waiting.pop(id) for id in ids]
        rows = [row for row, _ in taken]
        errors: list[tuple[int, str, str]] = []
        try:
            vectors = self.compute(rows, [types for _, types in taken])
        except (RuntimeError, MemoryError) as error:
            if len(ids) > 1:  # computed alone, each shows whether it is the cause
                for id, row in zip(ids, taken, strict=True):
                    self._waiting[id] = row
                    self._answer([id])
                return
            vectors, ids, errors = np.empty((0, 0)), [], [(ids[0], "compute_failed", f"the step failed: {error}")]
        self._computed += sum(map(len, rows))
        self._batches += 1
        finite = [bool(np.isfinite(vector).all()) for vector in vectors]
        errors += [(id, "nonfinite_score", "not finite") for id, good in zip(ids, finite, strict=True) if not good]
        sound = [id for id, good in zip(ids, finite, strict=True) if good]
        values = np.ascontiguousarray(vectors[np.array(finite, dtype=bool)], dtype="<f4")
        width = values.shape[1]
        self.send(
            frames.Results(
                sound, [1] * len(sound), [width] * len(sound), values.tobytes(), errors, [], self._computed, 0,
                self._batches, self.budget, seconds=self._timer.end(sound),
            )
        )  # fmt: skip


def device_bytes(module: torch.nn.Module) -> int:
    """GPU memory reserved by torch on the model's device; 0 on a CPU."""
    device = next(module.parameters()).device
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def classifier_worker(
    sock: socket.socket, reader: FrameReader[frames.Frame], classifier: TextClassifier, hello: frames.Hello
) -> EncoderWorker:
    worker = EncoderWorker(sock, reader, classifier.logits, hello.budget, classifier.module)
    worker.send(hello)
    most = min(classifier.limit, hello.facts["max_positions"])
    classifier.logits([[0] * most] * max(1, hello.budget // most), [b""] * max(1, hello.budget // most))
    worker.send(frames.Ready())
    return worker


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
    # allocates the most memory it will need
    encoder.embed([[0] * encoder.limit] * max(1, table.budget // encoder.limit))
    worker = EncoderWorker(sock, reader, lambda rows, _: encoder.embed(rows), table.budget, encoder.module)
    parts = tokenizer_parts(encoder.tokenizer)
    pooling = f"{encoder.pool} {encoder.normalise} {encoder.limit}"
    digest = model_digest(table, file_hashes(model_files(encoder.path)), parts, pooling)
    worker.send(frames.Hello(digest, msgspec.to_builtins(facts), table.budget, *parts))
    worker.send(frames.Ready())
    return worker


if __name__ == "__main__":
    main(int(sys.argv[1]))
