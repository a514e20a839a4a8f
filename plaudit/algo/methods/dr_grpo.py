"""Dr. GRPO: GRPO without its two biases.

Liu et al. (Understanding R1-Zero-like Training, 2025). No division by the group's standard deviation, which favours
prompts that are nearly always or never solved; and the sum over tokens is divided by a constant, not averaged per
response, which penalises long wrong responses too little. Deviations: none.
"""

from __future__ import annotations

from plaudit.algo.method import Method
from plaudit.algo.methods.grpo import GROUP
from plaudit.algo.methods.ppo import CLIP

METHOD = Method(advantage=GROUP, loss=CLIP, preset={"aggregate": "constant"})
