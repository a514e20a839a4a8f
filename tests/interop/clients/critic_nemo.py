"""NeMo-Aligner's critic client, which is pytriton's: infer_batch for rollouts, infer_sample for training and saving."""

import json
import sys

import numpy as np
from pytriton.client import FuturesModelClient

arguments = json.load(sys.stdin)
rows, prompts, pad_to_length = arguments["rows"], arguments["prompts"], 96


def connect(name):
    return FuturesModelClient(arguments["url"], name, init_timeout_s=6000, inference_timeout_s=600000)


tokens = np.zeros((len(rows), pad_to_length), dtype=np.int64)
mask = np.zeros((len(rows), pad_to_length - 1), dtype=np.float32)
for index, row in enumerate(rows):
    tokens[index, : len(row)] = row
    mask[index, prompts[index] - 1 : len(row) - 1] = 1
lengths = np.array([[len(row)] for row in rows], dtype=np.int64)
results = {}
with connect("critic_infer") as infer, connect("critic_train") as train, connect("critic_save") as save:
    # A micro-batch of rollouts in each request, collected at the end.
    futures = [
        infer.infer_batch(tokens=tokens[index : index + 4], sequence_lengths=lengths[index : index + 4])
        for index in range(0, len(rows), 4)
    ]
    replies = [future.result() for future in futures]
    values = np.concatenate([reply["values"] for reply in replies])[:, :-1]
    results["rewards"] = np.concatenate([reply["rewards"] for reply in replies]).flatten().tolist()
    batch = {
        "tokens": tokens, "returns": mask * np.array(arguments["returns"], dtype=np.float32)[:, None],
        "prev_values": values, "mask": mask,
    }  # fmt: skip
    losses = [train.infer_sample(**batch).result()["loss_mean"] for _ in range(10)]
    results["shape"] = list(losses[0].shape)
    results["losses"] = [loss.item() for loss in losses]
    status = save.infer_sample(dummy_var=np.array([0])).result()["status"]
    results["status"] = status.tolist()
print(json.dumps(results))
