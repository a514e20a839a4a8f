"""vLLM worker extension: loads new weights, and stores their version.

vLLM loads it by `--worker-extension-cls` and mixes it into its worker class, so that `self` is a worker; it may import
only what vLLM's environment has. It works around two problems of vLLM (0.32, on the CPU):

1. Linear layers are packed for the CPU's kernels and their weights emptied. `model.load_weights` fails on them half
   way; `reload_weights` unpacks, loads and packs again.
2. With tied embeddings it leaves the head's packed copy unchanged: the new weights are loaded, and the old ones are
   used. So whatever is packed beside its weight is packed again.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from torch import Tensor

from plaudit.errors import WeightsRefused
from plaudit.place.channels.channel import answered
from plaudit.place.channels.receiver import WeightReceiver
from plaudit.place.channels.weights import Layout


class WorkerExtension:
    """Methods that vLLM's `/collective_rpc` calls. They share the worker's namespace, so their names begin with
    plaudit."""

    plaudit_life = ""
    plaudit_receiver: WeightReceiver | None = None

    def plaudit_state(self) -> dict[str, Any]:
        """`life` identifies this process: it differs after a restart."""
        self.plaudit_life = self.plaudit_life or secrets.token_hex(8)
        receiver = self.plaudit_receiver
        return {"life": self.plaudit_life, "version": None if receiver is None else receiver.version}

    def plaudit_receive(self, text: str) -> str:
        """Handle a message of a weight channel; returns the answer."""
        message = decode(text)
        if self.plaudit_receiver is None:
            self.plaudit_receiver = WeightReceiver(VllmTarget(self))
        return encode(answered(self.plaudit_receiver, message))


class VllmTarget:
    """A worker's model as the target of weights. It takes names as in model directories."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.layout: Layout | None = None

    def check(self, layout: Layout) -> None:
        """vLLM's own names differ: missing tensors only show during loading. Later layouts must equal the first."""
        if self.layout is not None and layout.digest != self.layout.digest:
            raise WeightsRefused(
                f"these weights have {len(layout.entries)} tensors and another layout than the "
                f"{len(self.layout.entries)} before: restart the engine to change its model"
            )
        self.layout = layout

    def home(self, name: str) -> Tensor | None:
        return None  # the parameter's memory is packed

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        model = self.worker.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        load, loaded = model.load_weights, set()

        def noting(weights: Any) -> Any:
            names = load(weights)
            loaded.update(names)
            return names

        model.load_weights = noting
        try:
            self.worker.reload_weights(weights_iterator=_kept(tensors))
        except (KeyError, ValueError, RuntimeError, AssertionError) as error:
            raise WeightsRefused(f"vLLM cannot load these weights: {type(error).__name__} {error}") from error
        finally:
            del model.load_weights
        # vLLM reports partially loaded weights only by a line in its log.
        if missing := sorted(wanted - loaded):
            raise WeightsRefused(f"{len(missing)} of {len(wanted)} weights were not sent, {missing[0]} among them")
        _pack_again(model)


def _kept(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """vLLM stores tensors until all of a layer are there, and a channel may overwrite them before that."""
    for name, tensor in tensors:
        yield name, tensor.clone()


def _pack_again(model: Any) -> None:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # type: ignore[import-not-found]

            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def encode(message: dict[str, Any]) -> str:
    """`/collective_rpc` transfers JSON, and messages may contain bytes."""
    return base64.b64encode(msgspec.msgpack.encode(message)).decode()


def decode(text: str) -> dict[str, Any]:
    message: dict[str, Any] = msgspec.msgpack.decode(base64.b64decode(text))
    return message
