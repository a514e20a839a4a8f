"""Log-probs of a real model by the engine in half precision, beside transformers' own, against float32.

    python benchmarks/real_logprobs.py MODEL [--device cuda] [--tokens 4096] [--chunk 512]

MODEL is a directory of a causal LM. The text is this project's README and architecture page in the model's own tokens,
in chunks. The reference is transformers' eager attention with everything in float32. Prints, for bfloat16 and float16,
the root mean square, the 99.9th percentile and the maximum of the difference for transformers' sdpa and eager
attention and for the engine, which has checked the loaded weights before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plaudit import Engine
from plaudit.errors import ModelError
from plaudit.models import load_policy

ROOT = Path(__file__).resolve().parent.parent
TEXT = ("README.md", "docs/architecture.md")


def plain(path: str, dtype: str, attention: str, device: str, chunks: Sequence[Sequence[int]]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).to(device).eval()
    rows = []
    with torch.no_grad():
        for ids in chunks:
            logits = model(torch.tensor([ids], device=device)).logits[0, :-1].float()
            following = torch.tensor(ids[1:], device=device)[:, None]
            rows.append(torch.log_softmax(logits, -1).gather(1, following)[:, 0].double().cpu().numpy())
    return np.concatenate(rows)


def distance(values: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    off = np.abs(values.astype(np.float64) - reference)
    return {"rms": float(np.sqrt((off**2).mean())), "p99.9": float(np.quantile(off, 0.999)), "max": float(off.max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in TEXT)
    ids = AutoTokenizer.from_pretrained(options.model).encode(text)[: options.tokens]
    chunks = [ids[at : at + options.chunk] for at in range(0, len(ids), options.chunk)]
    chunks = [chunk for chunk in chunks if len(chunk) > 1]
    reference = plain(options.model, "float32", "eager", options.device, chunks)
    rows: dict[str, object] = {"model": options.model, "tokens": len(reference), "device": options.device}
    for dtype in ("bfloat16", "float16"):
        for attention in ("sdpa", "eager"):
            values = plain(options.model, dtype, attention, options.device, chunks)
            rows[f"{dtype}, transformers {attention}"] = distance(values, reference)
        began = time.monotonic()
        try:
            loaded = load_policy(options.model, dtype, options.device)
            engine = Engine(loaded.module, loaded.tokenizer)
        except ModelError as error:
            rows[f"{dtype}, engine"] = str(error)
            continue
        seconds = round(time.monotonic() - began, 1)
        values = np.concatenate(engine.logprobs(chunks))
        rows[f"{dtype}, engine"] = {**distance(values, reference), "seconds to load and check": seconds}
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
