"""Expert parallelism: each rank has some experts of a mixture whole, and receives the rows that routers send to them.

A pair is a token and one of its experts. Before the experts the ranks exchange rows, one for each pair, and afterwards
return the results (all-to-all, with gradients): routers, their weights and the sum over a token's experts stay on the
rank of the token. So the gradient of an expert comes from the rows of all ranks of its group, and is summed over the
groups, which have copies of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from plaudit.core.model.fusion import are_experts
from plaudit.errors import ModelError
from plaudit.train.optim.context import alike, all_to_all, exchanged, placed
from plaudit.train.run.ranks import EXPERT, TENSOR, Group, Ranks


def experts_of(module: nn.Module) -> dict[str, Any]:
    """The modules that hold the weights of all experts of a layer, by name."""
    return {name: part for name, part in module.named_modules() if are_experts(part)}


def check_experts(module: nn.Module, expert_parallel: int) -> bool:
    """Raise if the experts of a module, which may be on the meta device, cannot be split so; return whether it has
    any."""
    parts = experts_of(module)
    for name, part in parts.items():
        count = part.down_proj.shape[0]
        if count % expert_parallel:
            raise ModelError(
                f"{count} experts are not divisible by expert_parallel = {expert_parallel}: {count} / "
                f"{expert_parallel} = {count / expert_parallel:g}; set a divisor of {count}"
            )
        if any(parameter.shape[0] != count for parameter in part.parameters()):
            raise ModelError(
                f"{name} has weights that no single expert owns, so they cannot be sharded by expert: set "
                "expert_parallel = 1"
            )
    return bool(parts)


def shard_experts(module: nn.Module, ranks: Ranks) -> list[nn.Module]:
    """Keep this rank's share of the experts; return the modules that have them. Their weights become DTensors."""
    assert ranks.experts is not None
    assert ranks.mesh is not None
    mesh = ranks.mesh[TENSOR]
    tensor = Group(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    parts = experts_of(module)
    for part in parts.values():
        alone = copy.copy(part)  # computes this rank's experts; its weights are set for each pass
        alone.num_experts = part.down_proj.shape[0] // ranks.expert.size
        for name, parameter in list(part.named_parameters()):
            # Every rank has the whole parameter, or is on the meta device.
            share = distribute_tensor(parameter.data, ranks.experts[EXPERT], [Shard(0)], src_data_rank=None)
            part.register_parameter(name, nn.Parameter(share, parameter.requires_grad))
        part.forward = MethodType(_forward(alone, ranks.expert, tensor), part)
    return list(parts.values())


def _forward(alone: Any, group: Group, tensor: Group) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]:
    def forward(part: nn.Module, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        alone._parameters = {name: _own(parameter) for name, parameter in part.named_parameters()}
        try:
            if tensor.size == 1:
                return _by_owners(alone, group, x_TD, chosen_TK, weights_TK)
            return _in_parts(alone, group, tensor, x_TD, chosen_TK, weights_TK)
        finally:
            alone._parameters = {}

    return forward


def _in_parts(
    alone: Any, group: Group, tensor: Group, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor
) -> Tensor:  # fmt: skip
    """For tensor-parallel ranks, which have the same rows: each sends a part of them to the experts."""
    rows = tensor.share(len(x_TD))
    own, at = slice(rows.start, rows.stop), torch.arange(rows.start, rows.stop, device=x_TD.device)
    part_TD, part_TK = alike(x_TD, tensor)[own], alike(weights_TK, tensor)[own]
    return placed(at, _by_owners(alone, group, part_TD, chosen_TK[own], part_TK), len(x_TD), tensor)


def _own(parameter: Tensor) -> Tensor:
    """This rank's experts of a weight whose shards are gathered."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _by_owners(alone: Any, group: Group, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """P = T · K pairs on this rank, R rows received."""
    tokens, choices = chosen_TK.shape
    chosen_P, each = chosen_TK.flatten(), alone.num_experts
    order_P = chosen_P.argsort(stable=True)  # by expert, so by rank
    sent_N = torch.bincount(chosen_P // each, minlength=group.size)
    received_N = torch.empty_like(sent_N)
    dist.all_to_all_single(received_N, sent_N, group=group.channel)
    sent, received = sent_N.tolist(), received_N.tolist()
    ids_R = all_to_all(chosen_P[order_P], sent, received, group) - group.index * each
    x_RD = exchanged(x_TD[order_P // choices], sent, received, group)
    rows = len(x_RD)
    if not rows:
        # A row that is not read: FSDP reduces gradients over all ranks, so this one needs a gradient too.
        x_RD, ids_R = F.pad(x_RD, (0, 0, 0, 1)), ids_R.new_zeros(1)
    y_RD = alone.forward(x_RD, ids_R[:, None], x_RD.new_ones(len(x_RD), 1))[:rows]
    y_PD = exchanged(y_RD, received, sent, group)
    back_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
    y_TKD = y_PD[back_P].view(tokens, choices, y_PD.shape[1])
    return (y_TKD * weights_TK[..., None]).sum(1).to(x_TD.dtype)
