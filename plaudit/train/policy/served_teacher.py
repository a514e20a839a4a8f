"""A teacher on an HTTP server: log-probs of a text's tokens from `plaudit serve` or SGLang (POST /generate)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from plaudit.config.algorithm import TeacherTable
from plaudit.errors import ConfigError, RunError
from plaudit.records import Sample
from plaudit.train.policy.experience import own_tokens
from plaudit.train.run.overdue import Warn, ignore_warning
from plaudit.train.run.patient import PatientHttp

ROWS = 64  # sequences in one request
PROBES, PROBE_TOKENS = 8, 32  # sequences of the first request, which checks the server's vocabulary


class TeacherFailed(RunError):
    """The teacher's server failed or refused a request."""


class ServedTeacher:
    module = None

    def __init__(
        self, name: str, table: TeacherTable, tokenizer: PreTrainedTokenizerFast, warn: Warn = ignore_warning
    ) -> None:
        """`tokenizer` is the policy's, which the server's must equal. `warn` is called while the server is slow."""
        assert table.url is not None
        self.name, self.model = name, table.model
        self._http = PatientHttp(
            f"the teacher {name}", f"algorithm.teachers.{name}", table.url, key_env=table.key_env,
            patience=table.patience, cure="start its server there", warn=warn, failed=TeacherFailed,
            refused=self._refused,
        )  # fmt: skip
        try:
            self._check_vocabulary(tokenizer)
        except BaseException:
            self.close()
            raise

    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        logps: list[float] = []
        for at in range(0, len(samples), ROWS):
            part = samples[at : at + ROWS]
            rows = [[*sample.prompt_ids, *sample.token_ids] for sample in part]
            # The first entry is the prompt's last token's, and empty: no token before it is scored.
            starts = [len(sample.prompt_ids) - 1 for sample in part]
            for sample, entries in zip(part, self._entries(rows, starts), strict=True):
                logps += [entry[0] for entry in self._checked(entries[1:], sample.token_ids)]
        return torch.where(own_tokens(samples), torch.tensor(logps, dtype=torch.float32), 0.0)

    def close(self) -> None:
        self._http.close()

    def _entries(self, rows: list[list[int]], starts: list[int], named: bool = False) -> list[list[Any]]:
        """Return [log-prob, token, its text] of every token from a row's start on."""
        body = {
            "input_ids": rows, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
            "logprob_start_len": starts, "return_text_in_logprobs": named,
        }  # fmt: skip
        if self.model is not None:
            body["model"] = self.model
        sent = msgspec.json.encode(body)
        reply = self._http.send("POST", "/generate", sent, {"Content-Type": "application/json"})
        try:
            replies = msgspec.json.decode(reply.content)
            entries: list[list[Any]] = [each["meta_info"]["input_token_logprobs"] for each in replies]
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
            raise self._strange("no input_token_logprobs") from None
        if [len(each) for each in entries] != [len(row) - start for row, start in zip(rows, starts, strict=True)]:
            raise self._strange("a different number of tokens than it was sent")
        return entries

    def _checked(self, entries: Sequence[Any], tokens: Sequence[int]) -> Sequence[Any]:
        for entry, token in zip(entries, tokens, strict=True):
            if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token or not isinstance(entry[0], float):
                raise self._strange(f"{str(entry)[:60]} for token {token}, which should be [log-prob, {token}, ...]")
        return entries

    def _check_vocabulary(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Compare the texts of tokens spread over the vocabulary, since servers do not list all."""
        size = len(tokenizer)
        probed = sorted({i * (size - 1) // (PROBES * PROBE_TOKENS - 1) for i in range(PROBES * PROBE_TOKENS)})
        # The first entry of a row is empty, so each row begins with a token that is not compared.
        rows = [[0, *probed[at : at + PROBE_TOKENS]] for at in range(0, len(probed), PROBE_TOKENS)]
        for row, entries in zip(rows, self._entries(rows, [0] * len(rows), named=True), strict=True):
            for token, (_, _, text) in zip(row[1:], self._checked(entries[1:], row[1:]), strict=True):
                if text != (mine := tokenizer.decode([token])):
                    raise ConfigError(
                        f"algorithm.teachers.{self.name}: the model at {self._http.url} has a different vocabulary: "
                        f"token {token} is {text!r} there and {mine!r} here; a teacher scores the policy's tokens: "
                        "serve one with the policy's tokenizer"
                    )

    def _strange(self, what: str) -> TeacherFailed:
        return TeacherFailed(
            f"the teacher {self.name} at {self._http.url}/generate returned {what}: expected `plaudit serve` with a "
            "causal LM, or SGLang"
        )

    def _refused(self, reply: httpx.Response, path: str, why: str) -> RunError:
        cure = f"; set algorithm.teachers.{self.name}.key_env" if reply.status_code in (401, 403) else ""
        return TeacherFailed(
            f"the teacher {self.name} at {self._http.url} refuses {path} ({reply.status_code}): {why}{cure}"
        )
