"""NeMo-Aligner's clients, which are pytriton's. In: url, rows, texts. Out: what they would have trained on."""

import json
import sys
import threading
import time

import numpy as np
from pytriton.client import FuturesModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError

given = json.load(sys.stdin)
url, name, rows, texts = given["url"], "reward_model", given["rows"], given["texts"]
pad_to_length = 128


def rollout(rows):
    """What RemoteGPTRMClient sends: right-padded to a fixed length, lengths in a column."""
    tokens = np.zeros((len(rows), pad_to_length), dtype=np.int64)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = row
    return {"tokens": tokens, "sequence_lengths": np.array([[len(row)] for row in rows], dtype=np.int64)}


found = {}

with ModelClient(url, name, init_timeout_s=60, inference_timeout_s=60) as client:
    found["inputs"] = [spec.name for spec in client.model_config.inputs]
    found["outputs"] = [spec.name for spec in client.model_config.outputs]
    found["max_batch_size"] = client.model_config.max_batch_size
    reply = client.infer_batch(**rollout(rows))
    found["batch"] = reply["rewards"].flatten().tolist()
    found["shape"], found["dtype"] = list(reply["rewards"].shape), str(reply["rewards"].dtype)
    one = rollout(rows[:1])
    found["sample"] = client.infer_sample(**{key: value[0] for key, value in one.items()})["rewards"].tolist()
    try:
        client.infer_batch(**rollout([[5, 999, 2]]))
    except PyTritonClientInferenceServerError as error:
        found["refused"] = str(error)

# HTTPCommunicator's client, with a micro-batch of rollouts in each request: futures are collected at the end.
with FuturesModelClient(url, name, init_timeout_s=6000, inference_timeout_s=600000) as client:
    batches = [rows[at : at + 4] for at in range(0, len(rows), 4)]
    futures = [client.infer_batch(**rollout(batch)) for batch in batches]
    found["rollout"] = [value for future in futures for value in future.result()["rewards"].squeeze(1).tolist()]

# attribute_annotate.py: a sentence in each request, all under way at once.
with FuturesModelClient(url, name, max_workers=128, init_timeout_s=6000, inference_timeout_s=600000) as client:
    began = time.perf_counter()
    futures = [client.infer_batch(sentences=np.array([[text.encode()]], dtype=np.bytes_)) for text in texts * 8]
    replies = [future.result() for future in futures]
    found["seconds"] = time.perf_counter() - began
    found["threads"] = sum(1 for thread in threading.enumerate() if thread is not threading.main_thread())
    found["sentences"] = [reply["rewards"].flatten().tolist()[0] for reply in replies]
    found["exceeded"] = [reply["exceeded"].flatten().tolist()[0] for reply in replies]

print(json.dumps(found))
