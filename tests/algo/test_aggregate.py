"""Token weights in the loss, by hand on a ragged batch, and gradients that do not depend on how the batch was split."""

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

# Three samples: two policy tokens, a tool's token between three, nothing of the policy's.
LENGTHS = (2, 4, 1)
MASK = torch.tensor([1, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
LOSS = torch.tensor([1.0, 3.0, 10.0, 99.0, 20.0, 30.0, 99.0])


def test_three_ways_by_hand() -> None:
    def total(how: Aggregation, constant: float | None = None) -> float:
        return float((token_weights(MASK, LENGTHS, how, constant) * LOSS).sum())

    assert total("token") == pytest.approx(64 / 5)
    assert total("sequence") == pytest.approx((4 / 2 + 60 / 3) / 2)
    assert total("constant", 8) == pytest.approx((4 + 60) / (2 * 8))
    assert total("constant", 1) == pytest.approx((4 + 60) / 2)


def test_a_batch_of_observations_weighs_nothing() -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    for how in ("token", "sequence", "constant"):
        assert token_weights(nothing, (1, 2), how, 4.0).tolist() == [0, 0, 0]
    assert token_weights(torch.zeros(0, dtype=torch.bool), (), "sequence").tolist() == []


def test_the_constant_is_asked_for() -> None:
    with pytest.raises(ValueError, match="constant = None"):
        token_weights(MASK, LENGTHS, "constant")


@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6).filter(lambda s: any(map(any, s))))
def test_means_are_means_and_every_sample_counts_alike(samples: list[list[bool]]) -> None:
    lengths = [len(s) for s in samples]
    mask = torch.tensor([m for s in samples for m in s], dtype=torch.bool)
    for how in ("token", "sequence"):
        assert float(token_weights(mask, lengths, how).sum()) == pytest.approx(1, abs=1e-5)
    shares = [float(w.sum()) for w in token_weights(mask, lengths, "sequence").split(lengths)]
    living = sum(any(s) for s in samples)
    assert shares == pytest.approx([any(s) / living for s in samples], abs=1e-5)


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
def test_the_gradient_is_the_same_however_the_samples_are_split(name: str, how: Aggregation) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 1, 7, 2, 5, 4, 6, 3)
    count = sum(lengths)
    hidden, head = torch.randn(count, 6, generator=generator), torch.randn(11, 6, generator=generator)
    targets = torch.randint(0, 11, (count,), generator=generator)
    old = -2.4 + 0.3 * torch.randn(count, generator=generator)
    advantages, mask = torch.randn(count, generator=generator), torch.rand(count, generator=generator) < 0.7
    mask[3] = False  # the sample of one token
    weights = token_weights(mask, lengths, how, 7.0)

    def gradient(splits: int) -> Tensor:
        weight = head.clone().requires_grad_()
        size = len(lengths) // splits
        for part in range(splits):
            chosen = lengths[part * size : (part + 1) * size]
            at = slice(sum(lengths[: part * size]), sum(lengths[: (part + 1) * size]))
            logp, entropy = token_logprobs_and_entropy(hidden[at], weight, targets[at], entropy_grad=True)
            loss = LOSSES[name](logp, old[at], advantages[at], mask[at], chosen) - 0.1 * entropy
            (weights[at] * loss).sum().backward()
        assert weight.grad is not None
        return weight.grad

    whole = gradient(1)
    assert whole.norm() > 1e-3
    for splits in (2, 4):
        torch.testing.assert_close(gradient(splits), whole, rtol=1e-6, atol=1e-6)
