"""A whole search compared with a straightforward loop over transformers, and the tokens a PRM computes over HTTP, in
one run.

    python benchmarks/search_throughput.py [--questions 24] [--width 16]

    loop     what a simple script does: question by question and level by level, `generate` with the children of a level
             as a batch, then the process model over every whole path; REBASE's own counts. Nothing is shared or cached.
    plaudit  `plaudit.search` of the same questions, REBASE, width and stop
    served   the same search with the PRM behind `plaudit serve`: tokens it computed per scored node, compared with
             re-prefilling every path, for nodes at depth 6 and more and for all

Both use the embedded models in float32 with one thread. Writes benchmarks/results/search_throughput.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "search_throughput.json"
AIM, AIM_PRM = 5.0, 3.0


def loop(questions: list[str], width: int, seed: int) -> dict[str, Any]:
    """No sharing: the texts of a level are one padded batch for the policy, and one for the PRM."""
    import torch

    from plaudit.models import load_policy, load_steps
    from plaudit.search.tree.apportion import rebase

    policy, judge = load_policy("sums-policy"), load_steps("sums-steps")
    tokenizer = policy.tokenizer
    tokenizer.padding_side = "left"
    stop, end = tokenizer.encode(";", add_special_tokens=False)[0], tokenizer.eos_token_id
    torch.manual_seed(seed)
    tokens, finished, began = 0, 0, time.perf_counter()
    for question in questions:
        leaves, counts, left = [question], [width], width
        while left and leaves:
            texts = [leaf for leaf, count in zip(leaves, counts, strict=True) for _ in range(count)]
            batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
            with torch.inference_mode():
                made = policy.module.generate(
                    **batch, do_sample=True, top_k=0, max_new_tokens=24, eos_token_id=[stop, end],
                    pad_token_id=tokenizer.pad_token_id,
                )  # fmt: skip
            grown = []
            for text, row in zip(texts, made[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
                own = row[: next((i + 1 for i, t in enumerate(row) if t in (stop, end)), len(row))]
                tokens += len(own)
                grown.append((text + tokenizer.decode(own, skip_special_tokens=True), own[-1] == stop))
            ended = [text for text, on in grown if not on or len(text) > 200]
            leaves = [text for text, on in grown if on and len(text) <= 200]
            finished += len(ended)
            left -= len(ended)
            if leaves and left > 0:
                tokenizer.padding_side = "right"
                paths = tokenizer(leaves, return_tensors="pt", padding=True, return_token_type_ids=False)
                tokenizer.padding_side = "left"
                with torch.inference_mode():
                    logits = judge.module(**paths).logits
                last = paths["attention_mask"].sum(dim=1) - 1
                scores = logits[torch.arange(len(leaves)), last].softmax(-1)[:, -1].tolist()
                counts = rebase(scores, left)
    return {"seconds": time.perf_counter() - began, "tokens": tokens, "paths": finished}


def ours(count: int, width: int, seed: int, url: str | None = None) -> dict[str, Any]:
    from plaudit.config.search import load_search
    from plaudit.search.search import Search

    flags = {"search.method": "rebase", "search.width": width, "data.limit": count}
    sets = [f"seed={seed}", *([f'prm={{url="{url}"}}'] if url else [])]
    search = Search(load_search(None, flags, sets))
    questions = search.questions()
    began = time.perf_counter()
    outcomes = list(search.run(questions))
    spent = time.perf_counter() - began
    search.close()
    scored = [(o, n) for o in outcomes for n in o.tree.nodes[1:] if n.twin == n.id and n.score is not None]
    path = {(o.question.index, n.id): len(o.question.prompt_ids) + o.tree.length(n.id) for o, n in scored}
    return {
        "seconds": spent, "tokens": sum(o.driver.costs.generated for o in outcomes),
        "paths": sum(n.state == "finished" for o in outcomes for n in o.tree.nodes), "scored": len(scored),
        "prefill_all": sum(path.values()), "deep": sum(n.depth >= 6 for _, n in scored),
        "prefill_deep": sum(path[o.question.index, n.id] for o, n in scored if n.depth >= 6),
        "phases": {name: round(seconds, 3) for name, seconds in search.phases.items()},
    }  # fmt: skip


def served(count: int, width: int, seed: int) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from tests.serve.process import ServerProcess

    with ServerProcess(None, "--model", "sums-steps") as server:
        before = server.http.get("/stats").json()["models"][0]["computed_tokens"]
        figures = ours(count, width, seed, server.url)
        computed = server.http.get("/stats").json()["models"][0]["computed_tokens"] - before
    return {
        **figures, "computed": computed, "computed_per_node": computed / figures["scored"],
        "prefill_per_node": figures["prefill_all"] / figures["scored"],
        "fewer": figures["prefill_all"] / computed,
        # Depth 6 and more only: computed tokens are distributed evenly over all scored nodes.
        "fewer_deep": figures["prefill_deep"] / (computed * figures["deep"] / figures["scored"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    from plaudit.worlds import get_world

    texts = [problem.prompt for problem in get_world("sums-hard", 1).heldout(args.questions)]
    runs: dict[str, list[dict[str, Any]]] = {"loop": [], "plaudit": []}
    ours(4, args.width, 1)
    for seed in (1, 2, 3):  # alternate, so that other load on the machine affects both
        runs["loop"].append(loop(texts, args.width, seed))
        runs["plaudit"].append(ours(args.questions, args.width, seed))
    speed = {name: [run["tokens"] / run["seconds"] for run in each] for name, each in runs.items()}
    per = {name: sorted(run["seconds"] for run in each)[1] / args.questions for name, each in runs.items()}
    over_http = served(args.questions, args.width, 1)
    ratio = per["loop"] / per["plaudit"]
    for name, note in (("loop", ""), ("plaudit", f": {ratio:.1f}x (aim {AIM})")):
        print(f"{name:8} {per[name]:.3f} s a question, {sorted(speed[name])[1]:,.0f} tokens/s{note}")
    node, whole = over_http["computed_per_node"], over_http["prefill_per_node"]
    print(f"served   {node:.1f} tokens computed per scored node, {whole:.1f} in the paths: {whole / node:.1f}x fewer")
    print(f"         at depth 6 and more {over_http['fewer_deep']:.1f}x fewer (aim {AIM_PRM})")
    from stamp import processor, stamp

    plain = version("transformers"), "`generate` by level, the PRM over whole paths, a question at a time, 1 thread"
    record = {
        **stamp(__file__, processor(), {"transformers": plain}), "load": os.getloadavg()[0],
        "questions": args.questions, "width": args.width, "seconds_per_question": per, "ratio": ratio,
        "runs": runs, "served": over_http,
    }  # fmt: skip
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
