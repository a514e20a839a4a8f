import pytest
import torch

from plaudit.algo import logprobs
from plaudit.algo.logprobs import token_logprobs


def test_by_hand() -> None:
    hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    head = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    # logits: row 0 is [0, 1], row 1 is [0, 2]
    expected = torch.tensor([1 - torch.tensor([0.0, 1.0]).logsumexp(0), 0 - torch.tensor([0.0, 2.0]).logsumexp(0)])
    torch.testing.assert_close(token_logprobs(hidden, head, torch.tensor([1, 0])), expected)


def test_chunks_change_neither_values_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 8, generator=generator, requires_grad=True)
    head = torch.randn(50, 8, generator=generator, requires_grad=True)
    bias = torch.randn(50, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (37,), generator=generator)

    def run() -> list[torch.Tensor]:
        values = token_logprobs(hidden, head, targets, bias)
        return [values, *torch.autograd.grad(values.square().sum(), [hidden, head, bias])]

    whole = run()
    monkeypatch.setattr(logprobs, "LOGIT_ELEMENTS", 50 * 5)
    for a, b in zip(whole, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_half_precision_rows_are_summed_in_float32() -> None:
    hidden, head = torch.randn(4, 16).bfloat16(), torch.randn(1000, 16).bfloat16()
    assert token_logprobs(hidden, head, torch.arange(4)).dtype == torch.float32
