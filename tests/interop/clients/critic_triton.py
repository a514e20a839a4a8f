"""tritonclient.http as a PPO actor would use it. In: url, rows, prompts, returns. Out: what each call gave."""

import json
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

given = json.load(sys.stdin)
rows, prompts = given["rows"], given["prompts"]
client = triton.InferenceServerClient(given["url"].removeprefix("http://"), network_timeout=120)
width = 64


def call(model, **options):
    tensors, outputs = options.pop("tensors"), options.pop("outputs", None)
    inputs = []
    for name, values in tensors.items():
        kind = "INT64" if values.dtype == np.int64 else "FP32"
        inputs.append(triton.InferInput(name, list(values.shape), kind))
        inputs[-1].set_data_from_numpy(values)
    wanted = None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs]
    return client.infer(model, inputs, outputs=wanted, **options)


tokens = np.zeros((len(rows), width), dtype=np.int64)
mask = np.zeros((len(rows), width - 1), dtype=np.float32)
for at, row in enumerate(rows):
    tokens[at, : len(row)] = row
    mask[at, prompts[at] - 1 : len(row) - 1] = 1
lengths = np.array([[len(row)] for row in rows], dtype=np.int64)
rollout = {"tokens": tokens, "sequence_lengths": lengths}

found = {"ready": [client.is_model_ready(name) for name in ("critic_infer", "critic_train", "critic_save")]}
found["config"] = {n: client.get_model_config(n) for n in ("critic_infer", "critic_train", "critic_save")}
first = call("critic_infer", tensors=rollout)
values, rewards = first.as_numpy("values"), first.as_numpy("rewards")
found["shapes"] = [list(values.shape), list(rewards.shape)]
found["rewards"] = rewards.flatten().tolist()
batch = {
    "tokens": tokens, "returns": mask * np.array(given["returns"], dtype=np.float32)[:, None],
    "prev_values": values[:, :-1], "mask": mask,
}  # fmt: skip
found["losses"] = []
for _ in range(10):
    reply = call("critic_train", tensors=batch, outputs=["loss_mean"])
    loss = reply.as_numpy("loss_mean")
    assert loss.shape == (1,)
    assert loss.dtype == np.float32
    found["losses"].append(float(loss[0]))
reply = call("critic_train", tensors=batch, parameters={"update_id": "mine", "updates": 10})
again = call("critic_train", tensors=batch, parameters={"update_id": "mine", "updates": 10})
found["once"] = [float(r.as_numpy("loss_mean")[0]) for r in (reply, again)]
status = call("critic_save", tensors={"dummy_var": np.zeros(1, dtype=np.int64)}).as_numpy("status")
found["status"] = [status.tolist(), str(status.dtype)]
found["values"] = call("critic_infer", tensors=rollout).as_numpy("values").tolist()
try:
    call("critic_train", tensors={**batch, "returns": batch["returns"] * np.float32("nan")})
except InferenceServerException as error:
    found["refused"] = [error.status(), error.message()]
client.close()
print(json.dumps(found))
