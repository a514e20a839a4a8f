"""AdamW with warm-up, decay and clipping, whose whole state is plain tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from plaudit.config import TrainTable
from plaudit.errors import RunError


class Optimizer:
    def __init__(self, model: nn.Module, table: TrainTable) -> None:
        self.table = table
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Norms, biases and single vectors are scales, not maps: decaying them only shrinks the signal.
        decayed = [p for p in self.parameters.values() if p.ndim > 1]
        plain = [p for p in self.parameters.values() if p.ndim <= 1]
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": table.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=table.lr, betas=table.betas, fused=True,
        )  # fmt: skip

    def zero(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    def step(self, step: int) -> dict[str, float]:
        """Clip, set the rate of this step, update. Refuses a gradient that is not finite: nothing is changed then."""
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.table.clip_norm)
        if not norm.isfinite():
            raise RunError(
                f"the gradient norm is {norm.item()} at step {step}: the weights are left as they were; "
                f"lower train.lr (now {self.table.lr}) or look at the data of this step, then --resume"
            )
        rate = learning_rate(self.table, step)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        return {"grad_norm": norm.item(), "lr": rate}

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the optimizer, by parameter name."""
        return {
            f"{key}/{name}": value.detach().cpu()
            for name, parameter in self.parameters.items()
            for key, value in self.adam.state[parameter].items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.adam.state.clear()
        for path, value in tensors.items():
            key, name = path.split("/", 1)
            parameter = self.parameters[name]
            # Adam counts its steps on the CPU.
            self.adam.state[parameter][key] = value if key == "step" else value.to(parameter.device)


def learning_rate(table: TrainTable, step: int) -> float:
    """The rate of a step, counted from 0: linear warm-up, then constant, linear or cosine to its final share."""
    if step < table.warmup:
        return table.lr * (step + 1) / table.warmup
    if table.schedule == "constant":
        return table.lr
    done = min(1.0, (step - table.warmup) / max(1, table.steps - table.warmup))
    left = 1 - done if table.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return table.lr * (table.final_lr_share + (1 - table.final_lr_share) * left)
