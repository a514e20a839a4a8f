"""Beam search as search-and-learn does it, for benchmarks/search_vs_vllm.py. Runs in vLLM's environment and reads its
work as JSON: vLLM generates one step of every beam of all questions in one call, with prefix caching; a process model
in transformers then reads every whole path, in padded batches; the best distinct beams are kept and repeated to the
width. Prints a line of JSON for each workload."""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer
from vllm import LLM, SamplingParams


class Beam:
    def __init__(self, question):
        self.question, self.text, self.tokens, self.score, self.ended = question, "", 0, 0.0, False

    def copy(self):
        other = Beam(self.question)
        other.__dict__.update(self.__dict__)
        return other


@torch.inference_mode()
def score(prm, tokenizer, beams, batch):
    """The last step's probability. Paths of similar length are padded together."""
    order = sorted(beams, key=lambda beam: beam.tokens)
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        rows = tokenizer([beam.question + beam.text for beam in some], return_tensors="pt", padding=True)
        logits = prm(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        last = rows["attention_mask"].sum(1) - 1
        values = logits[torch.arange(len(some)), last].float().softmax(-1)[:, -1]
        for beam, value in zip(some, values.tolist(), strict=True):
            beam.score = value


def search(given, llm, prm, tokenizer, questions):
    width, keep, stop = given["width"], given["keep"], given["stop"]
    beams = [Beam(question) for question in questions for _ in range(width)]
    spent = {"generate": 0.0, "score": 0.0}
    generated = calls = 0
    # As in search-and-learn, no request has a seed: equal prompts get different steps.
    params = SamplingParams(
        temperature=1.0, max_tokens=given["step_tokens"], stop=[stop], include_stop_str_in_output=True
    )
    for _ in range(given["depth"]):
        began = time.perf_counter()
        replies = llm.generate([beam.question + beam.text for beam in beams], params, use_tqdm=False)
        spent["generate"] += time.perf_counter() - began
        for beam, reply in zip(beams, replies, strict=True):
            (output,) = reply.outputs
            beam.text += output.text
            beam.tokens += len(output.token_ids)
            generated += len(output.token_ids)
            beam.ended = not output.text.endswith(stop)
        calls += len(beams)
        began = time.perf_counter()
        score(prm, tokenizer, beams, given["prm_batch"])
        spent["score"] += time.perf_counter() - began
        following = []
        for question in questions:
            own = {beam.text: beam for beam in beams if beam.question == question and not beam.ended}
            best = sorted(own.values(), key=lambda beam: -beam.score)[:keep]
            following += [best[i % len(best)].copy() for i in range(width)] if best else []
        beams = following
        if not beams:
            break
    return {"tokens": generated, "steps": calls, "phases": spent}


def main():
    given = json.load(sys.stdin)
    for work in given["works"]:
        llm = LLM(work["policy"], **given["options"])
        torch.set_num_threads(given["threads"])
        tokenizer = AutoTokenizer.from_pretrained(work["prm"])
        prm = AutoModelForTokenClassification.from_pretrained(work["prm"], dtype=torch.float32).eval()
        search(given, llm, prm, tokenizer, work["warmup"])
        for _ in range(given["repeats"]):
            began = time.perf_counter()
            found = search(given, llm, prm, tokenizer, work["questions"])
            print(json.dumps({"work": work["name"], "seconds": time.perf_counter() - began, **found}), flush=True)
            llm.reset_prefix_cache()
        llm.llm_engine.engine_core.shutdown()  # its process would keep our output pipe open
    os._exit(0)  # its threads abort a normal exit


if __name__ == "__main__":  # vLLM spawns its engine process from this file
    main()
