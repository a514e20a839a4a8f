"""AdamW whose moments and float32 weights are in host memory and are copied to the device one bucket at a time.

An 8B model in bfloat16 has 16 GB of weights, and 96 GB of state that only the step needs. That state is never on the
device as a whole: while one bucket is stepped, the next is copied in and the previous copied out, each on its own
stream. The step is that of `Optimizer`, element by element, with the same bits and the same checkpoints. For a sharded
module it steps this rank's shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from plaudit.config import TrainTable
from plaudit.errors import ConfigError
from plaudit.train.optim.host_memory import CURE, shortage
from plaudit.train.optim.optimizer import Optimizer, kind, local, spread, trained, wide
from plaudit.train.run.ranks import ONE, Group

BUCKET = 1 << 26
"""Elements of a bucket. Three are on the device at once, at 12 bytes an element: 2.4 GB. A power of two, because CPU
kernels compute elements that do not fill a vector register by other instructions, with other last bits."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter."""

    name: str
    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[self.begin : self.end]


@dataclass(frozen=True, slots=True)
class Bucket:
    pieces: list[Piece]
    weight_decay: float


class HostOptimizer(Optimizer):
    """AdamW with its state in host memory; gradients stay on the device, in float32."""

    def __init__(self, model: nn.Module, table: TrainTable, beside: Mapping[str, nn.Parameter] | None = None) -> None:
        self.table = table
        self.parameters = trained(model, beside)
        self.sums: dict[str, Tensor] = {}
        self.steps = dict.fromkeys(self.parameters, 0)
        self.device = next(iter(self.parameters.values())).device
        parts = {name: local(parameter.detach()) for name, parameter in self.parameters.items()}
        if lack := shortage(_host_bytes(parts), self._everyone()):
            raise ConfigError(f"train.offload_optimizer needs host memory: {lack}; {CURE}")
        self.away, flat = _host_tensors(parts)
        if self.device.type == "cuda" and flat.nbytes:
            _register(flat)
            weakref.finalize(self, _unregister, flat).atexit = False  # at exit the driver releases it
        for name, parameter in self.parameters.items():
            if "master" in self.away[name]:
                self.away[name]["master"].copy_(spread(parts[name]))
            parameter.register_post_accumulate_grad_hook(self._taker(name))  # type: ignore[no-untyped-call]
        self.buckets = list(_buckets(parts, table.weight_decay))
        on_gpu = self.device.type == "cuda"
        self._fetching, self._writing = (torch.cuda.Stream(self.device) if on_gpu else None for _ in range(2))  # type: ignore[no-untyped-call]

    def _everyone(self) -> Group:
        """The ranks whose shards share the hosts' memory."""
        return ONE

    def zero(self) -> None:
        self.sums.clear()

    def copies(self) -> list[Tensor]:
        return []

    def moments(self) -> list[Tensor]:
        return []

    def gradients(self) -> list[Tensor]:
        # In this order, on which the bits of the norm depend.
        return [self.sums[name] for name in self.parameters if name in self.sums]

    def gradient(self, name: str) -> Tensor | None:
        return self.sums.get(name)

    def put_gradient(self, name: str, gradient: Tensor) -> None:
        self.sums[name] = gradient

    def state(self) -> dict[str, Tensor]:
        tensors = {f"{key}/{name}": value for name, kept in self.away.items() for key, value in kept.items()}
        stepped = {f"step/{name}": torch.tensor(float(count)) for name, count in self.steps.items() if count}
        return {path: value for path, value in tensors.items() if self._has(path)} | stepped

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.steps = dict.fromkeys(self.parameters, 0)
        for path, value in tensors.items():
            key, name = path.split("/", 1)
            if key == "step":
                self.steps[name] = int(value)
            else:
                self.away[name][key].copy_(value)

    def _has(self, path: str) -> bool:
        """Whether a tensor of the state exists: moments exist from the first step on, as in torch's AdamW."""
        key, name = path.split("/", 1)
        return key == "master" or self.steps[name] > 0

    def _taker(self, name: str) -> Callable[[Tensor], None]:
        def take(of: Tensor) -> None:
            assert of.grad is not None
            gradient = local(of.grad).to(kind(of))
            self.sums[name] = self.sums[name].add_(gradient) if name in self.sums else gradient
            of.grad = None

        return take

    def _clip(self) -> Tensor:
        gradients = self.gradients()
        norm = nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, (self.table.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def _apply(self, rate: float) -> None:
        buckets = [bucket for bucket in (self._learning(each) for each in self.buckets) if bucket.pieces]
        for name in self.sums:
            self.steps[name] += 1
        if not buckets:
            return
        written: list[torch.cuda.Event] = []
        ahead = self._fetch(buckets[0])
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            here = ahead
            if following is not None:
                if len(written) > 1:
                    written[-2].synchronize()  # then the memory of the bucket before the last is free
                ahead = self._fetch(following)
            self._step(bucket, here, rate)
            written += self._put_back(bucket, here)
        for event in written:
            event.synchronize()

    def _learning(self, bucket: Bucket) -> Bucket:
        """The bucket without parameters that had no gradient in this update."""
        return Bucket([piece for piece in bucket.pieces if piece.name in self.sums], bucket.weight_decay)

    def _fetch(self, bucket: Bucket) -> tuple[list[dict[str, Tensor]], torch.cuda.Event | None]:
        """The state of a bucket on the device, and the event of its arrival."""
        with _on(self._fetching):
            tensors = [
                {key: piece.of(kept).to(self.device, non_blocking=True) for key, kept in self.away[piece.name].items()}
                for piece in bucket.pieces
            ]
            return tensors, None if self._fetching is None else self._fetching.record_event()

    def _step(self, bucket: Bucket, here: tuple[list[dict[str, Tensor]], torch.cuda.Event | None], rate: float) -> None:
        tensors, arrival = here
        if arrival is not None:
            torch.cuda.current_stream(self.device).wait_event(arrival)
        weights = [piece.of(local(self.parameters[piece.name].detach())) for piece in bucket.pieces]
        masters = [kept.get("master", weight) for kept, weight in zip(tensors, weights, strict=True)]
        before = torch.tensor([self.steps[piece.name] - 1.0 for piece in bucket.pieces], device=self.device)
        beta1, beta2 = self.table.betas
        adamw(
            masters, [piece.of(self.sums[piece.name]) for piece in bucket.pieces],
            [kept["exp_avg"] for kept in tensors], [kept["exp_avg_sq"] for kept in tensors], [], list(before.unbind()),
            fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=rate, weight_decay=bucket.weight_decay, eps=1e-8,
            maximize=False,
        )  # fmt: skip
        for kept, weight in zip(tensors, weights, strict=True):
            if "master" in kept:
                weight.copy_(kept["master"])

    def _put_back(
        self, bucket: Bucket, here: tuple[list[dict[str, Tensor]], torch.cuda.Event | None]
    ) -> list[torch.cuda.Event]:
        if self._writing is not None:
            self._writing.wait_stream(torch.cuda.current_stream(self.device))
        with _on(self._writing):
            for piece, tensors in zip(bucket.pieces, here[0], strict=True):
                for key, value in tensors.items():
                    piece.of(self.away[piece.name][key]).copy_(value, non_blocking=True)
                    if self._writing is not None:
                        value.record_stream(torch.cuda.current_stream(self.device))  # was allocated on another stream
            return [] if self._writing is None else [self._writing.record_event()]


def _register(memory: Tensor) -> None:
    """Pin it. torch's own pinned allocations are rounded up to a power of two."""
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))  # type: ignore[no-untyped-call]


def _unregister(memory: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))  # type: ignore[no-untyped-call]


def _keys(parameter: Tensor) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq") if wide(parameter) else ("exp_avg", "exp_avg_sq", "master")


def _host_bytes(parameters: Mapping[str, Tensor]) -> int:
    return sum(len(_keys(p)) * p.numel() * kind(p).itemsize for p in parameters.values())


def _host_tensors(parameters: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], Tensor]:
    """By parameter: moments of zeros and, for narrow weights, an unfilled float32 copy; and the memory behind all."""
    flat = torch.zeros(_host_bytes(parameters), dtype=torch.uint8)
    tensors: dict[str, dict[str, Tensor]] = {}
    offset = 0
    for name, parameter in sorted(parameters.items(), key=lambda item: -kind(item[1]).itemsize):  # keeps them aligned
        for key in _keys(parameter):
            end = offset + parameter.numel() * kind(parameter).itemsize
            tensors.setdefault(name, {})[key] = flat[offset:end].view(kind(parameter)).view(parameter.shape)
            offset = end
    return tensors, flat


def _buckets(parameters: Mapping[str, Tensor], weight_decay: float) -> Iterator[Bucket]:
    for decay, names in (
        (weight_decay, [name for name, p in parameters.items() if p.ndim > 1]),
        (0.0, [name for name, p in parameters.items() if p.ndim <= 1]),
    ):
        pieces: list[Piece] = []
        filled = 0
        for name in names:
            for begin in range(0, parameters[name].numel(), BUCKET):
                piece = Piece(name, begin, min(begin + BUCKET, parameters[name].numel()))
                if filled + piece.end - piece.begin > BUCKET:
                    yield Bucket(pieces, decay)
                    pieces, filled = [], 0
                pieces, filled = [*pieces, piece], filled + piece.end - piece.begin
        if pieces:
            yield Bucket(pieces, decay)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
