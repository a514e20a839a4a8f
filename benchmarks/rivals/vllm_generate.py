"""vLLM's offline generation, for benchmarks/vllm_gpu.py. Runs in vLLM's environment and reads its work as JSON.

Random weights (`load_format="dummy"`), token ids in and out, log-probs of the sampled tokens. Prints a line of JSON for
the start and for each workload."""

import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
from vllm import LLM, SamplingParams

given = json.load(sys.stdin)
begin = time.perf_counter()
llm = LLM(given["model"], **given["options"])
print(json.dumps({"start_seconds": time.perf_counter() - begin}), flush=True)
draw = random.Random(given["seed"])


def prompts(count, length):
    return [{"prompt_token_ids": draw.choices(range(5, given["vocabulary"]), k=length)} for _ in range(count)]


for work in given["works"]:
    seconds = []
    for new in (given["warmup_tokens"], *[work["new"]] * given["repeats"]):
        rows = prompts(work["rows"], work["prompt"])
        params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        begin = time.perf_counter()
        replies = llm.generate(rows, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
        drawn = [reply.outputs[0] for reply in replies]
        if any(len(x.token_ids) != new or len(x.logprobs) != new for x in drawn):
            raise SystemExit(f"vLLM gave fewer tokens or log-probs than the {new} of each row")
    print(json.dumps({"work": work["name"], "seconds": seconds[1:]}), flush=True)
llm.llm_engine.engine_core.shutdown()  # its process would keep our output pipe open
os._exit(0)  # its threads abort a normal exit
