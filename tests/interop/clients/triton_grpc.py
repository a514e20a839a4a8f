"""tritonclient.grpc and PyTriton's client over gRPC, as their users use them. In: place (host:port), rows (token ids),
texts, schema (our names and numbers of fields). Out: what each call gave, and where the numbers differ from theirs."""

import json
import sys

import numpy as np
import tritonclient.grpc as triton
from pytriton.client import ModelClient
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

given = json.load(sys.stdin)
client, name, rows = triton.InferenceServerClient(given["place"]), "reward_model", given["rows"]
tokens = np.zeros((len(rows), max(map(len, rows)) + 5), dtype=np.int64)
for at, row in enumerate(rows):
    tokens[at, : len(row)] = row
lengths = np.array([[len(row)] for row in rows], dtype=np.int64)


def inputs(**arrays):
    made = []
    for key, values in arrays.items():
        made.append(triton.InferInput(key, list(values.shape), "BYTES" if values.dtype == object else "INT64"))
        made[-1].set_data_from_numpy(values)
    return made


def refusal(call):
    try:
        call()
    except InferenceServerException as error:
        return {"status": error.status(), "message": error.message()}
    raise AssertionError("it was not refused")


def every(messages):
    """They and those inside them."""
    return [each for message in messages for each in (message, *every(message.nested_types))]


KNOWN = {
    message.name: {field.name: field.number for field in message.fields}
    for file in (service_pb2, model_config_pb2)
    for message in every(file.DESCRIPTOR.message_types_by_name.values())
}


def differences(message, fields):
    numbers = KNOWN[message]
    return [f"{message}.{field}" for field, number in fields.items() if numbers.get(field) != number]


ours = inputs(tokens=tokens, sequence_lengths=lengths)
texts = np.array([[text.encode()] for text in given["texts"]], dtype=object)
wanted = [triton.InferRequestedOutput(output) for output in ("rewards", "exceeded")]
named = client.infer(name, ours, request_id="mine", client_timeout=60)
values = named.as_numpy("rewards")
assert (values.dtype, values.shape) == (np.float32, (len(rows), 1))
config = client.get_model_config(name, as_json=True)["config"]
found = {
    "live": client.is_server_live(), "ready": client.is_server_ready(), "model_ready": client.is_model_ready(name),
    "unknown_ready": client.is_model_ready("nobody"), "server": client.get_server_metadata(as_json=True),
    "metadata": client.get_model_metadata(name, as_json=True), "config": config,
    "index": client.get_model_repository_index(as_json=True), "id": named.get_response().id,
    "infer": values.flatten().tolist(),
    "version": client.infer(name, ours, model_version="1").as_numpy("rewards").flatten().tolist(),
    "gzip": client.infer(name, ours, compression_algorithm="gzip").as_numpy("rewards").flatten().tolist(),
    "sentences": client.infer(name, inputs(sentences=texts), outputs=wanted).as_numpy("rewards").flatten().tolist(),
    "unknown": refusal(lambda: client.infer("nobody", ours)),
    "missing": refusal(lambda: client.infer(name, ours[:1])),
    "statistics": client.get_inference_statistics(name, as_json=True),
    "differences": [each for message, fields in given["schema"].items() for each in differences(message, fields)],
}  # fmt: skip
with ModelClient(f"grpc://{given['place']}", name, init_timeout_s=60, inference_timeout_s=60) as pytriton:
    found["pytriton"] = pytriton.infer_batch(tokens=tokens, sequence_lengths=lengths)["rewards"].flatten().tolist()
client.close()
print(json.dumps(found))
