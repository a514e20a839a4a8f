"""Best of four: a policy generates four answers, and a reward model in the same process selects one."""

from __future__ import annotations

import sys

from plaudit import Engine, SamplingParams

if __name__ == "__main__":
    question = sys.argv[1] if len(sys.argv) > 1 else "8+7+6="
    policy, judge = Engine.load("sums-policy"), Engine.load("sums")
    samples = policy.generate(question, SamplingParams(n=4, seed=1))
    scores = [row[0] for row in judge.score([[*each.prompt_ids, *each.token_ids] for each in samples])]
    for score, sample in sorted(zip(scores, samples, strict=True), key=lambda pair: -pair[0]):
        print(f"{score:5.1f}  {sample.text}")
