"""Losses of preference methods by hand, and their gradients against those in the papers."""

import math

import pytest
import torch
from torch import Tensor

from plaudit.algo.preference import PREFERENCE_METHODS
from plaudit.algo.preference.method import PreferenceBatch, Responses
from plaudit.algo.preference.orpo import log_odds
from plaudit.config import PreferenceAlgorithm

WIDE = torch.float64


def answers(logp: list[float], length: list[int], reference: list[float]) -> Responses:
    return Responses(
        torch.tensor(logp, dtype=WIDE, requires_grad=True), torch.tensor(length, dtype=WIDE),
        torch.tensor(reference, dtype=WIDE),
    )  # fmt: skip


def pair(nll: float = 0.0) -> PreferenceBatch:
    """Log-ratios +1 and -0.5; means -1 and -0.5."""
    return PreferenceBatch(
        answers([-4.0], [4], [-5.0]), answers([-1.0], [2], [-0.5]), nll=torch.tensor([nll], dtype=WIDE)
    )


def settings(name: str, **keys: float) -> PreferenceAlgorithm:
    return PreferenceAlgorithm.model_validate({"name": name, **keys})


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gradients(name: str, batch: PreferenceBatch, **keys: float) -> tuple[float, list[float]]:
    """The loss of one item and its gradient with respect to the log-probs."""
    loss = PREFERENCE_METHODS[name].loss(batch, settings(name, **keys))
    leaves = [side.logp for side in (batch.better, batch.worse) if side is not None]
    slopes = torch.autograd.grad(loss.sum(), leaves)
    return loss.item(), [slope.item() for slope in slopes]


def test_dpo_by_hand() -> None:
    """Rafailov et al., eq. 7 and the gradient below it: β σ(r_l - r_w) is the weight of both sides."""
    loss, (up, down) = gradients("dpo", pair(), beta=0.2)
    assert loss == pytest.approx(-math.log(sigmoid(0.2 * 1.5)), abs=1e-12)
    weight = 0.2 * sigmoid(-0.2 * 1.5)
    assert (up, down) == pytest.approx((-weight, weight), abs=1e-12)


def test_ipo_by_hand() -> None:
    """Azar et al., eq. 17 on means: margin 1/4 + 0.5/2 = 0.5, target 1 / (2 · 0.5) = 1."""
    loss, (up, down) = gradients("ipo", pair(), beta=0.5)
    assert loss == pytest.approx(0.25, abs=1e-12)
    assert (up, down) == pytest.approx((2 * -0.5 / 4, -2 * -0.5 / 2), abs=1e-12)


def test_ipo_loss_and_gradient_are_zero_at_the_target_margin() -> None:
    batch = PreferenceBatch(answers([-1.0], [2], [-3.0]), answers([-2.0], [3], [-2.0]))
    assert gradients("ipo", batch, beta=0.5) == (0.0, [0.0, 0.0])


@pytest.mark.parametrize(("desirable", "sign", "weight"), [(True, 1, 1.5), (False, -1, 0.5)])
def test_kto_by_hand(desirable: bool, sign: int, weight: float) -> None:
    """Ethayarajh et al., eq. 7 and 8: λ (1 - σ(β (r - z))) if desirable, λ (1 - σ(β (z - r))) if undesirable."""
    batch = PreferenceBatch(answers([-4.0], [4], [-5.0]), desirable=torch.tensor([desirable]), baseline=0.3)
    loss, (slope,) = gradients("kto", batch, beta=0.2, desirable=1.5, undesirable=0.5)
    value = sigmoid(sign * 0.2 * (1.0 - 0.3))
    assert loss == pytest.approx(weight * (1 - value), abs=1e-12)
    assert slope == pytest.approx(-weight * sign * 0.2 * value * (1 - value), abs=1e-12)


def test_orpo_by_hand() -> None:
    """Hong et al., eq. 6 and 7: odds of e^-1 and of e^-0.5, added to the SFT term."""
    p, q = math.exp(-1.0), math.exp(-0.5)
    odds = math.log(p / (1 - p)) - math.log(q / (1 - q))
    loss, (up, down) = gradients("orpo", pair(nll=1.25), beta=0.3)
    assert loss == pytest.approx(1.25 - 0.3 * math.log(sigmoid(odds)), abs=1e-12)
    # d log odds / d log p = 1 / (1 - p), times the token's share of the mean.
    slope = 0.3 * sigmoid(-odds)
    assert (up, down) == pytest.approx((-slope / (1 - p) / 4, slope / (1 - q) / 2), abs=1e-12)


def test_simpo_by_hand() -> None:
    """Meng et al., eq. 6: means -1 and -0.5, no reference."""
    loss, (up, down) = gradients("simpo", pair(), beta=2.0, gamma=0.5)
    assert loss == pytest.approx(-math.log(sigmoid(-1.0 - 0.5)), abs=1e-12)
    slope = 2.0 * sigmoid(1.5)
    assert (up, down) == pytest.approx((-slope / 4, slope / 2), abs=1e-12)


@pytest.mark.parametrize("logp", [-1e-30, -1e-7, -0.69, -0.70, -30.0, -400.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_are_accurate_to_machine_precision(logp: float, dtype: torch.dtype) -> None:
    logps = torch.tensor([logp], dtype=dtype, requires_grad=True)
    actual = log_odds(logps)
    expected = logps.item() - math.log(-math.expm1(logps.item()))
    eps = torch.finfo(dtype).eps
    assert actual.item() == pytest.approx(expected, rel=4 * eps, abs=eps)
    (slope,) = torch.autograd.grad(actual.sum(), logps)
    assert slope.item() == pytest.approx(-1 / math.expm1(logps.item()), rel=1e-5)


def test_log_odds_of_a_response_with_probability_one_are_finite() -> None:
    logps = torch.zeros(2, requires_grad=True)
    odds = log_odds(logps)
    assert odds.isfinite().all()
    (slope,) = torch.autograd.grad(odds.sum(), logps)
    assert slope.isfinite().all()


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_each_loss_raises_chosen_and_lowers_rejected_logprobs(name: str) -> None:
    _, (up, down) = gradients(name, pair())
    assert up < 0 < down


@pytest.mark.parametrize("name", PREFERENCE_METHODS)
def test_implicit_rewards_rank_responses_as_the_loss_does(name: str) -> None:
    """A larger reward margin means a smaller loss, up to IPO's target margin."""
    method, algorithm = PREFERENCE_METHODS[name], settings(name)
    ahead, behind = answers([-2.0], [2], [-4.0]), answers([-4.0], [2], [-2.0])
    assert method.reward(ahead, algorithm).item() > method.reward(behind, algorithm).item()

    def loss(better: Responses, worse: Responses) -> Tensor:
        if method.pairs:
            return method.loss(PreferenceBatch(better, worse, nll=torch.zeros(1)), algorithm)
        return method.loss(PreferenceBatch(better, desirable=torch.tensor([True])), algorithm)

    assert loss(ahead, behind).item() < loss(behind, ahead).item()


def test_each_method_sets_its_default_keys_and_rejects_other_methods_keys() -> None:
    assert (settings("simpo").beta, settings("simpo").gamma) == (2.0, 1.0)
    assert (settings("kto").desirable, settings("dpo").desirable) == (1.0, None)
    with pytest.raises(ValueError, match="gamma does not apply to dpo, whose keys are beta: remove it"):
        settings("dpo", gamma=1.0)
    with pytest.raises(
        ValueError, match="'dop': unknown preference method; expected one of dpo, ipo, kto, orpo, simpo"
    ):
        settings("dop")
