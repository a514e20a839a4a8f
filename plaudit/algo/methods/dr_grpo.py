"""Dr. GRPO: GRPO without its two biases.

Liu et al. (Understanding R1-Zero-like Training, 2025). No division by the group's deviation, which favours prompts that
are nearly always or never solved; and a sum over tokens over a constant, not a mean per response, which makes a long
wrong response cheap. Deviations: none.
"""

from __future__ import annotations

from plaudit.algo.method import Method
from plaudit.algo.methods.grpo import GROUP
from plaudit.algo.methods.ppo import CLIP

METHOD = Method(advantage=GROUP, loss=CLIP, preset={"aggregate": "constant"})
