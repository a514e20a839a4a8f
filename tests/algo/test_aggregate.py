"""Loss weights of tokens, computed by hand on a ragged batch; gradients do not depend on how the batch is split."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plaudit.algo.aggregate import Aggregation, token_weights
from plaudit.algo.kl import kl_loss
from plaudit.algo.method import PolicyTerms
from plaudit.algo.methods.cispo import cispo
from plaudit.algo.methods.gspo import gspo, gspo_token
from plaudit.algo.methods.ppo import clipped, ratio_of
from plaudit.algo.methods.reinforce import plain
from plaudit.algo.tokens.logprobs import token_logprobs_and_entropy

# Three samples: two policy tokens; three policy tokens and one tool token; one token that is not the policy's.
LENGTHS = (2, 4, 1)
MASK = torch.tensor([1, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
LOSS = torch.tensor([1.0, 3.0, 10.0, 99.0, 20.0, 30.0, 99.0])


def test_token_weights_by_hand_for_each_aggregation() -> None:
    def total(how: Aggregation, constant: float | None = None) -> float:
        return float((token_weights(MASK, LENGTHS, how, constant) * LOSS).sum())

    assert total("token") == pytest.approx(64 / 5)
    assert total("sequence") == pytest.approx((4 / 2 + 60 / 3) / 2)
    assert total("constant", 8) == pytest.approx((4 + 60) / (2 * 8))
    assert total("constant", 1) == pytest.approx((4 + 60) / 2)


def test_samples_without_policy_tokens_have_zero_weights() -> None:
    no_policy_tokens = torch.zeros(3, dtype=torch.bool)
    for how in ("token", "sequence", "constant"):
        assert token_weights(no_policy_tokens, (1, 2), how, 4.0).tolist() == [0, 0, 0]
    assert token_weights(torch.zeros(0, dtype=torch.bool), (), "sequence").tolist() == []


def test_constant_aggregation_requires_the_constant() -> None:
    with pytest.raises(ValueError, match="constant = None"):
        token_weights(MASK, LENGTHS, "constant")


@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6).filter(lambda s: any(map(any, s))))
def test_weights_sum_to_one_and_sequence_weights_are_equal_per_sample(samples: list[list[bool]]) -> None:
    lengths = [len(s) for s in samples]
    mask = torch.tensor([m for s in samples for m in s], dtype=torch.bool)
    for how in ("token", "sequence"):
        assert float(token_weights(mask, lengths, how).sum()) == pytest.approx(1, abs=1e-5)
    shares = [float(w.sum()) for w in token_weights(mask, lengths, "sequence").split(lengths)]
    nonempty = sum(any(s) for s in samples)
    assert shares == pytest.approx([any(s) / nonempty for s in samples], abs=1e-5)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, tuple[int, ...]], Tensor]


def policy(terms: Callable[..., PolicyTerms], *bounds: float) -> Loss:
    return lambda logp, old, advantages, mask, lengths: terms(logp, old, advantages, *bounds).loss


def sequence_policy(terms: Callable[..., PolicyTerms]) -> Loss:
    return lambda logp, old, advantages, mask, lengths: terms(logp, old, advantages, mask, lengths, 0.1, 0.1).loss


LOSSES: dict[str, Loss] = {
    "clipped": policy(clipped, 0.2, 0.28, 3.0),
    "plain": policy(plain),
    "cispo": policy(cispo, 1.0, 0.5),
    "gspo": sequence_policy(gspo),
    "gspo-token": sequence_policy(gspo_token),
    "kl": lambda logp, old, advantages, mask, lengths: kl_loss(logp, old, "k3", ratio=ratio_of(logp, old)),
}


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", list(LOSSES))
def test_gradient_does_not_depend_on_micro_batch_split(name: str, how: Aggregation) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 1, 7, 2, 5, 4, 6, 3)
    count = sum(lengths)
    hidden, head = torch.randn(count, 6, generator=generator), torch.randn(11, 6, generator=generator)
    targets = torch.randint(0, 11, (count,), generator=generator)
    old = -2.4 + 0.3 * torch.randn(count, generator=generator)
    advantages, mask = torch.randn(count, generator=generator), torch.rand(count, generator=generator) < 0.7
    mask[3] = False  # the sample with one token
    weights = token_weights(mask, lengths, how, 7.0)

    def gradient(splits: int) -> Tensor:
        weight = head.clone().requires_grad_()
        size = len(lengths) // splits
        for index in range(splits):
            part_lengths = lengths[index * size : (index + 1) * size]
            tokens = slice(sum(lengths[: index * size]), sum(lengths[: (index + 1) * size]))
            logp, entropy = token_logprobs_and_entropy(hidden[tokens], weight, targets[tokens], entropy_grad=True)
            loss = LOSSES[name](logp, old[tokens], advantages[tokens], mask[tokens], part_lengths) - 0.1 * entropy
            (weights[tokens] * loss).sum().backward()
        assert weight.grad is not None
        return weight.grad

    full_batch = gradient(1)
    assert full_batch.norm() > 1e-3
    for splits in (2, 4):
        torch.testing.assert_close(gradient(splits), full_batch, rtol=1e-6, atol=1e-6)
