"""The reference: the initial policy, for the KL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn

from plaudit.records import Sample
from plaudit.train.policy.policy import Policy


class Reference(Protocol):
    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        """Return log-probs (T,) of the response tokens, at the sampling temperature."""


class WithoutAdapter:
    """The policy's module with its LoRA adapter disabled: no second copy of the weights."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        with adapters_off(self.policy.module):
            return self.policy.logprobs(samples, replay=False)  # with its own expert choice, as a second model has


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.disable_adapters()  # type: ignore[operator]
    for parameter in learning:  # FSDP2 keeps for good what it sees when a layer is gathered for the first time
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        module.enable_adapters()  # type: ignore[operator]
