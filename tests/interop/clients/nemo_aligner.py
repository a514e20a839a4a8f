"""NeMo-Aligner's clients, which are pytriton's. In: url, rows, texts. Out: the rewards for training."""

import json
import sys
import threading
import time

import numpy as np
from pytriton.client import FuturesModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError

arguments = json.load(sys.stdin)
url, name, rows, texts = arguments["url"], "reward_model", arguments["rows"], arguments["texts"]
pad_to_length = 128


def rollout(rows):
    """The request of RemoteGPTRMClient: tokens right-padded to a fixed length, lengths in a column."""
    tokens = np.zeros((len(rows), pad_to_length), dtype=np.int64)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = row
    return {"tokens": tokens, "sequence_lengths": np.array([[len(row)] for row in rows], dtype=np.int64)}


results = {}

with ModelClient(url, name, init_timeout_s=60, inference_timeout_s=60) as client:
    results["inputs"] = [spec.name for spec in client.model_config.inputs]
    results["outputs"] = [spec.name for spec in client.model_config.outputs]
    results["max_batch_size"] = client.model_config.max_batch_size
    reply = client.infer_batch(**rollout(rows))
    results["batch"] = reply["rewards"].flatten().tolist()
    results["shape"], results["dtype"] = list(reply["rewards"].shape), str(reply["rewards"].dtype)
    one = rollout(rows[:1])
    results["sample"] = client.infer_sample(**{key: value[0] for key, value in one.items()})["rewards"].tolist()
    try:
        client.infer_batch(**rollout([[5, 999, 2]]))
    except PyTritonClientInferenceServerError as error:
        results["refused"] = str(error)

# HTTPCommunicator's client: a micro-batch of rollouts in each request, futures collected at the end.
with FuturesModelClient(url, name, init_timeout_s=6000, inference_timeout_s=600000) as client:
    batches = [rows[at : at + 4] for at in range(0, len(rows), 4)]
    futures = [client.infer_batch(**rollout(batch)) for batch in batches]
    results["rollout"] = [value for future in futures for value in future.result()["rewards"].squeeze(1).tolist()]

# attribute_annotate.py: one sentence in each request, all requests concurrent.
with FuturesModelClient(url, name, max_workers=128, init_timeout_s=6000, inference_timeout_s=600000) as client:
    start = time.perf_counter()
    futures = [client.infer_batch(sentences=np.array([[text.encode()]], dtype=np.bytes_)) for text in texts * 8]
    replies = [future.result() for future in futures]
    results["seconds"] = time.perf_counter() - start
    results["threads"] = sum(1 for thread in threading.enumerate() if thread is not threading.main_thread())
    results["sentences"] = [reply["rewards"].flatten().tolist()[0] for reply in replies]
    results["exceeded"] = [reply["exceeded"].flatten().tolist()[0] for reply in replies]

print(json.dumps(results))
