"""Encoders: ragged pairs scored by Plaudit, compared with padded batches in plain transformers, padded as TEI does.

    python benchmarks/encoders.py [--threads 2]      # writes benchmarks/results/encoders.json

A random BERT cross-encoder (4 layers × 256, float32) scores 192 pairs whose lengths are distributed like those of
passages (log-normal, 56 to 508 tokens). The rival batches pairs in order of arrival, as many as fit into the same token
budget after padding to the longest, as Text Embeddings Inference does on devices without flash attention. Both sides
receive token ids (on ours, `EncoderReward`'s batches, without HTTP). They alternate, and the best of three counts.
Target: 1.5 times the rival.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.stamp import processor, stamp
from plaudit.models import load_any
from plaudit.models.text_classifier import BUDGET, TextClassifier, next_batch, padded
from tests.models.encoders import pair_tokenizer

PAIRS, QUERY, REPEATS = 192, "which of these passages answers the question?", 3
RESULT = Path(__file__).parent / "results" / "encoders.json"


def made(directory: Path) -> Path:
    tokenizer = pair_tokenizer("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=512, num_labels=1, pad_token_id=1,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def passages() -> list[str]:
    draw = random.Random(1)
    sizes = [min(460, max(8, int(draw.lognormvariate(4.6, 0.8)))) for _ in range(PAIRS)]
    return ["".join(draw.choices("abcdefgh ", k=size)) for size in sizes]


def ours(model: TextClassifier, rows: list[list[int]], types: list[bytes]) -> np.ndarray:
    left = {place: len(row) for place, row in enumerate(rows)}
    scores = np.empty(len(rows), dtype=np.float32)
    while left:
        batch = next_batch(left, model.budget)
        scores[batch] = model.logits([rows[i] for i in batch], [types[i] for i in batch])[:, 0]
        for place in batch:
            del left[place]
    return scores


@torch.inference_mode()
def in_order(model: TextClassifier, rows: list[list[int]], types: list[bytes]) -> np.ndarray:
    """Batches in order of arrival, padded to their longest row, within the same token budget."""
    scores: list[float] = []
    start = 0
    while start < len(rows):
        end, longest = start, 0
        while end < len(rows) and max(longest, len(rows[end])) * (end - start + 1) <= BUDGET:
            longest = max(longest, len(rows[end]))
            end += 1
        ids, mask = padded(rows[start:end], 1)
        kinds, _ = padded(types[start:end], 0)
        scores += model.module(input_ids=ids, attention_mask=mask, token_type_ids=kinds).logits[:, 0].tolist()
        start = end
    return np.array(scores, dtype=np.float32)


def timed(runs: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Fewest seconds and fewest CPU seconds of each side. They alternate, so that other load on the machine affects
    both."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            began, cpu = time.perf_counter(), time.process_time()
            run()
            times[name].append((time.perf_counter() - began, time.process_time() - cpu))
    return {name: (min(wall for wall, _ in each), min(cpu for _, cpu in each)) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    texts = passages()
    with tempfile.TemporaryDirectory() as place:
        directory = made(Path(place))
        tokenizer = AutoTokenizer.from_pretrained(directory)
        encoded = [tokenizer(QUERY, text, truncation=True, max_length=512) for text in texts]
        rows = [each["input_ids"] for each in encoded]
        types = [bytes(each["token_type_ids"]) for each in encoded]
        model = TextClassifier(load_any(directory))
        difference = float(np.abs(ours(model, rows, types) - in_order(model, rows, types)).max())
        figures = timed(
            {"transformers": lambda: in_order(model, rows, types), "plaudit": lambda: ours(model, rows, types)}
        )
    tokens = sum(map(len, rows))
    result = {
        "threads": threads, "pairs": PAIRS, "tokens": tokens, "budget": BUDGET, "difference": difference,
        "seconds": {name: {"wall": wall, "cpu": cpu} for name, (wall, cpu) in figures.items()},
    }  # fmt: skip
    how = f"batches in order, padded to the longest, at most {BUDGET} tokens each; {threads} thread(s)"
    record = {**stamp(__file__, processor(), {"transformers": (version("transformers"), how)}), **result}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
