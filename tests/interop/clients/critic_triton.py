"""tritonclient.http as a PPO actor would use it. In: url, rows, prompts, returns. Out: the result of each call."""

import json
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

arguments = json.load(sys.stdin)
rows, prompts = arguments["rows"], arguments["prompts"]
client = triton.InferenceServerClient(arguments["url"].removeprefix("http://"), network_timeout=120)
width = 64


def call(model, **options):
    tensors, outputs = options.pop("tensors"), options.pop("outputs", None)
    inputs = []
    for name, values in tensors.items():
        kind = "INT64" if values.dtype == np.int64 else "FP32"
        inputs.append(triton.InferInput(name, list(values.shape), kind))
        inputs[-1].set_data_from_numpy(values)
    requested = None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs]
    return client.infer(model, inputs, outputs=requested, **options)


tokens = np.zeros((len(rows), width), dtype=np.int64)
mask = np.zeros((len(rows), width - 1), dtype=np.float32)
for index, row in enumerate(rows):
    tokens[index, : len(row)] = row
    mask[index, prompts[index] - 1 : len(row) - 1] = 1
lengths = np.array([[len(row)] for row in rows], dtype=np.int64)
rollout = {"tokens": tokens, "sequence_lengths": lengths}

results = {"ready": [client.is_model_ready(name) for name in ("critic_infer", "critic_train", "critic_save")]}
results["config"] = {n: client.get_model_config(n) for n in ("critic_infer", "critic_train", "critic_save")}
first = call("critic_infer", tensors=rollout)
values, rewards = first.as_numpy("values"), first.as_numpy("rewards")
results["shapes"] = [list(values.shape), list(rewards.shape)]
results["rewards"] = rewards.flatten().tolist()
batch = {
    "tokens": tokens, "returns": mask * np.array(arguments["returns"], dtype=np.float32)[:, None],
    "prev_values": values[:, :-1], "mask": mask,
}  # fmt: skip
results["losses"] = []
for _ in range(10):
    reply = call("critic_train", tensors=batch, outputs=["loss_mean"])
    loss = reply.as_numpy("loss_mean")
    assert loss.shape == (1,)
    assert loss.dtype == np.float32
    results["losses"].append(float(loss[0]))
reply = call("critic_train", tensors=batch, parameters={"update_id": "mine", "updates": 10})
again = call("critic_train", tensors=batch, parameters={"update_id": "mine", "updates": 10})
results["once"] = [float(r.as_numpy("loss_mean")[0]) for r in (reply, again)]
status = call("critic_save", tensors={"dummy_var": np.zeros(1, dtype=np.int64)}).as_numpy("status")
results["status"] = [status.tolist(), str(status.dtype)]
results["values"] = call("critic_infer", tensors=rollout).as_numpy("values").tolist()
try:
    call("critic_train", tensors={**batch, "returns": batch["returns"] * np.float32("nan")})
except InferenceServerException as error:
    results["refused"] = [error.status(), error.message()]
client.close()
print(json.dumps(results))
