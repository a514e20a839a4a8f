"""Log-probabilities of given tokens, and entropies, without materialising the logits of a whole batch.

Rows are processed in chunks. The forward pass keeps one number per row, the log-sum-exp; the backward pass recomputes a
chunk's logits and turns them in place into their gradient, softmax minus one-hot. So memory does not grow with rows ×
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from plaudit.algo.tokens.products import steady, steady_linear
from plaudit.algo.tokens.vocabulary import SplitVocabulary

LOGIT_ELEMENTS = 1 << 24
"""Logits in memory at once: 64 MiB in float32, and the same again while they are processed."""
CPU_ROWS = 256
"""Minimum rows per chunk on a CPU, since each chunk reads the whole head, and maximum for a small vocabulary, so that a
chunk fits in the CPU's caches."""
CPU_ELEMENTS = 1 << 21

Finish = Callable[[Tensor], Tensor]


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None = None, temperature: float = 1.0,
    finish: Finish | None = None, split: SplitVocabulary | None = None,
) -> Tensor:  # fmt: skip
    """log p(target) of each row, (R,), in float32 (float64 if the head is).

    hidden       (R, hidden) rows before the vocabulary head, of the head's type
    head, bias   (V, hidden) and (V,): the head
    targets      (R,) token ids
    temperature  divisor of the logits: the sampling temperature, for the policy's own distribution
    finish       the model's transformation of its logits (rows, V) before that, such as a soft cap; not in place
    split        head and bias are this rank's shards; all ranks pass the same rows and get the same results
    """
    return _apply(hidden, head, targets, bias, temperature, finish, False, False, split)[0]


def token_logprobs_and_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None = None, temperature: float = 1.0,
    finish: Finish | None = None, entropy_grad: bool = False, split: SplitVocabulary | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same, and the entropy (R,) of each row at that temperature, with a gradient if requested."""
    return _apply(hidden, head, targets, bias, temperature, finish, True, entropy_grad, split)


def _apply(
    hidden: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, finish: Finish | None,
    entropy: bool, entropy_grad: bool, split: SplitVocabulary | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: expected above 0; greedy sampling has no log-probabilities")
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden if split is None else split.shared(hidden), head, targets, bias, temperature, finish, entropy,
        entropy_grad, split,
    )  # fmt: skip
    return result


def chunks(rows: int, head: Tensor, split: SplitVocabulary | None = None) -> list[slice]:
    """Return the slices of rows whose logits are in memory at once."""
    vocabulary = head.shape[0] if split is None else split.largest_part
    size = max(1, LOGIT_ELEMENTS // vocabulary)
    if head.device.type == "cpu":
        size = min(size, max(CPU_ROWS, CPU_ELEMENTS // vocabulary))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def head_logits(hidden: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
    """(R, V) in float32 (float64 if the head is). Without a gradient.

    A GPU accumulates half-precision products in float32 anyway, and the sums are kept in float32. Rounded to bfloat16,
    a logit near 16 would be off by up to 0.06, and engine and learner would disagree by that.
    """
    if hidden.is_cuda and hidden.dtype in (torch.float16, torch.bfloat16):
        logits = steady(hidden, head, _wide_product, "head")
        return logits if bias is None else logits.add_(bias)
    if hidden.device.type == "cpu" and hidden.dtype == torch.float32:
        return steady_linear(hidden, head, bias)
    return F.linear(hidden, head, bias).to(_wide(head))


def _wide_product(rows: Tensor, head: Tensor) -> Tensor:
    return torch.mm(rows, head.T, out_dtype=torch.float32)


def token_logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p of a token of each row, (R,), bit-identical to `token_logprobs` of these logits on a CPU."""
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(1)


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(R, count) each: the likeliest tokens of rows (R, V), best first, and their log-probs."""
    values, tokens = logits.topk(count, dim=1)
    return tokens, values - logits.logsumexp(1, keepdim=True)


def on_kernel(logits: Tensor) -> bool:
    """Whether the sampler's summation order is available for these logits."""
    return logits.is_cuda and logits.dtype == torch.float32


def kernel_logprobs(
    logits: Tensor, targets: Tensor, inverse: Tensor, entropies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`token_kernel.token_logprobs`."""
    from plaudit.algo.tokens import token_kernel  # imports triton

    return token_kernel.token_logprobs(logits, targets, inverse, entropies)


def _wide(head: Tensor) -> torch.dtype:
    return torch.promote_types(head.dtype, torch.float32)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None, temperature: float,
        finish: Finish | None, entropy: bool, entropy_grad: bool, split: SplitVocabulary | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows = hidden.shape[0]
        logp, normaliser, entropies = (hidden.new_zeros(rows, dtype=_wide(head)) for _ in range(3))
        for part in chunks(rows, head, split):
            logits = head_logits(hidden[part], head, bias)
            if finish is not None:
                logits = finish(logits)
            if split is not None:
                logits = logits.mul_(1 / temperature)
                normal = split.normaliser(logits)
                normaliser[part] = normal.squeeze(-1)
                logp[part] = (split.chosen(logits, targets[part, None]) - normal).squeeze(-1)
                if entropy:
                    entropies[part] = split.entropy(logits.sub_(normal))
                continue
            if on_kernel(logits):
                inverse = torch.full((len(logits),), 1 / temperature, device=logits.device)
                to = entropies[part] if entropy else None
                logp[part], normaliser[part] = kernel_logprobs(logits, targets[part], inverse, to)
                continue
            if temperature != 1:
                logits = logits.mul_(1 / temperature)  # as the sampler does
            chosen = logits.gather(-1, targets[part, None]).squeeze(-1)
            if entropy:
                peak = logits.amax(-1, keepdim=True)
                exponentials = logits.sub_(peak).exp()
                total = exponentials.sum(-1)
                # H = log Σ e^z - Σ z e^z / Σ e^z
                entropies[part] = total.log() - exponentials.mul_(logits).sum(-1) / total
                normaliser[part] = total.log() + peak.squeeze(-1)
            else:
                normaliser[part] = logits.logsumexp(-1)
            logp[part] = chosen - normaliser[part]
        ctx.save_for_backward(hidden, head, targets, bias, normaliser, entropies)
        ctx.temperature, ctx.finish, ctx.entropy_grad, ctx.split = temperature, finish, entropy_grad, split
        if not entropy_grad:
            ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logp: Tensor, to_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets, bias, normaliser, entropies = ctx.saved_tensors
        needs_hidden, needs_head, _, needs_bias = ctx.needs_input_grad[:4]
        parts = chunks(hidden.shape[0], head, ctx.split)
        # Sums over several chunks are float32, whatever the head's dtype.
        sum_dtype = _wide(head) if len(parts) > 1 else head.dtype
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_head = torch.zeros_like(head, dtype=sum_dtype) if needs_head else None
        to_bias = torch.zeros_like(bias, dtype=_wide(head)) if needs_bias else None
        for part in parts:
            delta = _logits_gradient(
                head_logits(hidden[part], head, bias), targets[part], normaliser[part], to_logp[part],
                (entropies[part], to_entropy[part]) if ctx.entropy_grad else None, ctx.temperature, ctx.finish,
                ctx.split,
            )  # fmt: skip
            if to_bias is not None:
                to_bias += delta.sum(0)
            delta = delta.to(head.dtype)
            if to_hidden is not None:
                to_hidden[part] = delta @ head
            if to_head is not None:
                _add_product(to_head, delta.T, hidden[part])
        narrow = [None if g is None else g.to(head.dtype) for g in (to_hidden, to_head, to_bias)]
        return (*narrow[:2], None, narrow[2], None, None, None, None, None)


def _add_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    if to.dtype == a.dtype:
        to.addmm_(a, b)  # avoids a copy of the head's size per chunk
    else:
        to += a @ b


def _logits_gradient(
    logits: Tensor, targets: Tensor, normaliser: Tensor, to_logp: Tensor, entropy: tuple[Tensor, Tensor] | None,
    temperature: float, finish: Finish | None, split: SplitVocabulary | None,
) -> Tensor:  # fmt: skip
    """Return the gradient (rows, V) with respect to a chunk's raw logits. Overwrites them."""
    raw = logits
    if finish is not None:
        with torch.enable_grad():
            finished = finish(raw.requires_grad_())
        logits = finished.detach().clone()
    if temperature != 1:
        logits.mul_(1 / temperature)
    log_p = logits.sub_(normaliser[:, None])
    if entropy is None:
        delta = log_p.exp_().mul_(-to_logp[:, None])
    else:
        value, to_value = entropy
        # dH/dz = -p (log p + H), beside dlogp/dz = onehot - p
        slope = (log_p + value[:, None]).mul_(to_value[:, None]).add_(to_logp[:, None])
        delta = log_p.exp_().mul_(slope).neg_()
    if split is None:
        delta.scatter_add_(1, targets[:, None], to_logp[:, None])
    else:
        split.onto(delta, targets, to_logp)
    if temperature != 1:
        delta.div_(temperature)
    if finish is not None:
        (delta,) = torch.autograd.grad(finished, raw, delta)
    return delta
