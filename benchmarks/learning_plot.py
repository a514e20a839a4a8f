"""A learning curve as a picture: held-out reward over seconds, a line for each seed.

python benchmarks/learning_plot.py benchmarks/results/smollm2-grpo.json docs/benchmarks/smollm2-grpo.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 320, 52, 16, 16, 44
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed")


def picture(record: dict) -> str:
    seeds: dict[str, list[list[float]]] = {seed: found["heldout"] for seed, found in record["seeds"].items()}
    longest = max(points[-1][1] for points in seeds.values())
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(seconds: float, reward: float) -> tuple[float, float]:
        return LEFT + across * seconds / longest, TOP + down * (1 - reward)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for reward in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = at(0, reward)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{reward:g}</text>')
    step = next(s for s in (10, 20, 30, 60, 120, 300, 600) if longest / s <= 8)
    for seconds in range(0, int(longest) + 1, step):
        x, y = at(seconds, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{seconds}</text>')
    for (seed, points), colour in zip(seeds.items(), COLOURS, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(seconds, reward) for _, seconds, reward in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        _, y = at(0, 0.05)
        x = WIDTH - RIGHT - 8 - 60 * (len(seeds) - 1 - list(seeds).index(seed))
        parts.append(f'<text x="{x}" y="{y:.1f}" fill="{colour}" text-anchor="end">seed {seed}</text>')
    parts.append(f'<text x="{LEFT + across / 2}" y="{HEIGHT - 8}" text-anchor="middle">seconds of training</text>')
    parts.append(f'<text x="14" y="{TOP + down / 2}" transform="rotate(-90 14 {TOP + down / 2})" '
                 'text-anchor="middle">held-out reward</text>')  # fmt: skip
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(picture(json.loads(source.read_text())))
