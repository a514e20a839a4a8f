"""AdamW with warm-up, decay and clipping, whose whole state is plain tensors.

Weights that are not float32 have a float32 copy here: gradients are summed into it, the step is applied to it, and the
model runs with the rounded result. A small step is neither lost nor delayed by rounding (`spread`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plaudit.config import TrainTable
from plaudit.errors import RunError
from plaudit.models.weights import read_stem


class NotFinite(RunError):
    """A loss or gradient is not finite; the weights are as they were before the update."""


class Optimizer:
    key = "train.lr"
    """The recipe's key of the learning rate."""

    def __init__(self, model: nn.Module, table: TrainTable, beside: Mapping[str, nn.Parameter] | None = None) -> None:
        """`beside`: parameters trained with those of the model, such as a value head on its trunk."""
        self.table = table
        self.parameters = trained(model, beside)
        self.masters = {name: self._master(p) for name, p in self.parameters.items()}
        # Norms, biases and other vectors are scales, not maps: decaying them only shrinks the signal.
        decayed = [p for p in self.masters.values() if p.ndim > 1]
        plain = [p for p in self.masters.values() if p.ndim <= 1]
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": table.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=table.lr, betas=table.betas, fused=True,
        )  # fmt: skip

    def zero(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    def drop(self) -> None:
        """Drop the gradients, before another model is trained."""
        self.zero()

    def step(self, step: int) -> dict[str, float]:
        """Clip, set the rate of this step, update. Raises if a gradient is not finite, without changing anything."""
        norm = self._clip().item()
        if not math.isfinite(norm):
            raise NotFinite(
                f"the gradient norm is {norm} at step {step}: the weights are left as they were; check the data of "
                f"this step, or continue with half the rate: --resume --set {self.key}={self.table.lr / 2:g}"
            )
        rate = learning_rate(self.table, step)
        self._apply(rate)
        return {"grad_norm": norm, "lr": rate}

    def copies(self) -> list[Tensor]:
        """The float32 copies on the device, of narrower parameters."""
        return [master for name, master in self.masters.items() if self._is_copy(name)]

    def moments(self) -> list[Tensor]:
        """The moments on the device, without the step counts, which are one number each."""
        return [value for state in self.adam.state.values() for key, value in state.items() if key != "step"]

    def gradients(self) -> list[Tensor]:
        tensors = [*self.masters.values(), *self.parameters.values()]
        return list({id(tensor.grad): tensor.grad for tensor in tensors if tensor.grad is not None}.values())

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of this rank's part of a parameter, in the dtype of the step."""
        return self.masters[name].grad

    def put_gradient(self, name: str, gradient: Tensor) -> None:
        self.masters[name].grad = gradient

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the optimizer, by parameter name."""
        tensors = {
            f"{key}/{name}": value.detach().cpu()
            for name, master in self.masters.items()
            for key, value in self.adam.state[master].items()
        }
        copies = {n: m for n, m in self.masters.items() if self._is_copy(n)}
        return tensors | {f"master/{name}": master.detach().cpu() for name, master in copies.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.adam.state.clear()
        for path, value in tensors.items():
            key, name = path.split("/", 1)
            master = self.masters[name]
            if key == "master":
                with torch.no_grad():
                    master.copy_(value)
            else:
                self.adam.state[master][key] = value.to(master.device)

    def save(self, path: Path) -> None:
        save_file(self.state(), path)

    def restore(self, path: Path) -> None:
        self.load({name: at.read() for name, at in read_stem(path).items()})

    def _apply(self, rate: float) -> None:
        """The step itself, with gradients that are finite and clipped."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        rounded = [name for name in self.parameters if self._is_copy(name)]
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_([local(self.parameters[n]) for n in rounded], [self.masters[n] for n in rounded])

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter itself, or its float32 copy, into which its gradients are then summed."""
        whole = wide(parameter) and not isinstance(parameter, DTensor)
        return parameter if whole else local_master(parameter, local(parameter))

    def _is_copy(self, name: str) -> bool:
        return not wide(self.parameters[name])

    def _clip(self) -> Tensor:
        """Clip the gradients to the maximum norm; return the norm they had."""
        return nn.utils.clip_grad_norm_(list(self.masters.values()), self.table.clip_norm)


def trained(model: nn.Module, beside: Mapping[str, nn.Parameter] | None) -> dict[str, nn.Parameter]:
    named = {**dict(model.named_parameters()), **(beside or {})}
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def wide(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.float64)


def kind(parameter: Tensor) -> torch.dtype:
    """The dtype in which a parameter is stepped."""
    return parameter.dtype if wide(parameter) else torch.float32


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_master(parameter: nn.Parameter, part: Tensor) -> nn.Parameter:
    """The optimizer's copy of `part` of a parameter, in float32 or wider; it shares the part's memory if that has this
    dtype already. The parameter's gradients are summed into it."""
    master = nn.Parameter(part.detach() if wide(part) else spread(part.detach()))

    def move(of: Tensor) -> None:
        assert of.grad is not None
        gradient = local(of.grad).to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        of.grad = None

    parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
    return master


def spread(weights: Tensor) -> Tensor:
    """float32 values that round to these half-precision weights, each at a position between its neighbours chosen by a
    hash of the weight.

    Copies that start at the weights themselves are all half a rounding step away from the next value: at a rate of 1e-5
    a bfloat16 weight of 0.05 would not change before a dozen steps in one direction. Spread out, each step changes a
    share of the weights at once, and their sum moves as the copies do.
    """
    free = 23 - round(-math.log2(torch.finfo(weights.dtype).eps))  # bits of float32 that the narrow type does not have
    bits = weights.float().view(torch.int32)
    mixed = (bits >> free) * -0x61C8864F
    mixed = (mixed ^ (mixed >> 15 & 0x1FFFF)) * -0x7A143595
    offset = (mixed >> 16 & 0xFFFF) % ((1 << free) - 1) - ((1 << free - 1) - 1)  # less than half a step
    return torch.where(weights == 0, 0, bits + offset).view(torch.float32)


def learning_rate(table: TrainTable, step: int) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then constant, linear or cosine decay."""
    if step < table.warmup:
        return table.lr * (step + 1) / table.warmup
    if table.schedule == "constant":
        return table.lr
    done = min(1.0, (step - table.warmup) / max(1, table.steps - table.warmup))
    left = 1 - done if table.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return table.lr * (table.final_lr_share + (1 - table.final_lr_share) * left)
