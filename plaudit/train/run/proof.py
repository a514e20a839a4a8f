"""Hashes of a step's samples, log-probs, rewards and final weights, for `plaudit verify`.

A hash does not depend on the device or the number of threads that compute it (`checksum.py`).
"""

from __future__ import annotations

import hashlib
import platform
import struct
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version

import torch
from torch import Tensor, nn

from plaudit.records import Sample
from plaudit.train.run.checksum import Checksum

PARTS = ("samples", "logprobs", "rewards", "weights")  # in the order in which a step computes them
WORDS = {"samples": "the samples", "logprobs": "the log-probs", "rewards": "the rewards", "weights": "the weights"}


def step_proof(samples: Sequence[Sample], module: nn.Module) -> dict[str, str]:
    named = list(module.named_parameters())
    trained = [(name, each) for name, each in named if each.requires_grad]
    whole = {"whole": "yes"} if len(trained) == len(named) else {}  # not set for adapters
    return {**batch_proof(samples), "weights": weights_digest(trained), **whole, "by": made_by(module)}


def batch_proof(samples: Sequence[Sample]) -> dict[str, str]:
    hashes = {name: hashlib.blake2b(digest_size=8) for name in PARTS[:3]}
    for sample in samples:
        ids = (len(sample.prompt_ids), *sample.prompt_ids, len(sample.token_ids), *sample.token_ids, *sample.mask)
        hashes["samples"].update(struct.pack(f"{len(ids)}q", *ids) + sample.finish_reason.encode())
        hashes["samples"].update(sample.experts or b"")
        logprobs = (*sample.logprobs, *sample.raw_logprobs, *(sample.tempered_logprobs or ()))
        hashes["logprobs"].update(_doubles(logprobs))
        reward = b"none" if sample.reward is None else _doubles((sample.reward,))
        error = b"" if sample.error is None else sample.error.type.encode()
        hashes["rewards"].update(reward + error + _doubles(sample.token_rewards or ()))
    return {name: each.hexdigest() for name, each in hashes.items()}


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    whole = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        checksum = Checksum()
        checksum.update(tensor)
        whole.update(f"{name} {tuple(tensor.shape)} {checksum.hexdigest()};".encode())
    return whole.hexdigest()


def _doubles(values: Sequence[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


def made_by(module: nn.Module) -> str:
    """Return the versions and hardware, on which bits may depend."""
    device = next(module.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads, {_libraries()}"


@cache
def _libraries() -> str:
    return ", ".join(f"{each} {version(each)}" for each in ("plaudit", "torch", "transformers"))
