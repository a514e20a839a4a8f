"""NeMo-Aligner's critic client, which is pytriton's: infer_batch for rollouts, infer_sample to train and to save."""

import json
import sys

import numpy as np
from pytriton.client import FuturesModelClient

given = json.load(sys.stdin)
rows, prompts, pad_to_length = given["rows"], given["prompts"], 96


def connected(name):
    return FuturesModelClient(given["url"], name, init_timeout_s=6000, inference_timeout_s=600000)


tokens = np.zeros((len(rows), pad_to_length), dtype=np.int64)
mask = np.zeros((len(rows), pad_to_length - 1), dtype=np.float32)
for at, row in enumerate(rows):
    tokens[at, : len(row)] = row
    mask[at, prompts[at] - 1 : len(row) - 1] = 1
lengths = np.array([[len(row)] for row in rows], dtype=np.int64)
found = {}
with connected("critic_infer") as infer, connected("critic_train") as train, connected("critic_save") as save:
    # A micro-batch of rollouts in each request, collected at the end.
    futures = [
        infer.infer_batch(tokens=tokens[at : at + 4], sequence_lengths=lengths[at : at + 4])
        for at in range(0, len(rows), 4)
    ]
    replies = [future.result() for future in futures]
    values = np.concatenate([reply["values"] for reply in replies])[:, :-1]
    found["rewards"] = np.concatenate([reply["rewards"] for reply in replies]).flatten().tolist()
    batch = {
        "tokens": tokens, "returns": mask * np.array(given["returns"], dtype=np.float32)[:, None],
        "prev_values": values, "mask": mask,
    }  # fmt: skip
    losses = [train.infer_sample(**batch).result()["loss_mean"] for _ in range(10)]
    found["shape"] = list(losses[0].shape)
    found["losses"] = [loss.item() for loss in losses]
    status = save.infer_sample(dummy_var=np.array([0])).result()["status"]
    found["status"] = status.tolist()
print(json.dumps(found))
