"""Multi-head latent attention (DeepSeek-V2, V3 and related models) over latents in place of keys and values.

The keys and values of all heads of a token are computed from one short row: a latent, and a rotary part that all heads
share. transformers' modules expand it right before attention (`expand_kv`). Here they pass on the row itself, which is
all that a cache stores (576 numbers in place of heads x 320), and the matrix that would expand it is applied to the
queries and to the result instead: q . (U c) = (U^T q) . c, and a sum over V c is V of the sum over c. So attention has
one key-value head, whose values are the first columns of its keys. Prompts, decode steps and the learner use this one
form. Tensor ranks have some of the heads each, and every latent: see `HEADS` and `same_on_ranks`.

Shapes: T tokens, H heads, N and P the sizes of a query without and with positions, R the latent's width, E a value's.
"""

from __future__ import annotations

from functools import cache
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

OURS = "plaudit"  # prefix of the names of our attention functions
SMALL = 400  # multiplications below which torch computes a product with a loop of its own
SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
HEADS = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
"""The matrices that are split by heads over tensor ranks, and how."""
WHOLE = {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}
"""The modules that every tensor rank has in full."""


class Latent:
    """The matrix of one attention module that expands a latent into keys and values, as the module has it now."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.rank, self.plain, _, self.width = (int(getattr(part, name)) for name in SIZES)
        whole_H_NE_R = _weight(part.kv_b_proj, self.rank).view(-1, self.plain + self.width, self.rank)
        self.to_keys_HNR = whole_H_NE_R[:, : self.plain]
        self.to_values_HRE = whole_H_NE_R[:, self.plain :].transpose(1, 2)

    def absorbed(self, query: Tensor) -> Tensor:
        """(T, H, N + P) -> (T, H, R + P): queries that are compared with latents in place of keys."""
        plain, rotated = query[..., : self.plain], query[..., self.plain :]
        return torch.cat([heads_product(plain, self.to_keys_HNR), rotated], dim=-1)

    def restored(self, out: Tensor) -> Tensor:
        """(T, H, R), latents summed by attention, -> (T, H, E)."""
        return heads_product(out, self.to_values_HRE)

    def same(self, rows: Tensor) -> Tensor:
        """(T, 1, R + P), before this rank's heads attend over them."""
        return same_on_ranks(rows, self.part.kv_b_proj)

    def expanded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(T, 1, R + P) -> keys (T, H, N + P) and values (T, H, E), by the module itself."""
        whole = rows.transpose(0, 1)[None]
        keys, values = _expanded(self.part, whole[..., : self.rank], whole[..., self.rank :])
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)


def heads_product(x_THI: Tensor, matrices_HIO: Tensor) -> Tensor:
    """(T, H, O): each head's rows times its own matrix. A row has the same bits whatever the other rows: on a GPU in
    half precision with a kernel, elsewhere with torch's product, which uses another kernel for a single row or for
    less than SMALL multiplications."""
    learning = torch.is_grad_enabled() and (x_THI.requires_grad or matrices_HIO.requires_grad)
    if x_THI.is_cuda and x_THI.dtype in (torch.float16, torch.bfloat16) and not learning:
        from plaudit.core.kernels import heads_product as kernel  # imports triton

        return kernel(x_THI, matrices_HIO)
    count, (inner, columns) = x_THI.shape[0], matrices_HIO.shape[1:]
    least = max(2, -(-SMALL // (inner * columns)))
    rows_HTI = (F.pad(x_THI, (0, 0, 0, 0, 0, least - count)) if count < least else x_THI).transpose(0, 1)
    return torch.bmm(rows_HTI, matrices_HIO)[:, :count].transpose(0, 1)


def pack_latents(module: nn.Module) -> None:
    """Make a model's MLA modules pass latents to our attention. A bound method and no closure: a copy of the module
    gets its own."""
    for part in module.modules():
        if _makes_latents(part):
            part.expand_kv = MethodType(_kept, part)  # type: ignore[assignment]


def _makes_latents(part: nn.Module) -> bool:
    kind: Any = type(part)
    return all(hasattr(part, name) for name in (*SIZES, "expand_kv", "kv_b_proj")) and _expands(kind)


def splits_by_heads(part: nn.Module) -> bool:
    """Whether a module is latent attention made of `HEADS` and `WHOLE` only."""
    return _makes_latents(part) and dict(part.named_children()).keys() <= HEADS.keys() | WHOLE


def same_on_ranks(x: Tensor, expand: Any) -> Tensor:
    """x, which is equal on all ranks that share the matrix of `expand`: each rank's heads give part of its gradient,
    and these are summed."""
    if not isinstance(expand.weight, DTensor) or not x.requires_grad:
        return x
    ranks = expand.weight.device_mesh
    return DTensor.from_local(x, ranks, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _expanded(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """By the module itself, whose `kv_b_proj` sums the gradients of its input where it is split."""
    whole: tuple[Tensor, Tensor] = type(self).expand_kv(self, kv_nope, same_on_ranks(k_rot, self.kv_b_proj))
    return whole


def _kept(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """(1, 1, T, R) and (1, 1, T, P) -> the two concatenated, and values of width 0, which marks them as part of the
    keys. Under another attention function, the module's own keys and values."""
    if not str(self.config._attn_implementation).startswith(OURS) or not _absorbs(self.kv_b_proj):
        return _expanded(self, kv_nope, k_rot)
    rows = torch.cat([kv_nope, k_rot], dim=-1)
    return rows, rows[..., :0]


def _absorbs(expand: Any) -> bool:
    """Whether a layer is only a matrix. An adapter's dropout is drawn per token, which no matrix represents."""
    if getattr(expand, "bias", None) is not None:
        return False
    dropouts = [m for m in expand.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    return not (expand.training and dropouts)


def _weight(expand: Any, rank: int) -> Tensor:
    """This rank's rows of the matrix."""
    if type(expand) is nn.Linear:
        return expand.weight.to_local() if isinstance(expand.weight, DTensor) else expand.weight
    made: Tensor = expand(torch.eye(rank, dtype=expand.weight.dtype, device=expand.weight.device))  # with its adapters
    return made.T


@cache
def _expands(kind: Any) -> bool:
    """Whether a class computes keys and values from a latent as described above, tried on a matrix of a few random
    numbers."""
    heads, sizes = 2, dict(zip(SIZES, (7, 3, 2, 4), strict=True))
    generator = torch.Generator().manual_seed(0)
    matrix, rows, query = (torch.randn(shape, generator=generator) for shape in ((14, 7), (5, 1, 9), (5, heads, 5)))
    expand = nn.Linear(7, 14, bias=False)
    expand.weight = nn.Parameter(matrix, requires_grad=False)
    part = type(kind.__name__, (SimpleNamespace,), {"expand_kv": kind.expand_kv})(kv_b_proj=expand, **sizes)
    latent = Latent(part)
    try:
        with torch.no_grad():
            keys, values = latent.expanded(rows)
            scores = torch.einsum("thd,shd->hts", query, keys)
            ours = torch.einsum("thd,sd->hts", latent.absorbed(query), rows[:, 0])
            restored = latent.restored(rows[..., : latent.rank].expand(-1, heads, -1))
    except (AttributeError, TypeError, RuntimeError):  # it needs other inputs
        return False
    return bool(torch.allclose(scores, ours, atol=1e-5) and torch.allclose(values, restored, atol=1e-5))
