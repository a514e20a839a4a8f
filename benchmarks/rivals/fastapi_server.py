"""A reward model behind FastAPI as usually written by hand: one request, one padded forward, on the event loop.

    python fastapi_server.py MODEL PORT --stats FILE [--device cuda] [--dtype bfloat16]

POST /score {"sequences": [[ids], ...]} answers {"scores": [..]}. Runs in .venv-vllm, which includes FastAPI, uvloop and
httptools. On exit it writes how many tokens it received and how many it computed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModelForSequenceClassification


class Question(BaseModel):
    sequences: list[list[int]]


class Answer(BaseModel):
    scores: list[float]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--stats", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    model = AutoModelForSequenceClassification.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    model = model.to(options.device).eval()
    counts = {"tokens": 0, "computed": 0, "rows": 0, "forwards": 0}
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ready"}

    # async with the forward inside, as in OpenRLHF's reward server
    @app.post("/score")
    async def score(question: Question) -> Answer:
        longest = max(map(len, question.sequences))
        ids = torch.tensor([s + [0] * (longest - len(s)) for s in question.sequences], device=options.device)
        mask = torch.tensor(
            [[1] * len(s) + [0] * (longest - len(s)) for s in question.sequences], device=options.device
        )
        with torch.inference_mode():
            scores = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].tolist()
        counts["tokens"] += sum(map(len, question.sequences))
        counts["computed"] += ids.numel()
        counts["rows"] += len(scores)
        counts["forwards"] += 1
        return Answer(scores=scores)

    # at application shutdown, not after run(): uvicorn re-raises the signal once it has stopped
    app.router.on_shutdown.append(lambda: Path(options.stats).write_text(json.dumps(counts)))
    uvicorn.run(app, host="127.0.0.1", port=options.port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
