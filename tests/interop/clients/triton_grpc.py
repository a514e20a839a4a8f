"""tritonclient.grpc and PyTriton's client over gRPC, as users call them. In: place (host:port), rows (token ids),
texts, schema (our names and numbers of fields). Out: the result of each call, and differing numbers."""

import json
import sys

import numpy as np
import tritonclient.grpc as triton
from pytriton.client import ModelClient
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

arguments = json.load(sys.stdin)
client, name, rows = triton.InferenceServerClient(arguments["place"]), "reward_model", arguments["rows"]
tokens = np.zeros((len(rows), max(map(len, rows)) + 5), dtype=np.int64)
for index, row in enumerate(rows):
    tokens[index, : len(row)] = row
lengths = np.array([[len(row)] for row in rows], dtype=np.int64)


def inputs(**arrays):
    tensors = []
    for key, values in arrays.items():
        tensors.append(triton.InferInput(key, list(values.shape), "BYTES" if values.dtype == object else "INT64"))
        tensors[-1].set_data_from_numpy(values)
    return tensors


def refusal(call):
    try:
        call()
    except InferenceServerException as error:
        return {"status": error.status(), "message": error.message()}
    raise AssertionError("it was not refused")


def with_nested(messages):
    """The messages and all messages nested in them."""
    return [each for message in messages for each in (message, *with_nested(message.nested_types))]


KNOWN = {
    message.name: {field.name: field.number for field in message.fields}
    for file in (service_pb2, model_config_pb2)
    for message in with_nested(file.DESCRIPTOR.message_types_by_name.values())
}


def differences(message, fields):
    numbers = KNOWN[message]
    return [f"{message}.{field}" for field, number in fields.items() if numbers.get(field) != number]


ours = inputs(tokens=tokens, sequence_lengths=lengths)
texts = np.array([[text.encode()] for text in arguments["texts"]], dtype=object)
requested = [triton.InferRequestedOutput(output) for output in ("rewards", "exceeded")]
named = client.infer(name, ours, request_id="mine", client_timeout=60)
values = named.as_numpy("rewards")
assert (values.dtype, values.shape) == (np.float32, (len(rows), 1))
config = client.get_model_config(name, as_json=True)["config"]
results = {
    "live": client.is_server_live(), "ready": client.is_server_ready(), "model_ready": client.is_model_ready(name),
    "unknown_ready": client.is_model_ready("nobody"), "server": client.get_server_metadata(as_json=True),
    "metadata": client.get_model_metadata(name, as_json=True), "config": config,
    "index": client.get_model_repository_index(as_json=True), "id": named.get_response().id,
    "infer": values.flatten().tolist(),
    "version": client.infer(name, ours, model_version="1").as_numpy("rewards").flatten().tolist(),
    "gzip": client.infer(name, ours, compression_algorithm="gzip").as_numpy("rewards").flatten().tolist(),
    "sentences": client.infer(name, inputs(sentences=texts), outputs=requested).as_numpy("rewards").flatten().tolist(),
    "unknown": refusal(lambda: client.infer("nobody", ours)),
    "missing": refusal(lambda: client.infer(name, ours[:1])),
    "statistics": client.get_inference_statistics(name, as_json=True),
    "differences": [each for message, fields in arguments["schema"].items() for each in differences(message, fields)],
}  # fmt: skip
with ModelClient(f"grpc://{arguments['place']}", name, init_timeout_s=60, inference_timeout_s=60) as pytriton:
    results["pytriton"] = pytriton.infer_batch(tokens=tokens, sequence_lengths=lengths)["rewards"].flatten().tolist()
client.close()
print(json.dumps(results))
