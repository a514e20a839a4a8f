"""Distillation by hand: the advantage of a sampled token, the KL over a teacher's top-k tokens, and its gradient."""

from math import exp, log

import pytest
import torch
from torch import tensor

from plaudit.algo.methods.distill import reverse_kl, top_k_kl, towards
from plaudit.algo.methods.reinforce import plain
from plaudit.algo.tokens.columns import column_logprobs, likeliest


def test_distillation_advantage_is_the_weighted_teacher_log_ratio() -> None:
    teachers = tensor([[log(0.5), log(0.2)], [log(0.1), log(0.4)]])
    old = tensor([log(0.25), log(0.2)])
    # ln 2 + 0.5 ln 0.8, and ln 0.5 + 0.5 ln 2
    assert towards(teachers, old, [1.0, 0.5]).tolist() == pytest.approx([0.5815754, -0.3465736])
    assert towards(tensor([[-50.0]]), tensor([-1.0]), [2.0]).tolist() == [-40.0], "one token cannot sweep a batch away"


def test_sampled_token_loss_by_hand() -> None:
    """-A π/π_old with A = log q - log π_old: on on-policy samples the gradient is (log π - log q) ∇log π."""
    logp = tensor([log(0.25), log(0.2)], requires_grad=True)
    old = logp.detach()
    advantages = towards(tensor([[log(0.5)], [log(0.1)]]), old, [1.0])
    terms = plain(logp, old, advantages + tensor([0.0, 1.0]))  # the second token has an additional advantage
    assert terms.loss.tolist() == pytest.approx([-log(2), log(2) - 1])
    terms.loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-log(2), log(2) - 1])


def test_expected_sampled_gradient_equals_the_kl_gradient() -> None:
    """The expectation is over all tokens, each weighted by its probability under the policy."""
    logits, teacher = tensor([0.3, -1.0, 0.8, 0.1], requires_grad=True), tensor([1.0, 0.2, -0.5, 0.0]).log_softmax(-1)
    reverse_kl(logits.log_softmax(-1)[None], teacher[None], whole=True).sum().backward()
    assert logits.grad is not None
    expected, logits.grad = logits.grad, None
    logp = logits.log_softmax(-1)
    loss = plain(logp, logp.detach(), towards(teacher[:, None], logp, [1.0])).loss
    (logp.detach().exp() * loss).sum().backward()
    assert torch.allclose(logits.grad, expected, atol=1e-6)


def test_top_k_kl_with_a_remainder_bucket_by_hand() -> None:
    policy, teacher = [0.5, 0.2, 0.2, 0.1], [0.25, 0.5, 0.15, 0.1]
    # Tokens 1 and 0, and {2, 3} as one bucket: 0.2 ln(0.2/0.5) + 0.5 ln(0.5/0.25) + 0.3 ln(0.3/0.25)
    by_hand = 0.2 * log(0.4) + 0.5 * log(2) + 0.3 * log(1.2)
    logits = tensor(policy).log().requires_grad_()
    logp = logits.log_softmax(-1)[None, [1, 0]]
    kl = reverse_kl(logp, tensor(teacher).log()[None, [1, 0]], whole=False)
    assert kl.item() == pytest.approx(by_hand, abs=1e-6)
    assert by_hand == pytest.approx(0.2180119, abs=1e-7)
    kl.sum().backward()
    assert logits.grad is not None
    # p_v (ln(p / q) of v's bucket - KL)
    ratios = [log(2), log(0.4), log(1.2), log(1.2)]
    assert logits.grad.tolist() == pytest.approx(
        [p * (r - by_hand) for p, r in zip(policy, ratios, strict=True)], abs=1e-6
    )
    full_kl = sum(p * log(p / q) for p, q in zip(policy, teacher, strict=True))
    assert reverse_kl(logits.log_softmax(-1)[None], tensor(teacher).log()[None], whole=True).item() == pytest.approx(
        full_kl
    )
    assert by_hand < full_kl, "what is taken together can only lie nearer"


def test_teachers_with_different_top_k_are_summed_with_their_weights() -> None:
    logp, teachers = torch.randn(3, 5).log_softmax(-1), torch.randn(3, 5).log_softmax(-1)
    actual = top_k_kl(logp, teachers, [(2, 0.5), (3, 2.0)], vocabulary=9)
    parts = [reverse_kl(logp[:, columns], teachers[:, columns], whole=False) for columns in (slice(0, 2), slice(2, 5))]
    assert torch.allclose(actual, 0.5 * parts[0] + 2 * parts[1])


def test_kl_is_finite_for_a_teacher_with_probability_one() -> None:
    certain, spread = tensor([[0.0, -1e4]]), tensor([[log(0.3), log(0.3)]], requires_grad=True)
    kl = reverse_kl(spread, certain, whole=False)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert spread.grad is not None
    assert spread.grad.isfinite().all()
    assert reverse_kl(certain, certain, whole=False).item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_column_logprobs_match_the_full_table(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(13, 6, generator=generator, requires_grad=True), torch.randn(9, 6, generator=generator)
    head.requires_grad_()
    bias, columns = torch.randn(9, generator=generator), torch.randint(0, 9, (13, 4), generator=generator)
    table = ((hidden @ head.T + bias).tanh() / temperature).log_softmax(-1)
    weights = torch.randn(13, 4, generator=generator)
    expected = torch.autograd.grad((table.gather(-1, columns) * weights).sum(), (hidden, head), retain_graph=True)
    monkeypatch.setattr("plaudit.algo.tokens.logprobs.LOGIT_ELEMENTS", 36)  # four rows per chunk
    actual = column_logprobs(hidden, head, columns, bias, temperature, torch.tanh)
    assert torch.allclose(actual, table.gather(-1, columns), atol=1e-6)
    for actual_gradient, expected_gradient in zip(
        torch.autograd.grad((actual * weights).sum(), (hidden, head)), expected, strict=True
    ):
        assert torch.allclose(actual_gradient, expected_gradient, atol=1e-5)
    tokens, logp = likeliest(hidden, head, 3, 7, bias, temperature, torch.tanh)
    top_k = table[:, :7].topk(3)
    assert torch.equal(tokens, top_k.indices)
    assert torch.allclose(logp, top_k.values, atol=1e-6)
    assert exp(logp[0].sum().item()) < 1
