"""Measures the overhead of the CPU's malloc: resident bytes per byte in use by training, in a fresh process.

    python -m plaudit.heap

Activations of many sizes are allocated and freed with every micro-batch. malloc splits freed blocks for later
allocations, and keeps the fragments: resident memory ends well above the maximum in use. A process that has trained
before would reuse fragments, so a fresh one is measured.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from plaudit.core.model.packing import use_packed_attention
from plaudit.errors import RunError
from plaudit.models import new_llama
from plaudit.records import Sample
from plaudit.train.policy.forward import hidden_of, pack_responses

HIDDEN, LAYERS, ROUNDS = 96, 4, 3
MICRO_BATCHES = (320, 190)
"""Samples of two alternating micro-batches: the second, the remainder of a step, is smaller."""
SECONDS = 600.0


def heap_factor() -> float:
    """Resident bytes per byte in use, measured in a new process."""
    words = [sys.executable, "-m", "plaudit.heap"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"measuring malloc took more than {SECONDS:g} s; calibrate when the machine is less busy"
        ) from None
    if done.returncode:
        raise RunError(f"measuring malloc failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout)


def measured() -> float:
    model = new_llama(
        "policy", vocab_size=64, hidden_size=HIDDEN, layers=LAYERS, heads=4, kv_heads=2, intermediate_size=3 * HIDDEN,
        max_positions=128, seed=1,
    ).train()  # fmt: skip
    use_packed_attention(model)
    micros = [mixed_samples(count) for count in MICRO_BATCHES]
    before = _resident("VmRSS")
    used = max(one_pass(model, micro) for _ in range(ROUNDS) for micro in micros)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(1.0, (_resident("VmHWM") - before - gradients) / used)


def mixed_samples(count: int) -> list[Sample]:
    """Eight responses to a prompt, of 4 to 60 tokens."""
    made = []
    for i in range(count):
        size = 4 + (i * 37) % 29 + (28 if i % 8 == 0 else 0)
        prompt_ids = (*range(4, 12 + i // 8 % 4), 16 + i // 8 % 40)
        zeros = (0.0,) * size
        made.append(Sample(prompt_ids, tuple(4 + (i + j * j) % 60 for j in range(size)), "", zeros, zeros, (0,) * size,
                           (1,) * size, "length", group=i // 8))  # fmt: skip
    return made


def one_pass(model: nn.Module, samples: list[Sample]) -> int:
    """Forward and backward; returns the bytes saved for backward, and the gradients of an MLP's branches."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = hidden_of(model, pack_responses(samples, torch.device("cpu")))
        loss = hidden.square().sum()
    used = sum(size for at, size in kept.items() if at not in own)
    used += hidden.shape[0] * 4 * (2 * 3 * HIDDEN + 2 * HIDDEN)
    loss.backward()  # type: ignore[no-untyped-call]
    return used


def _resident(what: str) -> int:
    """Current bytes (VmRSS), or the maximum since the program started (VmHWM); getrusage would include its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measured())
