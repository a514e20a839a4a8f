"""The number of children of each leaf: REBASE's apportionment (arXiv 2408.00724), in exact arithmetic.

With the leaves in descending order of score, leaf i gets ceil(w_left * e_i / E_left), where e_i = exp(score_i / T),
E_left is the sum of the weights not yet served and w_left the width not yet assigned. So the counts sum to the width,
never rise along the order, and the weakest get none. The original subtracts floats, and can overshoot by one or divide
0 by 0:

1. weights are shifted by the maximum score: no overflow;
2. quotients are computed with integers: the float weights are converted exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plaudit.errors import RequestError

_BITS = 1130  # enough for every float from 0 to 1 to be a whole number of 2**-1130


def rebase(scores: Sequence[float], width: int, temperature: float = 0.2) -> list[int]:
    """Children for each leaf; their sum is `width`."""
    check_finite(scores)
    if temperature <= 0 or width < 0:
        raise RequestError(
            f"temperature is {temperature} and width {width}; expected a temperature above 0 and a width of 0 or more"
        )
    top = max(scores, default=0.0)
    return apportion([math.exp((score - top) / temperature) for score in scores], width)


def apportion(weights: Sequence[float], width: int) -> list[int]:
    """The same for weights from 0 to 1, at least one of them above 0."""
    exact = [int(math.ldexp(m, 53)) << (_BITS - 53 + e) for m, e in map(math.frexp, weights)]
    counts = [0] * len(weights)
    left, weight_left = width, sum(exact)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        if left == 0 or weight_left == 0:
            break
        counts[i] = -(-left * exact[i] // weight_left)
        left -= counts[i]
        weight_left -= exact[i]
    return counts


def even(count: int, width: int) -> list[int]:
    """`width` children over `count` leaves; if not divisible, the first ones get one more."""
    return [width // count + (i < width % count) for i in range(count)]


def check_finite(scores: Sequence[float]) -> None:
    for i, score in enumerate(scores):
        if not math.isfinite(score):
            raise RequestError(f"the score of leaf {i} is {score}; expected a finite number; check the PRM's output")
