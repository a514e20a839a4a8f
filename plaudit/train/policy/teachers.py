"""The teachers of on-policy distillation: log-probs of the policy's tokens.

A teacher that returns a non-finite number ends the run: a missing log-prob is never replaced by 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from plaudit.core.model.packing import use_packed_attention
from plaudit.errors import ConfigError, RunError
from plaudit.records import Sample
from plaudit.train.optim.sharding import free_gathered
from plaudit.train.policy.experience import flat, own_tokens
from plaudit.train.policy.forward import hidden_of, likeliest_of, micro_batches, pack_responses
from plaudit.train.policy.policy import Policy


class Teacher(Protocol):
    @property
    def module(self) -> nn.Module | None:
        """Its weights, if they are in this process."""

    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        """Return log-probs (T,) of the response tokens, at the sampling temperature."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Taught:
    """The teachers' fields of an `Experience`, in its order, and their metrics."""

    arrays: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    figures: dict[str, float] = field(default_factory=dict)


class Teachers:
    """Teachers by name; `top_k` is the number of tokens each scores, 0 for the sampled one."""

    def __init__(self, teachers: Mapping[str, Teacher], top_k: Mapping[str, int]) -> None:
        self.teachers = teachers
        self.top_k = top_k

    def read(self, samples: Sequence[Sample]) -> Taught:
        rated: list[Tensor] = []
        tokens: list[Tensor] = []
        logps: list[Tensor] = []
        figures = {}
        own, drawn = own_tokens(samples), flat(samples, "logprobs")
        for name, teacher in self.teachers.items():
            if count := self.top_k[name]:
                assert isinstance(teacher, LocalTeacher)  # TeacherTable refuses top_k for a server
                likely, logp = teacher.likeliest(samples, count)
                tokens.append(likely)
                logps.append(_sound(name, logp))
            else:
                logp = _sound(name, teacher.logprobs(samples))
                rated.append(logp)
                figures[f"teacher/{name}/kl"] = (drawn - logp)[own].mean().item()
        return Taught(
            (
                torch.stack(rated, -1) if rated else None, torch.cat(tokens, -1) if tokens else None,
                torch.cat(logps, -1) if logps else None,
            ),
            figures,
        )  # fmt: skip

    @property
    def modules(self) -> list[nn.Module]:
        """Return the weights in this process."""
        return [teacher.module for teacher in self.teachers.values() if teacher.module is not None]

    def close(self) -> None:
        for teacher in self.teachers.values():
            teacher.close()


class LocalTeacher:
    """A frozen model of this process."""

    def __init__(self, policy: Policy, vocabulary: int) -> None:
        """`policy` runs it; `vocabulary` is the number of tokens, which the head may exceed."""
        self.policy = policy
        self.module = policy.module
        self.vocabulary = vocabulary

    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        return self.policy.logprobs(samples)

    @torch.no_grad()
    def likeliest(self, samples: Sequence[Sample], count: int) -> tuple[Tensor, Tensor]:
        """Return its likeliest tokens and their log-probs, (T, count) each."""
        policy = self.policy
        use_packed_attention(policy.module)
        tokens, logps = [], []
        for batch in micro_batches(samples, policy.micro_batch_tokens, policy.group):
            responses = pack_responses([samples[i] for i in batch.indices], policy.decoder.device)
            hidden = hidden_of(policy.module, responses)
            if not policy.stage.last:
                continue
            likely, logp = likeliest_of(
                policy.decoder, responses, hidden, policy.temperature, count, self.vocabulary
            )  # fmt: skip
            if batch.counts:
                tokens.append(likely.flatten())  # what ranks put together is flat
                logps.append(logp.flatten())
        free_gathered(policy.module)
        readers = policy.stage.results(policy.group)
        return tuple(readers.concatenate(parts).view(-1, count) for parts in (tokens, logps))  # type: ignore[return-value]

    def close(self) -> None: ...


def check_vocabulary(name: str, path: str, theirs: PreTrainedTokenizerFast, ours: PreTrainedTokenizerFast) -> None:
    """Raise ConfigError unless both tokenizers map the same ids to the same tokens."""
    mine, others = ({id: token for token, id in of.get_vocab().items()} for of in (ours, theirs))
    for id in sorted(mine.keys() | others.keys()):
        if mine.get(id) != others.get(id):
            raise ConfigError(
                f"algorithm.teachers.{name}: {path} has a different vocabulary, of {len(others)} tokens to the "
                f"policy's {len(mine)}: token {id} is {others.get(id)!r} there and {mine.get(id)!r} here; a teacher "
                "scores the policy's tokens: use one with the policy's tokenizer"
            )


def _sound(name: str, logp: Tensor) -> Tensor:
    if not logp.isfinite().all():
        raise RunError(
            f"the teacher {name} returned non-finite log-probs: check algorithm.teachers.{name}, then --resume"
        )
    return logp
