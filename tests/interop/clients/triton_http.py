"""tritonclient.http, as users call it. In: url, rows (token ids), texts. Out: the result of each call."""

import json
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

arguments = json.load(sys.stdin)
client = triton.InferenceServerClient(arguments["url"].removeprefix("http://"), concurrency=8)
name = "reward_model"
columns = max(map(len, arguments["rows"])) + 5


def token_inputs(rows, binary):
    tokens = np.zeros((len(rows), columns), dtype=np.int64)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = row
    inputs = []
    for key, values in (("tokens", tokens), ("sequence_lengths", np.array([[len(r)] for r in rows], dtype=np.int64))):
        inputs.append(triton.InferInput(key, list(values.shape), "INT64"))
        inputs[-1].set_data_from_numpy(values, binary_data=binary)
    return inputs


def sentence_inputs(texts, binary):
    values = np.array([[text.encode()] for text in texts], dtype=object)
    inputs = [triton.InferInput("sentences", list(values.shape), "BYTES")]
    inputs[0].set_data_from_numpy(values, binary_data=binary)
    return inputs


def rewards(result):
    values = result.as_numpy("rewards")
    assert values.dtype == np.float32
    assert values.shape[1:] == (1,)
    return values.flatten().tolist()


def outputs(binary):
    return [triton.InferRequestedOutput(n, binary_data=binary) for n in ("rewards", "exceeded")]


def refusal(call):
    try:
        call()
    except InferenceServerException as error:
        return {"status": error.status(), "message": error.message()}
    raise AssertionError("it was not refused")


results = {
    "live": client.is_server_live(), "ready": client.is_server_ready(),
    "model_ready": client.is_model_ready(name), "version_ready": client.is_model_ready(name, "1"),
    "unknown_ready": client.is_model_ready("nobody"),
    "server": client.get_server_metadata(), "metadata": client.get_model_metadata(name),
    "config": client.get_model_config(name), "index": client.get_model_repository_index(),
}  # fmt: skip
rows = arguments["rows"]
results["infer"] = {}
for binary in (True, False):
    results["infer"][f"binary={binary}"] = rewards(
        client.infer(name, token_inputs(rows, binary), outputs=outputs(binary))
    )
results["infer"]["version"] = rewards(client.infer(name, token_inputs(rows, True), model_version="1"))
many = rows * 20  # replies are compressed only if they are large enough
for coding in ("gzip", "deflate"):
    packed = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    results["infer"][coding] = rewards(client.infer(name, token_inputs(many, True), **packed))[: len(rows)]
named = client.infer(name, token_inputs(rows, True), request_id="mine", priority=1, timeout=60_000_000)
results["id"] = named.get_response()["id"]
pending = [client.async_infer(name, token_inputs([row], True)) for row in rows]
results["infer"]["async"] = [rewards(request.get_result())[0] for request in pending]
results["sentences"] = {}
for binary in (True, False):
    result = client.infer(name, sentence_inputs(arguments["texts"], binary), outputs=outputs(True))
    results["sentences"][f"binary={binary}"] = rewards(result)
    results["exceeded"] = result.as_numpy("exceeded").tolist()
long = client.infer(name, sentence_inputs(["1+" * 300], True), outputs=outputs(True))
results["long"] = long.as_numpy("exceeded").tolist()
results["refused"] = {
    "unknown": refusal(lambda: client.infer("nobody", token_inputs(rows, True))),
    "missing": refusal(lambda: client.infer(name, token_inputs(rows, True)[:1])),
    "vocabulary": refusal(lambda: client.infer(name, token_inputs([[5, 999, 2]], True))),
    "output": refusal(
        lambda: client.infer(name, token_inputs(rows, True), outputs=[triton.InferRequestedOutput("values")])
    ),
}
results["statistics"] = client.get_inference_statistics(name)
client.close()
print(json.dumps(results))
