"""The agent of docs/agents.md, with OpenAI's SDK, and one with its async client and streams. In: a directory and the
page's code. Out: the samples of one step of each agent and of the recipe's own agent."""

import json
import sys
from pathlib import Path

import plaudit

arguments = json.load(sys.stdin)
directory = Path(arguments["directory"])
STREAMED = r"""
import re
from openai import AsyncOpenAI

async def play(prompt, base_url, api_key):
    messages = [{"role": "user", "content": prompt.text}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=3) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        for _ in range(24):
            stream = await client.chat.completions.create(model="gpt-4o", messages=messages, stop=["="], stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            if (sum_ := re.fullmatch(r"(\d+)\+(\d+)", text)) is None:
                return float(text == f"#{prompt.truth}")
            told = f"{int(sum_[1]) + int(sum_[2])};"
            messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": told}]
    return 0.0
"""
(directory / "my_agent.py").write_text(arguments["code"])
(directory / "streamed.py").write_text(STREAMED)
small = {
    "train.prompts_per_step": 4, "train.samples_per_prompt": 4, "train.warmup": 0, "train.dump": True,
    "data.eval_items": 2, "model.device": "cpu",
}  # fmt: skip
results = {}
agents = {
    "recipe": "plaudit.worlds.sums_agent", "page": f"{directory}/my_agent.py", "streamed": f"{directory}/streamed.py"
}  # fmt: skip
for name, module in agents.items():
    out, options = directory / name, {**small, "agent.function": f"{module}:play"}
    run = plaudit.train("sums-agent", out=out, steps=1, options=options, quiet=True)
    lines = [line for file in sorted((out / "rollouts").iterdir()) for line in file.read_text().splitlines()]
    samples = [sample for sample in map(json.loads, lines) if "mask" in sample]
    results[name] = {
        "samples": [[sample[key] for key in ("token_ids", "mask", "reward", "error")] for sample in samples],
        "errors": run.curve("reward/errors")[0][1], "turns": run.curve("turns/mean")[0][1],
        "mismatch": run.curve("mismatch/abs_max")[0][1],
    }  # fmt: skip
print(json.dumps(results))
