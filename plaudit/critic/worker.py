"""The worker process of a critic: `python -m plaudit.critic.worker FD`, started by `serve/workers/link.py`.

It handles one call after the other, in order. An update is made completely or not at all; its answer is stored under
its id, so that a retried update is answered without being made again.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from plaudit.config.critic import CriticServerTable, parse_critic
from plaudit.critic.host import CriticInfo, State
from plaudit.errors import BadCheckpoint, ModelError, PlauditError, StorageError, one_line
from plaudit.models import ValueModel, choose_device, load_value, resolve, save
from plaudit.models.load import kind_of
from plaudit.models.positions import longest_sequence
from plaudit.process.framing import FrameReader
from plaudit.process.worker import SocketWorker, run_worker
from plaudit.records import Item, Sample, Score
from plaudit.reward.directory import complete
from plaudit.reward.load import load_reward
from plaudit.reward.model import ModelReward
from plaudit.reward.reading import OutcomeReading
from plaudit.serve.workers import frames
from plaudit.serve.workers.worker import BROKEN_DEVICE
from plaudit.train.optim.optimizer import NotFinite, Optimizer
from plaudit.train.policy.critic import LocalCritic
from plaudit.train.policy.experience import Experience
from plaudit.train.policy.rl_models import without_dropout
from plaudit.train.run.checkpoint import Checkpoint, Checkpoints

REMEMBERED = 64  # updates whose answers are stored
DIGEST = "critic"  # its weights change, so a hash of them would not identify it


class _Refusal(Exception):
    """An error whose `type` is known to `critic/host.py`."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type


@dataclass(frozen=True, slots=True)
class Reply:
    blocks: list[np.ndarray]
    text: str


class ServedCritic:
    """A critic with its optimizer, its number of updates and its saves."""

    def __init__(self, table: CriticServerTable, start: str | None = None) -> None:
        """`start` is the save to load, "" for none; None: as set in the table."""
        self.table = table
        self.saves = Checkpoints(Path(table.save_dir), table.keep)
        self.answered: OrderedDict[str, dict[str, float]] = OrderedDict()
        if start is None:
            checkpoint = self.saves.load(_warn) if table.resume else None
        else:
            checkpoint = self.saves.named(start) if start else None
        self._begin(checkpoint)
        self.reward = None if table.reward is None else _reward(table, len(self.tokenizer))

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.critic.tokenizer

    @property
    def state(self) -> State:
        return State(self.updates, self.save_name, self.saved)

    def facts(self) -> CriticInfo:
        config = self.critic.model.config
        count = sum(parameter.numel() for parameter in self.critic.model.parameters())
        return CriticInfo(config.vocab_size, longest_sequence(config), count, self.reward is not None)

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Loads a save, or the model of the table. If that fails nothing of this critic changes."""
        table = self.table
        source = resolve(table.model) if checkpoint is None else checkpoint.model
        fresh = kind_of(source) != "value"
        loaded = load_value(source, table.dtype, choose_device(table.device), fresh_head=fresh, seed=table.seed)
        model = loaded.module
        assert isinstance(model, ValueModel)
        if fresh:
            nn.init.zeros_(model.score.weight)  # an untrained critic predicts 0
        without_dropout(model)
        optimizer = Optimizer(model, table.optimizer())
        updates = 0
        if checkpoint is not None:
            optimizer.load(checkpoint.optimizer())
            updates = int(checkpoint.state["updates"])
            self.answered = OrderedDict(checkpoint.state["answered"])
        self.critic = LocalCritic(
            model, loaded.tokenizer, optimizer, clip=table.clip or None, micro_batch_tokens=table.micro_batch_tokens
        )
        self.updates = self.saved = updates
        self.save_name = None if checkpoint is None else checkpoint.path.name

    # Calls

    def evaluate(self, call: frames.Evaluate) -> Reply:
        rows = list(frames.cut(call.tokens, call.lengths)) if call.texts is None else self._tokenised(call)
        if not rows:
            return Reply([np.zeros((0, 1), dtype="<f4")], "[]")
        before, after = self.critic.values([_sample(row, 1) for row in rows])
        lengths = [len(row) for row in rows]
        ends = torch.tensor([length - 1 for length in lengths]).cumsum(0)
        parts = [torch.cat([b, a[None]]) for b, a in zip(before.tensor_split(ends[:-1]), after, strict=True)]
        values = torch.cat(parts).numpy()
        if not np.isfinite(values).all():
            raise _Refusal("nonfinite_value", "the critic returned a value that is not finite: its weights are damaged")
        return Reply([values[:, None], *self._rewards(rows)], msgspec.json.encode(lengths).decode())

    def _tokenised(self, call: frames.Evaluate) -> list[list[int]]:
        """Tokenises without BOS and EOS, as the original does."""
        limit, end = self.facts().positions, self.tokenizer.eos_token_id
        rows: list[list[int]] = []
        for at, text in enumerate(call.texts or ()):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            ids = [*ids, end] if call.add_end and end is not None else ids
            if not 1 <= len(ids) <= limit:
                raise _Refusal("refused", f"sentences[{at}] has {len(ids)} tokens; expected 1 to {limit}")
            rows.append(ids)
        return rows

    def _rewards(self, rows: list[list[int]]) -> list[np.ndarray]:
        if self.reward is None:
            return []
        values = []
        for at, score in enumerate(self.reward.score([Item(tokens=tuple(row)) for row in rows])):
            assert isinstance(score, Score)
            if score.value is None:
                assert score.error is not None
                raise _Refusal("refused", f"row {at} has no reward: {score.error.message}")
            values.append(score.value)
        return [np.array(values, dtype="<f4")[:, None]]

    def learn(self, call: frames.Learn) -> Reply:
        if call.update_id and call.update_id in self.answered:
            return Reply([], msgspec.json.encode(self.answered[call.update_id]).decode())
        if call.updates is not None and call.updates != self.updates:
            raise _Refusal(
                "conflict", f"this critic has {self.updates} updates but the caller expects {call.updates}: another "
                "client trains it, or a save was loaded",
            )  # fmt: skip
        experience = _experience(call)
        size = self.table.batch or len(experience.samples)
        parts = [range(at, min(at + size, len(experience.samples))) for at in range(0, len(experience.samples), size)]
        sums: dict[str, float] = {}
        for number, part in enumerate(parts, 1):
            try:
                tally = self.critic.update(experience.select(part) if len(parts) > 1 else experience, self.updates)
            except NotFinite:
                raise _Refusal(
                    "not_finite", f"the gradient of update {number} of {len(parts)} is not finite, so it was skipped "
                    "and "
                    f"the weights are unchanged; lower lr (now {self.table.lr:g}) or check the returns",
                ) from None  # fmt: skip
            self.updates += 1
            for name, value in tally.metrics().items():
                sums[name] = sums.get(name, 0.0) + value / len(parts)
        metrics: dict[str, float] = {**sums, "updates": self.updates}
        if call.update_id:
            self.answered[call.update_id] = metrics
            while len(self.answered) > REMEMBERED:
                self.answered.popitem(last=False)
        return Reply([], msgspec.json.encode(metrics).decode())

    def keep(self, call: frames.Keep) -> Reply:
        try:
            if call.load is not None:
                self._begin(self.saves.named(call.load))
            else:
                self._save()
        except BadCheckpoint as error:
            raise _Refusal("unknown_save", self._scrubbed(error)) from None
        except StorageError as error:
            raise _Refusal("storage", self._scrubbed(error)) from None
        return Reply([], msgspec.json.encode(self.state).decode())

    def _save(self) -> None:
        critic, state = self.critic, {"updates": self.updates, "answered": list(self.answered.items())}

        def save_model(directory: Path) -> Path:
            return save(critic.model, critic.tokenizer, directory)

        path = self.saves.save(self.saves.next(), save_model, critic.optimizer.save, state)
        self.save_name, self.saved = path.name, self.updates

    def _scrubbed(self, error: Exception) -> str:
        """The message without the server's private paths."""
        return one_line(error).replace(f"{self.saves.directory}/", "").replace(str(self.saves.directory), "save_dir")


def _reward(table: CriticServerTable, vocabulary: int) -> ModelReward:
    assert table.reward is not None
    reward = load_reward(complete({"path": table.reward, "dtype": table.dtype, "device": table.device}, "reward"))
    if not isinstance(reward, ModelReward) or not isinstance(reward.reading, OutcomeReading):
        raise ModelError(f"{table.reward} is not an outcome model; expected one whose score is a single number")
    reward_vocabulary = len(reward.reading.intake.tokenizer)
    if reward_vocabulary != vocabulary:
        raise ModelError(
            f"{table.reward} has a vocabulary of {reward_vocabulary} tokens but {table.model} one of {vocabulary}: "
            "both read the same tokens, so the vocabularies must be equal"
        )
    return reward


def _sample(row: list[int], prompt: int) -> Sample:
    """A row in the trainer's form: the tokens before the first one that counts are its prompt."""
    rest = tuple(row[prompt:])
    none, ones = (0.0,) * len(rest), (1,) * len(rest)
    return Sample(tuple(row[:prompt]), rest, "", none, none, (0,) * len(rest), ones, "stop")


def _experience(call: frames.Learn) -> Experience:
    rows = frames.cut(call.tokens, call.lengths)
    samples = tuple(_sample(row, prompt) for row, prompt in zip(rows, call.prompts, strict=True))

    def tensor(data: bytes, kind: str) -> Tensor:
        return torch.from_numpy(np.frombuffer(data, dtype=kind).copy())

    mask = tensor(call.mask, "?")
    nothing = torch.zeros(len(mask))
    return Experience(
        samples, mask, nothing, nothing, values=tensor(call.values, "<f4"), returns=tensor(call.returns, "<f4")
    )


class CriticWorker(SocketWorker[frames.Frame]):
    def __init__(self, sock: socket.socket, reader: FrameReader[frames.Frame], critic: ServedCritic) -> None:
        super().__init__(sock, reader)
        self.critic = critic
        self._waiting: deque[frames.Evaluate | frames.Learn | frames.Keep] = deque()
        self._answered = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        if self._waiting:
            self._answer(self._waiting.popleft())

    def take(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Evaluate() | frames.Learn() | frames.Keep():
                self._waiting.append(frame)
            case frames.Cancel():
                # Values of a cancelled call are skipped; an update is always made.
                cancelled = set(frame.ids)
                self._waiting = deque(
                    f for f in self._waiting if f.id not in cancelled or not isinstance(f, frames.Evaluate)
                )
            case _:
                raise ValueError(f"unexpected frame {type(frame).__name__} for a critic's worker")

    def _answer(self, call: frames.Evaluate | frames.Learn | frames.Keep) -> None:
        self._answered += 1
        try:
            match call:
                case frames.Evaluate():
                    reply = self.critic.evaluate(call)
                case frames.Learn():
                    reply = self.critic.learn(call)
                case frames.Keep():
                    reply = self.critic.keep(call)
        except _Refusal as refusal:
            self._fail(call.id, refusal.type, str(refusal))
        except PlauditError as error:
            self._fail(call.id, "refused", str(error))
        except RuntimeError as error:  # torch's errors, mostly out of memory. The weights are unchanged
            if any(sign in str(error) for sign in BROKEN_DEVICE) and not isinstance(error, torch.OutOfMemoryError):
                os._exit(3)  # nothing computed on this device from now on can be trusted
            self._fail(call.id, "compute_failed", one_line(error))
        else:
            self._send(call.id, reply.blocks, [], [(call.id, reply.text)])

    def _fail(self, id: int, type: str, message: str) -> None:
        self._send(id, [], [(id, type, message)], [])

    def _send(
        self, id: int, blocks: list[np.ndarray], errors: list[tuple[int, str, str]], texts: list[tuple[int, str]]
    ) -> None:
        state = msgspec.json.encode(self.critic.state).decode()
        self.send(
            frames.Results(
                ids=[id] * len(blocks), rows=[b.shape[0] for b in blocks], columns=[b.shape[1] for b in blocks],
                values=b"".join(np.ascontiguousarray(b, dtype="<f4").tobytes() for b in blocks), errors=errors,
                texts=[(0, state), *texts], tokens_computed=0, tokens_shared=0, steps=self._answered,
                budget=self.critic.table.micro_batch_tokens,
            )
        )  # fmt: skip


def _warn(message: str) -> None:
    print(f"plaudit critic: {message}", file=sys.stderr)


def main(fd: int) -> None:
    run_worker(fd, frames.DECODER, frames.Start, _started)


def _started(start: frames.Start, sock: socket.socket, reader: FrameReader[frames.Frame]) -> CriticWorker:
    save = start.table.pop("start", None)
    table = parse_critic(start.table, "the critic's table")
    if table.threads is not None:
        torch.set_num_threads(table.threads)
    critic = ServedCritic(table, save)
    worker = CriticWorker(sock, reader, critic)
    about = {"facts": msgspec.to_builtins(critic.facts()), "state": msgspec.to_builtins(critic.state)}
    worker.send(frames.Hello(DIGEST, about, table.micro_batch_tokens, b"", {}))
    worker.send(frames.Ready())
    return worker


if __name__ == "__main__":
    main(int(sys.argv[1]))
