"""Runs a real critic server in a separate process and sends it NeMo-Aligner's requests, for tests."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from plaudit.config import to_toml
from plaudit.serve.protocols.triton.request import HEADER, TritonReply, read_reply, write_request
from tests.serve.process import ServerProcess, free_port


class CriticProcess(ServerProcess):
    """`plaudit critic` on a free port. `tree` is a critic.toml as plain data; saves go to a temporary directory unless
    `save_dir` is given."""

    def __init__(
        self, tree: Mapping[str, Any] | None = None, *arguments: str, save_dir: Path | None = None, wait: bool = True
    ) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.port = free_port()
        self.saves = save_dir or Path(self.directory.name) / "saves"
        file = Path(self.directory.name) / "critic.toml"
        given = {"model": "sums-policy", "lr": 1e-3, "threads": 1, "save_dir": str(self.saves), **(tree or {})}
        file.write_text(to_toml(given))
        self.begin(["critic", "--port", str(self.port), "--config", str(file), *arguments], None, (), wait)

    def state(self) -> dict[str, Any]:
        status: dict[str, Any] = self.http.get("/v1/critic").json()
        return status

    def post(
        self, model: str, tensors: Mapping[str, np.ndarray], headers: Mapping[str, str] | None = None, **parameters: Any
    ) -> httpx.Response:
        body, own = write_request(tensors, parameters)
        return self.http.post(f"/v2/models/{model}/infer", content=body, headers={**own, **(headers or {})})

    def ask(self, model: str, tensors: Mapping[str, np.ndarray], **parameters: Any) -> TritonReply:
        reply = self.post(model, tensors, **parameters)
        assert reply.status_code == 200, reply.text
        return read_reply(reply.content, reply.headers.get(HEADER))

    def values(self, rows: Sequence[Sequence[int]], columns: int = 64) -> np.ndarray:
        return self.ask("critic_infer", padded(rows, columns)).tensors["values"]

    def train(self, lesson: Mapping[str, np.ndarray], **parameters: Any) -> float:
        return float(self.ask("critic_train", lesson, **parameters).tensors["loss_mean"][0])

    def save(self) -> str:
        given = self.ask("critic_save", {"dummy_var": np.zeros(1, dtype=np.int64)})
        assert given.tensors["status"].tolist() == [0]
        return str(given.parameters["save"])

    def load(self, name: str) -> httpx.Response:
        return self.http.post("/v1/critic/load", json={"save": name})


def padded(rows: Sequence[Sequence[int]], columns: int = 64) -> dict[str, np.ndarray]:
    """The tensors that NeMo-Aligner sends: rows padded with zeros on the right, and their lengths."""
    tokens = np.zeros((len(rows), columns), dtype=np.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return {"tokens": tokens, "sequence_lengths": np.array([[len(row)] for row in rows], dtype=np.int64)}


def lesson(
    rows: Sequence[Sequence[int]], prompts: Sequence[int], returns: Sequence[float], values: np.ndarray,
    columns: int = 64,
) -> dict[str, np.ndarray]:  # fmt: skip
    """A training batch: a constant return per row, after its prompt. `values` [B, columns] are the critic's."""
    mask = np.zeros((len(rows), columns - 1), dtype=np.float32)
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        mask[index, prompt - 1 : len(row) - 1] = 1
    targets = mask * np.array(returns, dtype=np.float32)[:, None]
    old = values[:, :-1] * mask
    return {"tokens": padded(rows, columns)["tokens"], "returns": targets, "prev_values": old, "mask": mask}
