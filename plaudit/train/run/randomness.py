"""Saves and restores the state of every random generator as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state = {
        "python": [version, list(internal), gauss],
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = [each.numpy().tobytes().hex() for each in torch.cuda.get_rng_state_all()]
    return state


def restore(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    inner = state["numpy"]["state"]
    np.random.set_state({**state["numpy"], "state": {**inner, "key": np.array(inner["key"], dtype=np.uint32)}})
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state_all([_tensor(each) for each in state["cuda"]])


def _tensor(hexadecimal: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(hexadecimal), dtype=torch.uint8)
