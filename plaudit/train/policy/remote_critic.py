"""A critic on an HTTP server (`plaudit critic`) instead of one in this process.

A request is retried while the server is unreachable or its worker has crashed, until the recipe's patience is
exhausted. An update has an id, so that it is applied once however often it is sent; and it contains this run's update
count, so that a critic with a different history refuses it. A checkpoint contains the name of the critic's save.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import numpy as np
import torch
from torch import Tensor

from plaudit.config.rl import CriticTable
from plaudit.errors import BadReply, ConfigError, RunError
from plaudit.records import Sample
from plaudit.serve.protocols.triton.request import HEADER, TritonReply, read_reply, write_request
from plaudit.train.optim.optimizer import NotFinite
from plaudit.train.policy.experience import Experience
from plaudit.train.policy.tally import Tally
from plaudit.train.run.overdue import Warn, ignore_warning
from plaudit.train.run.patient import PatientHttp, error_of

FILE = "critic.json"
ROWS = 512  # sequences in one request for values


class CriticFailed(RunError):
    """The critic server failed or refused a request."""


class RemoteCritic:
    def __init__(self, table: CriticTable, clip: float | None, vocabulary: int, warn: Warn = ignore_warning) -> None:
        """`clip` and `vocabulary` must be equal on the server. `warn` is called while the server is slow."""
        assert table.url is not None
        self._http = PatientHttp(
            "the critic", "critic", table.url, key_env=table.key_env, patience=table.patience,
            cure="start `plaudit critic` there", warn=warn, failed=CriticFailed, refused=self._refused,
        )  # fmt: skip
        self.url = self._http.url
        self._run = secrets.token_hex(8)
        self._sent = 0
        try:
            self.updates = self._agreed(clip, vocabulary)
        except BaseException:
            self.close()
            raise

    def _agreed(self, clip: float | None, vocabulary: int) -> int:
        """Check that the critic fits this run, and return its update count."""
        state = self._json("GET", "/v1/critic")
        if state["vocabulary"] < vocabulary:
            raise ConfigError(
                f"the critic at {self.url} has a vocabulary of {state['vocabulary']} tokens and the policy one of "
                f"{vocabulary}: the critic reads the policy's tokens, so they must be the same"
            )
        if state["clip"] != (clip or 0):
            raise ConfigError(
                f"the critic at {self.url} clips its loss at {state['clip']:g}, and algorithm.clip.value is "
                f"{clip or 0:g} (0: not at all): start it with --clip {clip or 0:g}, or change the recipe"
            )
        updates: int = state["updates"]
        return updates

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def values(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        before, after = [], []
        for at in range(0, len(samples), ROWS):
            part = samples[at : at + ROWS]
            lengths = [len(sample.prompt_ids) + len(sample.token_ids) for sample in part]
            sizes = np.array(lengths, dtype=np.int64)[:, None]
            reply = self._infer("critic_infer", {"tokens": _tokens(part), "sequence_lengths": sizes}, {})
            values = _expected(reply, "values", (len(part), max(lengths)))
            for row, sample, length in zip(values, part, lengths, strict=True):
                before.append(row[len(sample.prompt_ids) - 1 : length - 1])
                after.append(row[length - 1])
        return torch.from_numpy(np.concatenate(before)), torch.from_numpy(np.array(after, dtype=np.float32))

    def update(self, experience: Experience, step: int) -> Tally:
        tally = Tally()
        if not experience.mask.any():
            return tally  # nothing to train on
        assert experience.values is not None
        assert experience.returns is not None
        samples = experience.samples
        fields = {"returns": experience.returns, "prev_values": experience.values, "mask": experience.mask.float()}
        tensors = {"tokens": _tokens(samples), **{n: _columns(samples, t.numpy()) for n, t in fields.items()}}
        self._sent += 1
        parameters = {"update_id": f"{self._run}-{self._sent}", "updates": self.updates}
        reply = self._infer("critic_train", tensors, parameters)
        loss = float(_expected(reply, "loss_mean", (1,))[0])
        self.updates = int(reply.parameters["updates"])
        tally.add("value/loss", torch.tensor(loss))
        for name, weight in (("value/clip", int(experience.mask.sum())), ("value/grad_norm", 1)):
            if name in reply.parameters:
                tally.weighted(name, float(reply.parameters[name]), weight)
        return tally

    def save(self, directory: Path) -> None:
        """Have the server save the critic's state, and store the save's name."""
        reply = self._infer("critic_save", {"dummy_var": np.zeros(1, dtype=np.int64)}, {})
        saved = {"url": self.url, "save": reply.parameters["save"], "updates": reply.parameters["updates"]}
        if saved["updates"] != self.updates:
            raise CriticFailed(
                f"the critic at {self.url} saved {saved['updates']} updates, and this run made {self.updates}: "
                "another run trains it; use one server per run, then --resume"
            )
        (directory / FILE).write_text(json.dumps(saved), encoding="utf-8")

    def load(self, directory: Path) -> None:
        saved = json.loads((directory / FILE).read_text(encoding="utf-8"))
        state = self._json("POST", "/v1/critic/load", {"save": saved["save"]})
        if state["updates"] != saved["updates"]:
            raise CriticFailed(
                f"{saved['save']} of the critic at {self.url} has {state['updates']} updates, the checkpoint "
                f"{saved['updates']}: it is of another critic; start the critic server that this run used"
            )
        self.updates = state["updates"]

    # HTTP

    def _infer(self, model: str, tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> TritonReply:
        body, headers = write_request(tensors, parameters)
        reply = self._http.send("POST", f"/v2/models/{model}/infer", body, headers)
        try:
            return read_reply(reply.content, reply.headers.get(HEADER))
        except BadReply as error:
            raise CriticFailed(f"the critic at {self.url}, {model}: {error}") from None

    def _json(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
        body = b"" if content is None else msgspec.json.encode(content)
        reply = self._http.send(method, path, body, {"Content-Type": "application/json"})
        try:
            return msgspec.json.decode(reply.content, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise CriticFailed(
                f"{self.url}{path} returned no JSON: check that it is a `plaudit critic` server"
            ) from None

    def _refused(self, reply: httpx.Response, path: str, why: str) -> RunError:
        if error_of(reply).get("type") == "not_finite":
            return NotFinite(why)
        cure = {
            401: "set critic.key_env", 403: "set critic.key_env to the admin key's variable",
            409: "--resume goes back to the last checkpoint of both",
        }.get(reply.status_code)  # fmt: skip
        refusal = f"the critic at {self.url} refuses {path} ({reply.status_code}): {why}"
        return CriticFailed(refusal if cure is None else f"{refusal}; {cure}")


def _tokens(samples: Sequence[Sample]) -> np.ndarray:
    """[N, T], zeros on the right."""
    rows = [sample.prompt_ids + sample.token_ids for sample in samples]
    tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = row
    return tokens


def _columns(samples: Sequence[Sample], flat: np.ndarray) -> np.ndarray:
    """[N, T-1]: the value of token t + 1 is in column t."""
    longest = max(len(sample.prompt_ids) + len(sample.token_ids) for sample in samples)
    columns = np.zeros((len(samples), longest - 1), dtype=np.float32)
    at = 0
    for row, sample in enumerate(samples):
        first, count = len(sample.prompt_ids) - 1, len(sample.token_ids)
        columns[row, first : first + count] = flat[at : at + count]
        at += count
    return columns


def _expected(reply: TritonReply, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = reply.tensors.get(name)
    if values is None or values.shape != shape or not np.isfinite(values).all():
        got = "nothing" if values is None else f"shape {values.shape}, or numbers that are not finite"
        raise CriticFailed(f"the critic returned {got} as {name}: expected shape {shape}")
    return values
