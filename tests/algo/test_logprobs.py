"""Log-probabilities and entropies of a vocabulary head, against brute force; what is stored for the backward pass."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plaudit.algo.tokens import logprobs
from plaudit.algo.tokens.logprobs import Finish, token_logprobs, token_logprobs_and_entropy


def soft_cap(logits: Tensor) -> Tensor:
    return 3 * torch.tanh(logits / 3)


FINISHES = pytest.mark.parametrize("finish", [None, soft_cap, lambda logits: logits], ids=["none", "cap", "identity"])
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])


def inputs(dtype: torch.dtype = torch.float32, rows: int = 37, vocabulary: int = 50) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(rows, 8, generator=generator), torch.randn(vocabulary, 8, generator=generator)
    bias, targets = (
        torch.randn(vocabulary, generator=generator),
        torch.randint(0, vocabulary, (rows,), generator=generator),
    )
    return [*(t.to(dtype).requires_grad_() for t in (hidden, head, bias)), targets]


def test_logprobs_and_entropy_by_hand() -> None:
    hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    head = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    # logits: row 0 is [0, 1], row 1 is [0, 2]
    first, second = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))
    logp, entropy = token_logprobs_and_entropy(hidden, head, torch.tensor([1, 0]))
    assert logp.tolist() == pytest.approx([math.log(first), math.log(second)], rel=1e-6)
    by_hand = [-p * math.log(p) - (1 - p) * math.log(1 - p) for p in (first, second)]
    assert entropy.tolist() == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_gpu_logits_are_not_rounded_to_half_precision(dtype: torch.dtype, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 64, generator=generator).to(dtype) for n in (300, 5000))
    bias = torch.randn(5000, generator=generator).to(dtype) if biased else None
    targets = torch.randint(0, 5000, (300,), generator=generator)
    exact = hidden.double() @ head.double().T + (0 if bias is None else bias.double())
    expected = exact.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    rounded = exact.to(dtype).double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    actual = token_logprobs(hidden.cuda(), head.cuda(), targets.cuda(), None if bias is None else bias.cuda()).cpu()
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max() < 5e-4
    assert (rounded - expected).abs().max() > 2e-3  # so rounding would fail the test


@FINISHES
@TEMPERATURES
def test_each_row_matches_a_brute_force_computation(finish: Finish | None, temperature: float) -> None:
    """One row and one token at a time, in Python floats: no row may read another row's target."""
    hidden, head, bias, targets = inputs(rows=5, vocabulary=7)
    logp, entropy = token_logprobs_and_entropy(hidden, head, targets, bias, temperature, finish)
    torch.testing.assert_close(logp, token_logprobs(hidden, head, targets, bias, temperature, finish))
    for row in range(5):
        logits = [
            sum(h * w for h, w in zip(hidden[row].tolist(), head[v].tolist(), strict=True)) + bias[v].item()
            for v in range(7)
        ]
        if finish is soft_cap:
            logits = [3 * math.tanh(x / 3) for x in logits]
        weights = [math.exp(x / temperature) for x in logits]
        probabilities = [w / sum(weights) for w in weights]
        assert logp[row].item() == pytest.approx(math.log(probabilities[int(targets[row])]), abs=1e-5)
        assert entropy[row].item() == pytest.approx(-sum(p * math.log(p) for p in probabilities), abs=1e-5)


@FINISHES
@TEMPERATURES
@pytest.mark.parametrize("elements", [1 << 24, 9 * 2])
def test_gradients_match_finite_differences(
    finish: Finish | None, temperature: float, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGIT_ELEMENTS", elements)
    hidden, head, bias, targets = inputs(torch.float64, rows=5, vocabulary=9)

    def both(*weights: Tensor) -> tuple[Tensor, Tensor]:
        hidden, head, bias = weights
        return token_logprobs_and_entropy(hidden, head, targets, bias, temperature, finish, entropy_grad=True)

    assert torch.autograd.gradcheck(both, (hidden, head, bias))
    assert torch.autograd.gradcheck(lambda *weights: both(*weights)[1], (hidden, head, bias))


@pytest.mark.parametrize("entropy", [False, True])
def test_chunking_changes_neither_values_nor_gradients(entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, bias, targets = inputs()

    def run() -> list[Tensor]:
        if entropy:
            values, entropies = token_logprobs_and_entropy(hidden, head, targets, bias, 0.8, entropy_grad=True)
            loss = values.square().sum() + entropies.square().sum()
        else:
            values = token_logprobs(hidden, head, targets, bias, 0.8)
            loss = values.square().sum()
        return [values, *torch.autograd.grad(loss, [hidden, head, bias])]

    unchunked = run()
    monkeypatch.setattr(logprobs, "LOGIT_ELEMENTS", 50 * 5)
    for a, b in zip(unchunked, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_entropy_has_a_gradient_only_if_requested() -> None:
    hidden, head, bias, targets = inputs()
    logp, entropy = token_logprobs_and_entropy(hidden, head, targets, bias)
    assert logp.requires_grad
    assert not entropy.requires_grad
    (with_entropy,) = torch.autograd.grad(logp.sum(), hidden)
    (alone,) = torch.autograd.grad(token_logprobs(hidden, head, targets, bias).sum(), hidden)
    torch.testing.assert_close(with_entropy, alone)


def test_frozen_head_gets_no_gradient() -> None:
    hidden, head, _, targets = inputs()
    token_logprobs(hidden, head.detach(), targets).sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_half_precision_rows_are_summed_in_float32() -> None:
    hidden, head, bias, targets = inputs(torch.bfloat16, rows=6, vocabulary=1000)
    logp, entropy = token_logprobs_and_entropy(hidden, head, targets, bias)
    assert logp.dtype == entropy.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, head, bias).float()
    torch.testing.assert_close(logp, logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1))
    logp.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_half_precision_gradients_of_many_chunks_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, bias, targets = inputs(torch.bfloat16, rows=600, vocabulary=20)

    def error() -> float:
        """Relative error of the head's gradient against the same computation in float64."""
        exact = [t.detach().double().requires_grad_() for t in (hidden, head, bias)]
        (expected,) = torch.autograd.grad(token_logprobs(exact[0], exact[1], targets, exact[2]).sum(), exact[1])
        (actual,) = torch.autograd.grad(token_logprobs(hidden, head, targets, bias).sum(), head)
        return float((actual.double() - expected).norm() / expected.norm())

    unchunked_error = error()
    monkeypatch.setattr(logprobs, "LOGIT_ELEMENTS", 20 * 2)
    assert error() < 1.5 * unchunked_error


def saved_elements(make: Callable[[], Tensor]) -> int:
    """Number of elements saved for the backward pass, without parameters and inputs."""
    sizes: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        make()
    return sum(sizes.values())


def test_backward_pass_does_not_store_the_rows_times_vocabulary_logits() -> None:
    hidden, head, bias, targets = inputs(rows=64, vocabulary=500)
    plain = saved_elements(lambda: torch.nn.functional.linear(hidden, head, bias).log_softmax(-1)[:, 0])
    assert plain >= 64 * 500
    assert saved_elements(lambda: token_logprobs(hidden, head, targets, bias)) <= 4 * 64
    assert (
        saved_elements(lambda: token_logprobs_and_entropy(hidden, head, targets, bias, entropy_grad=True)[0]) <= 4 * 64
    )


def test_extreme_logits_stay_finite() -> None:
    hidden, head = torch.tensor([[1e4], [-1e4]], requires_grad=True), torch.tensor([[1.0], [-1.0], [0.0]])
    logp, entropy = token_logprobs_and_entropy(hidden, head, torch.tensor([0, 0]), entropy_grad=True)
    assert logp.tolist() == [0, -2e4]
    assert entropy.tolist() == [0, 0]
    (logp.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == [0, 2]


def test_zero_rows_give_empty_results_and_zero_gradients() -> None:
    hidden, head, bias, targets = inputs()
    logp, entropy = token_logprobs_and_entropy(hidden[:0], head, targets[:0], bias)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert head.grad is not None
    assert not head.grad.any()


def test_temperature_zero_is_rejected() -> None:
    hidden, head, _, targets = inputs()
    with pytest.raises(ValueError, match="temperature = 0"):
        token_logprobs(hidden, head, targets, temperature=0.0)
