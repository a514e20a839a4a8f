"""The hashes in a run's log, for `plaudit verify`: of what each step sampled, learned from and made, each chained to
all before it.

A hash does not depend on the device or the number of threads that compute it (`checksum.py`). Events of kind `proof`:

    after a step       {samples, logprobs, rewards, weights, critic, metrics, dump, shown, by, chain}
    after evaluating   {heldout, chain}
    at a (re)start     {recipe, source, by, chain}

`chain` is the hash of the chain before it, the step and the other hashes. Over several ranks, which hold parts of the
weights, those of weights and critic are left out.
"""

from __future__ import annotations

import hashlib
import json
import platform
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plaudit import __version__
from plaudit.events import LOG, EventLog, finite, read_valid
from plaudit.metrics import of_machine
from plaudit.records import Sample
from plaudit.train.run.checksum import Checksum

WORDS = {
    "samples": "the samples", "logprobs": "the log-probs", "rewards": "the rewards", "weights": "the weights",
    "critic": "the critic's weights",
}  # fmt: skip
PARTS = tuple(WORDS)  # in the order in which a step computes them


class Chain:
    """Writes proofs to the log of a run. `last` is the chain so far."""

    def __init__(self, events: EventLog, last: str = "") -> None:
        self.events = events
        self.last = last

    def add(self, step: int, hashes: Mapping[str, str]) -> None:
        self.last = linked(self.last, step, hashes)
        self.events.write("proof", step=step, hashes={**hashes, "chain": self.last})


def linked(before: str, step: int, hashes: Mapping[str, str]) -> str:
    """The chain after a proof."""
    kept = {name: value for name, value in hashes.items() if name != "chain"}
    return _hash(json.dumps([before, step, kept], sort_keys=True), 16)


def chain_of(directory: Path) -> str:
    """The end of the chain in a run's log; "" without one."""
    events = read_valid(directory / LOG)
    chains = [event["hashes"].get("chain", "") for event in events if event["kind"] == "proof"]
    return chains[-1] if chains else ""


def start_proof(recipe: Path, module: nn.Module, source: bool) -> dict[str, str]:
    """`source`: whether the module has the weights with which the run begins."""
    begun = {"source": source_digest(module)} if source else {}
    return {"recipe": hashlib.sha256(recipe.read_bytes()).hexdigest(), **begun, "by": made_by(module)}


def step_proof(
    samples: Sequence[Sample], metrics: Mapping[str, Any], module: nn.Module, critic: nn.Module | None, *, whole: bool
) -> dict[str, str]:
    """`whole`: whether the module has its weights, and not a part of them."""
    hashes = batch_proof(samples)
    if whole:
        hashes["weights"] = weights_digest(trained(module))
        if critic is not None:
            hashes["critic"] = weights_digest(trained(critic))
    return {**hashes, "metrics": metrics_digest(metrics), "by": made_by(module)}


def trained(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, each) for name, each in module.named_parameters() if each.requires_grad]


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


def metrics_digest(metrics: Mapping[str, Any]) -> str:
    """A hash of the metrics that do not depend on the machine's speed."""
    kept = {name: value for name, value in metrics.items() if not of_machine(name)}
    return _hash(json.dumps(finite(kept), sort_keys=True), 8)


def shown_digest(samples: Sequence[Mapping[str, Any]]) -> str:
    """A hash of the samples that the log shows."""
    return _hash(json.dumps(finite(list(samples)), sort_keys=True), 8)


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    whole = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        checksum = Checksum()
        checksum.update(tensor)
        whole.update(f"{name} {tuple(tensor.shape)} {checksum.hexdigest()};".encode())
    return whole.hexdigest()


def source_digest(module: nn.Module) -> str:
    """The weights without an adapter."""
    state = module.state_dict().items()
    return weights_digest((name.replace(".base_layer.", "."), each) for name, each in state if ".lora_" not in name)


def _doubles(values: Sequence[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=size).hexdigest()


def made_by(module: nn.Module) -> str:
    """Return the versions and hardware, on which bits may depend."""
    device = next(module.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads, {_libraries()}"


@cache
def _libraries() -> str:
    # Not from the package's metadata, which a source tree that is not installed does not have.
    libraries = (f"{each} {version(each)}" for each in ("torch", "transformers"))
    return ", ".join((f"plaudit {__version__}", *libraries))
