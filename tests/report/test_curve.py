import math
import random

import pytest

from plaudit.report.curve import Curve


def curve(*values: float) -> Curve:
    return Curve(tuple(range(1, len(values) + 1)), values)


def test_early_middle_and_late_means() -> None:
    line = curve(*range(40))
    assert line.early() == pytest.approx(3.5)
    assert line.middle() == pytest.approx(14.5)
    assert line.late() == pytest.approx(34.5)
    assert curve(1.0, math.nan, 3.0).late() == 2.0
    assert math.isnan(curve().late())


def test_noise_estimate_matches_the_noise_and_ignores_a_trend() -> None:
    chance = random.Random(0)
    noisy = [chance.gauss(0, 1) for _ in range(400)]
    flat, rising = curve(*noisy), curve(*(value + 0.1 * i for i, value in enumerate(noisy)))
    assert flat.noise() == pytest.approx(3 * math.sqrt(1 / 100 + 1 / 80), rel=0.15)
    assert rising.noise() == pytest.approx(flat.noise(), rel=0.01)
    assert curve(1.0, 2.0).noise() == math.inf


def test_thinning_keeps_ends_and_spikes() -> None:
    values = [0.0] * 10_000
    values[4321], values[7777], values[5000] = 9.0, -9.0, math.nan
    thin = curve(*values).thinned(400)
    assert len(thin) <= 400
    assert (thin.steps[0], thin.steps[-1]) == (1, 10_000)
    assert dict(zip(thin.steps, thin.values, strict=True))[4322] == 9.0
    assert min(thin.finite) == -9.0
    assert curve(1.0, 2.0).thinned(400) == curve(1.0, 2.0)
    assert len(curve(*[math.nan] * 1000).thinned(100)) <= 100


def test_first_step_with_a_non_finite_value() -> None:
    assert curve(1.0, math.inf, math.nan).first_not_finite == 2
    assert curve(1.0).first_not_finite is None
    assert curve(1.0, 5.0, math.nan).near(3) == 5.0
