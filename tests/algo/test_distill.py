"""Distillation by hand: the advantage of a sampled token, the KL over a teacher's likeliest, and its gradient."""

from math import exp, log

import pytest
import torch
from torch import tensor

from plaudit.algo.methods.distill import reverse_kl, top_k_kl, towards
from plaudit.algo.methods.reinforce import plain
from plaudit.algo.tokens.columns import column_logprobs, likeliest


def test_a_sampled_token_is_drawn_towards_what_its_teachers_give_it() -> None:
    teachers = tensor([[log(0.5), log(0.2)], [log(0.1), log(0.4)]])
    old = tensor([log(0.25), log(0.2)])
    # ln 2 + 0.5 ln 0.8, and ln 0.5 + 0.5 ln 2
    assert towards(teachers, old, [1.0, 0.5]).tolist() == pytest.approx([0.5815754, -0.3465736])
    assert towards(tensor([[-50.0]]), tensor([-1.0]), [2.0]).tolist() == [-40.0], "one token cannot sweep a batch away"


def test_the_loss_of_a_sampled_token_by_hand() -> None:
    """-A π/π_old with A = log q - log π_old: on the policy's own samples the gradient is (log π - log q) ∇log π."""
    logp = tensor([log(0.25), log(0.2)], requires_grad=True)
    old = logp.detach()
    taught = towards(tensor([[log(0.5)], [log(0.1)]]), old, [1.0])
    terms = plain(logp, old, taught + tensor([0.0, 1.0]))  # the second has an advantage of its own
    assert terms.loss.tolist() == pytest.approx([-log(2), log(2) - 1])
    terms.loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-log(2), log(2) - 1])


def test_the_sampled_gradient_is_in_expectation_that_of_the_kl() -> None:
    """Over all tokens, each as often as the policy draws it."""
    logits, teacher = tensor([0.3, -1.0, 0.8, 0.1], requires_grad=True), tensor([1.0, 0.2, -0.5, 0.0]).log_softmax(-1)
    reverse_kl(logits.log_softmax(-1)[None], teacher[None], whole=True).sum().backward()
    assert logits.grad is not None
    expected, logits.grad = logits.grad, None
    logp = logits.log_softmax(-1)
    loss = plain(logp, logp.detach(), towards(teacher[:, None], logp, [1.0])).loss
    (logp.detach().exp() * loss).sum().backward()
    assert torch.allclose(logits.grad, expected, atol=1e-6)


def test_the_kl_over_likeliest_tokens_and_the_rest_by_hand() -> None:
    policy, teacher = [0.5, 0.2, 0.2, 0.1], [0.25, 0.5, 0.15, 0.1]
    # Of tokens 1 and 0, and {2, 3} as one: 0.2 ln(0.2/0.5) + 0.5 ln(0.5/0.25) + 0.3 ln(0.3/0.25)
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
    whole = sum(p * log(p / q) for p, q in zip(policy, teacher, strict=True))
    assert reverse_kl(logits.log_softmax(-1)[None], tensor(teacher).log()[None], whole=True).item() == pytest.approx(
        whole
    )
    assert by_hand < whole, "what is taken together can only lie nearer"


def test_teachers_of_several_widths_stand_side_by_side() -> None:
    logp, teachers = torch.randn(3, 5).log_softmax(-1), torch.randn(3, 5).log_softmax(-1)
    found = top_k_kl(logp, teachers, [(2, 0.5), (3, 2.0)], vocabulary=9)
    parts = [reverse_kl(logp[:, at], teachers[:, at], whole=False) for at in (slice(0, 2), slice(2, 5))]
    assert torch.allclose(found, 0.5 * parts[0] + 2 * parts[1])


def test_a_teacher_that_is_certain_leaves_finite_numbers() -> None:
    certain, spread = tensor([[0.0, -1e4]]), tensor([[log(0.3), log(0.3)]], requires_grad=True)
    kl = reverse_kl(spread, certain, whole=False)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert spread.grad is not None
    assert spread.grad.isfinite().all()
    assert reverse_kl(certain, certain, whole=False).item() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_columns_of_chunks_are_those_of_the_whole_table(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(13, 6, generator=draw, requires_grad=True), torch.randn(9, 6, generator=draw)
    head.requires_grad_()
    bias, columns = torch.randn(9, generator=draw), torch.randint(0, 9, (13, 4), generator=draw)
    table = ((hidden @ head.T + bias).tanh() / temperature).log_softmax(-1)
    weights = torch.randn(13, 4, generator=draw)
    expected = torch.autograd.grad((table.gather(-1, columns) * weights).sum(), (hidden, head), retain_graph=True)
    monkeypatch.setattr("plaudit.algo.tokens.logprobs.LOGIT_ELEMENTS", 36)  # four rows at once
    found = column_logprobs(hidden, head, columns, bias, temperature, torch.tanh)
    assert torch.allclose(found, table.gather(-1, columns), atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad((found * weights).sum(), (hidden, head)), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    tokens, logp = likeliest(hidden, head, 3, 7, bias, temperature, torch.tanh)
    best = table[:, :7].topk(3)
    assert torch.equal(tokens, best.indices)
    assert torch.allclose(logp, best.values, atol=1e-6)
    assert exp(logp[0].sum().item()) < 1
