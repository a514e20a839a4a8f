"""A reward model behind PyTriton, the way NeMo-Aligner serves one.

    python pytriton_server.py MODEL PORT --batch 16 --delay 2000 [--empty] --stats FILE

Inputs `tokens` [B, T] padded with 0 on the right and `sequence_lengths` [B, 1], output `rewards` [B, 1]. Triton only
merges requests of one T, so clients pad to a fixed T and the server truncates the batch to its longest row. One forward
at a time. --empty answers zeros without a model, which measures the overhead of PyTriton itself. Runs in
.venv-pytriton. On SIGTERM it writes how many tokens it received and how many it computed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


class Scorer:
    """A padded forward of transformers, and counts of received and computed tokens."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        self.torch = torch
        self.model = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
        self.counts = {"tokens": 0, "computed": 0, "rows": 0, "forwards": 0}

    @batch
    def __call__(self, tokens: Any, sequence_lengths: Any) -> dict[str, Any]:
        lengths = sequence_lengths[:, 0]
        longest = int(lengths.max())
        ids = self.torch.from_numpy(tokens[:, :longest].copy())
        mask = self.torch.from_numpy((np.arange(longest)[None, :] < lengths[:, None]).astype(np.int64))
        with self.torch.inference_mode():
            rewards = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        self.counts["tokens"] += int(lengths.sum())
        self.counts["computed"] += ids.numel()
        self.counts["rows"] += len(lengths)
        self.counts["forwards"] += 1
        return {"rewards": rewards.numpy()}


@batch
def empty(tokens: Any, sequence_lengths: Any) -> dict[str, Any]:
    return {"rewards": np.zeros((len(tokens), 1), np.float32)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--delay", type=int, required=True, help="microseconds a request may wait to be batched")
    parser.add_argument("--empty", action="store_true")
    parser.add_argument("--stats", required=True)
    options = parser.parse_args()
    scorer = empty if options.empty else Scorer(options.model)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = TritonConfig(
        http_address="127.0.0.1", http_port=options.port, allow_http=True, allow_grpc=False, allow_metrics=False
    )
    try:
        with Triton(config=config) as triton:
            triton.bind(
                model_name="reward_model",
                infer_func=scorer,
                inputs=[
                    Tensor(name="tokens", shape=(-1,), dtype=np.int64),
                    Tensor(name="sequence_lengths", shape=(-1,), dtype=np.int64),
                ],
                outputs=[Tensor(name="rewards", shape=(1,), dtype=np.float32)],
                config=ModelConfig(
                    batching=True,
                    max_batch_size=options.batch,
                    batcher=DynamicBatcher(
                        max_queue_delay_microseconds=options.delay, preferred_batch_size=[options.batch]
                    ),
                ),
            )
            triton.serve()
    finally:
        if not options.empty:
            Path(options.stats).write_text(json.dumps(scorer.counts))


if __name__ == "__main__":
    main()
