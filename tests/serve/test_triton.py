"""Triton's protocol: what a NeMo-Aligner client sends and reads, and invalid tensors, against a real server. Its real
clients are tested in tests/interop."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from plaudit.serve.http.message import HttpError
from plaudit.serve.protocols.triton import wire as triton
from tests.reward import tiny
from tests.serve.hostile import Target, clean_message
from tests.serve.process import ServerProcess
from tests.serve.test_native import chains

KINDS = {"i8": "INT64", "i4": "INT32", "u2": "UINT16", "f4": "FP32", "b1": "BOOL"}
INFER = "/v2/models/reward_model/infer"
LIMIT = 256  # maximum tokens of the embedded model
END = 2
SERVED = {"sums", "moods", "annotator", "reward_model", "process_model"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    moods = tiny.model("outcome", tiny.llama3(), labels=("angry", "calm", "glad"))
    path = tiny.write(tmp_path_factory.mktemp("moods"), moods, tiny.llama3())
    models = {
        "sums": {"path": "sums"},
        "process_model": {"path": "sums-steps"},  # an alias unless a model has this name
        "moods": {"path": path, "weights": {"calm": 0.25, "glad": 1.0}},
    }
    with ServerProcess({"models": models, "aliases": {"annotator": "moods/attributes"}}) as server:
        yield server


@pytest.fixture(scope="module")
def target(server: ServerProcess) -> Target:
    return Target(server)


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    """Token ids of 12 right and wrong answers, each with its end token."""
    from plaudit.models import load_tokenizer

    tokenizer = load_tokenizer("sums")
    return [[*tokenizer.encode(p + r), END] for p, r in chains(12)]


@pytest.fixture(scope="module")
def expected(server: ServerProcess, rows: list[list[int]]) -> list[float]:
    """The scores of the native protocol."""
    return [item["scores"][0] for item in server.rewards([{"tokens": row} for row in rows]).json()["items"]]


def padded(rows: Sequence[Sequence[int]], columns: int = 64) -> dict[str, np.ndarray]:
    """The tensors that NeMo-Aligner sends: rows padded with zeros on the right, and their lengths."""
    tokens = np.zeros((len(rows), columns), dtype="<i8")
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return {"tokens": tokens, "sequence_lengths": np.array([[len(row)] for row in rows], dtype="<i8").reshape(-1, 1)}


def as_json(tensors: Mapping[str, np.ndarray], *, flat: bool = False) -> dict[str, Any]:
    inputs = []
    for name, values in tensors.items():
        kind = "BYTES" if values.dtype == object else KINDS[values.dtype.str[1:]]
        data = (values.flatten() if flat else values).tolist()
        inputs.append({"name": name, "shape": list(values.shape), "datatype": kind, "data": data})
    return {"id": "7", "inputs": inputs}


def as_binary(tensors: Mapping[str, np.ndarray], **more: Any) -> tuple[bytes, dict[str, str]]:
    inputs, tail = [], b""
    for name, values in tensors.items():
        if values.dtype == object:
            kind, data = "BYTES", b"".join(struct.pack("<I", len(v)) + v for v in map(str.encode, values.flatten()))
        else:
            kind, data = KINDS[values.dtype.str[1:]], values.tobytes()
        size = {"binary_data_size": len(data)}
        inputs.append({"name": name, "shape": list(values.shape), "datatype": kind, "parameters": size})
        tail += data
    head = json.dumps({"id": "7", "inputs": inputs, "parameters": {"binary_data_output": True}, **more}).encode()
    return head + tail, {"inference-header-content-length": str(len(head))}


def sentences(*texts: str) -> dict[str, np.ndarray]:
    return {"sentences": np.array([[text] for text in texts], dtype=object).reshape(-1, 1)}


def outputs_of(reply: httpx.Response) -> dict[str, np.ndarray]:
    assert reply.status_code == 200, reply.text
    length = reply.headers.get("inference-header-content-length")
    assert reply.headers["content-type"] == ("application/json" if length is None else "application/octet-stream")
    head = json.loads(reply.content if length is None else reply.content[: int(length)])
    rest = b"" if length is None else reply.content[int(length) :]
    assert (head["id"], head["model_version"]) == ("7", "1")
    outputs = {}
    for output in head["outputs"]:
        kind = {"FP32": "<f4", "INT32": "<i4"}[output["datatype"]]
        if "data" in output:
            values = np.array(output["data"], dtype=kind)
        else:
            size = output["parameters"]["binary_data_size"]
            values, rest = np.frombuffer(rest[:size], dtype=kind), rest[size:]
        outputs[output["name"]] = values.reshape(output["shape"])
    assert rest == b""
    return outputs


def refused(reply: httpx.Response, *parts: str, status: int = 400) -> str:
    """Check that the reply is an error in Triton's format; return its message."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    content = reply.json()
    assert set(content) == {"error"}
    message: str = content["error"]
    clean_message(message)
    for part in parts:
        assert part in message
    return message


# Valid requests


@pytest.mark.parametrize("flat", [True, False])
def test_json_tensors_have_the_native_scores(
    server: ServerProcess, rows: list[list[int]], expected: list[float], flat: bool
) -> None:
    outputs = outputs_of(server.http.post(INFER, json=as_json(padded(rows), flat=flat)))
    assert outputs["rewards"].shape == (12, 1)
    assert np.allclose(outputs["rewards"].flatten(), expected, atol=5e-5)
    assert outputs["exceeded"].tolist() == [[0]] * 12


@pytest.mark.parametrize("kind", ["<i8", "<i4", "<u2"])
def test_binary_tensors_of_any_integers_have_the_native_scores(
    server: ServerProcess, rows: list[list[int]], expected: list[float], kind: str
) -> None:
    tensors = {name: values.astype(kind) for name, values in padded(rows).items()}
    body, headers = as_binary(tensors, outputs=[{"name": "rewards", "parameters": {"binary_data": True}}])
    reply = server.http.post(INFER, content=body, headers=headers)
    outputs = outputs_of(reply)
    assert set(outputs) == {"rewards"}
    assert np.allclose(outputs["rewards"].flatten(), expected, atol=5e-5)


def test_binary_and_json_tensors_may_be_mixed(
    server: ServerProcess, rows: list[list[int]], expected: list[float]
) -> None:
    tensors = padded(rows)
    lengths = as_json(tensors)["inputs"][1]
    data = tensors["tokens"].tobytes()
    tokens = {"name": "tokens", "shape": [12, 64], "datatype": "INT64", "parameters": {"binary_data_size": len(data)}}
    requested = [{"name": "exceeded", "parameters": {"binary_data": False}}, {"name": "rewards"}]
    request = {"id": "7", "inputs": [lengths, tokens], "outputs": requested, "parameters": {"binary_data_output": True}}
    head = json.dumps(request).encode()
    headers = {"inference-header-content-length": str(len(head))}
    outputs = outputs_of(server.http.post(INFER, content=head + data, headers=headers))
    assert list(outputs) == ["exceeded", "rewards"]
    assert np.allclose(outputs["rewards"].flatten(), expected, atol=5e-5)


def test_both_names_and_the_version_select_the_model(server: ServerProcess, rows: list[list[int]]) -> None:
    body = as_json(padded(rows[:1]))
    for name in ("reward_model", "sums"):
        for version in ("", "/versions/1"):
            reply = server.http.post(f"/v2/models/{name}{version}/infer", json=body)
            assert reply.json()["model_name"] == name
    process = server.http.post("/v2/models/process_model/infer", json=body)
    steps = server.rewards([{"tokens": rows[0]}], "process_model").json()["items"][0]["scores"][0]
    assert abs(outputs_of(process)["rewards"][0, 0] - steps) < 1e-5


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_requests_and_replies(
    server: ServerProcess, rows: list[list[int]], expected: list[float], coding: str
) -> None:
    body, headers = as_binary(padded(rows * 40))
    compressed = (gzip if coding == "gzip" else zlib).compress(body)
    headers |= {"content-encoding": coding, "accept-encoding": coding}
    reply = server.http.post(INFER, content=compressed, headers=headers)  # httpx decompresses
    assert reply.headers["content-encoding"] == coding
    assert np.allclose(outputs_of(reply)["rewards"].flatten(), expected * 40, atol=5e-5)
    small = server.http.post(INFER, content=compressed, headers={**headers, "accept-encoding": "identity"})
    assert "content-encoding" not in small.headers
    assert np.allclose(outputs_of(small)["rewards"].flatten(), expected * 40, atol=5e-5)


def plain_ids(text: str) -> list[int]:
    """Token ids without a begin token, as NeMo-Aligner tokenises sentences."""
    from plaudit.models import load_tokenizer

    ids: list[int] = load_tokenizer("sums").encode(text, add_special_tokens=False)
    return ids


def test_sentences_have_no_begin_token_and_an_end_token_on_request(server: ServerProcess) -> None:
    text = "".join(chains(1)[0])
    ids = plain_ids(text)
    native = [i["scores"][0] for i in server.rewards([{"tokens": ids}, {"tokens": [*ids, END]}]).json()["items"]]
    assert abs(native[0] - native[1]) > 0.01
    for send in (
        lambda tensors: server.http.post(INFER, json=as_json(tensors)),
        lambda tensors: server.http.post(INFER, content=as_binary(tensors)[0], headers=as_binary(tensors)[1]),
    ):
        outputs = outputs_of(send(sentences(text, f"{text}<eos>")))
        assert np.allclose(outputs["rewards"].flatten(), native, atol=5e-5)
        ended = outputs_of(send({**sentences(text, text), "add_EOS": np.array([[True], [False]])}))
        assert np.allclose(ended["rewards"].flatten(), [native[1]] * 2, atol=5e-5)  # the first row applies to all
        open_ended = outputs_of(send({**sentences(text), "add_EOS": np.array([[False]])}))
        assert np.allclose(open_ended["rewards"].flatten(), native[:1], atol=5e-5)


def test_sentences_take_precedence_over_tokens(server: ServerProcess, rows: list[list[int]]) -> None:
    text = "".join(chains(3)[2])
    both = outputs_of(server.http.post(INFER, json=as_json({**padded(rows[:1]), **sentences(text)})))
    alone = outputs_of(server.http.post(INFER, json=as_json(sentences(text))))
    assert both["rewards"] == alone["rewards"]


def test_a_long_sentence_is_truncated_only_if_exceeded_is_returned(server: ServerProcess) -> None:
    text = "1+" * LIMIT
    outputs = outputs_of(server.http.post(INFER, json=as_json(sentences(text, "1+2=3"))))
    assert outputs["exceeded"].tolist() == [[1], [0]]
    cut = server.rewards([{"tokens": plain_ids(text)[:LIMIT]}]).json()["items"][0]["scores"][0]
    assert abs(outputs["rewards"][0, 0] - cut) < 1e-5
    rewards_only = {**as_json(sentences(text)), "outputs": [{"name": "rewards"}]}
    refused(server.http.post(INFER, json=rewards_only), "row[0]", str(LIMIT))


def test_an_empty_batch_has_no_rewards(server: ServerProcess) -> None:
    for tensors in (padded([]), sentences()):
        outputs = outputs_of(server.http.post(INFER, json=as_json(tensors)))
        assert outputs["rewards"].shape == outputs["exceeded"].shape == (0, 1)
        body, headers = as_binary(tensors)
        assert outputs_of(server.http.post(INFER, content=body, headers=headers))["rewards"].shape == (0, 1)


def test_an_attributes_alias_returns_separate_attributes(server: ServerProcess) -> None:
    request = as_json(padded([[5, 6, 7], [8, 9, 10, 11]]))
    separate = outputs_of(server.http.post("/v2/models/annotator/infer", json=request))["rewards"]
    merged = outputs_of(server.http.post("/v2/models/moods/infer", json=request))["rewards"]
    assert separate.shape == (2, 3)
    assert merged.shape == (2, 1)
    native = server.rewards([{"tokens": [5, 6, 7]}], model="moods").json()["items"][0]
    assert list(native["attributes"][0]) == ["angry", "calm", "glad"]
    assert np.allclose(separate[0], list(native["attributes"][0].values()), atol=5e-5)
    assert np.allclose(separate @ [0, 0.25, 1.0], merged[:, 0], atol=5e-5)
    assert server.http.get("/v2/models/annotator").json()["outputs"][0]["shape"] == [-1, -1]
    assert server.http.get("/v2/models/annotator/config").json()["output"][0]["dims"] == [-1]


def test_health_metadata_config_and_index_routes(server: ServerProcess) -> None:
    http = server.http
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/sums/ready", "/v2/models/sums/versions/1/ready"):
        assert http.get(path).status_code == 200
    assert "binary_tensor_data" in http.get("/v2").json()["extensions"]
    config = http.get("/v2/models/reward_model/config").json()
    assert config["max_batch_size"] == 4096
    assert [(i["name"], i["data_type"]) for i in config["input"]] == [
        ("sentences", "TYPE_STRING"), ("tokens", "TYPE_INT64"), ("sequence_lengths", "TYPE_INT64"),
        ("add_EOS", "TYPE_BOOL"),
    ]  # fmt: skip
    assert all(i["optional"] for i in config["input"])
    metadata = http.get("/v2/models/reward_model").json()
    assert [i["datatype"] for i in metadata["inputs"]] == ["BYTES", "INT64", "INT64", "BOOL"]
    assert [o["name"] for o in metadata["outputs"]] == [o["name"] for o in config["output"]] == ["rewards", "exceeded"]
    index = {entry["name"]: entry["state"] for entry in http.post("/v2/repository/index", json={}).json()}
    assert index == dict.fromkeys(SERVED, "READY")


def test_statistics_count_rows(server: ServerProcess, rows: list[list[int]]) -> None:
    def count() -> int:
        (entry,) = server.http.get("/v2/models/sums/stats").json()["model_stats"]
        return int(entry["inference_stats"]["success"]["count"])

    before = count()
    outputs_of(server.http.post(INFER, json=as_json(padded(rows))))
    assert count() == before + len(rows)
    everything = server.http.get("/v2/models/stats").json()["model_stats"]
    assert {entry["name"] for entry in everything} == SERVED


# Invalid requests


def tensor(name: str = "tokens", shape: Any = (1, 4), kind: Any = "INT64", **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "datatype": kind, **more}


LENGTH = tensor("sequence_lengths", (1, 1), data=[4])
TOKENS = tensor(data=[5, 6, 7, 2])
BAD = {
    "too few values": ([tensor(data=[1, 2, 3]), LENGTH], ["'tokens'", "3 elements", "[1, 4]"]),
    "too many values": ([tensor(data=[[1, 2, 3, 4, 5]]), LENGTH], ["'tokens'", "[1, 4]"]),
    "ragged rows": ([tensor(shape=(2, 2), data=[[1, 2, 3], [4]]), LENGTH], ["'tokens'", "[2, 2]"]),
    "half nested": ([tensor(data=[[1, 2], 3, 4]), LENGTH], ["'tokens'"]),
    "deeply nested": ([tensor(data=[[[[1, 2, 3, 4]]]]), LENGTH], ["'tokens'"]),
    "no data": ([tensor(), LENGTH], ["'tokens'", "expected data or binary_data_size"]),
    "data is text": ([tensor(data="1234"), LENGTH], ["'tokens'"]),
    "fractions": ([tensor(data=[1.5, 2, 3, 4]), LENGTH], ["'tokens'", "INT64"]),
    "truth values": ([tensor(data=[True, 2, 3, 4]), LENGTH], ["'tokens'", "INT64"]),
    "nulls": ([tensor(data=[None, 2, 3, 4]), LENGTH], ["'tokens'", "INT64"]),
    "beyond INT64": ([tensor(data=[2**70, 2, 3, 4]), LENGTH], ["'tokens'", "INT64"]),
    "beyond UINT8": ([tensor(kind="UINT8", data=[256, 2, 3, 4]), LENGTH], ["'tokens'", "UINT8"]),
    "floating tokens": ([tensor(kind="FP32", data=[1, 2, 3, 4]), LENGTH], ["tokens", "integers"]),
    "half tokens": ([tensor(kind="BF16", data=[1, 2, 3, 4]), LENGTH], ["'tokens'", "BF16"]),
    "strings as tokens": ([tensor(kind="BYTES", data=list("1234")), LENGTH], ["tokens", "integers"]),
    "an unknown datatype": ([tensor(kind="INT7", data=[1, 2, 3, 4]), LENGTH], ["'tokens'", "INT7"]),
    "a negative dimension": ([tensor(shape=(1, -4), data=[1, 2, 3, 4]), LENGTH], ["'tokens'", "[1, -4]"]),
    "two negative dimensions": ([tensor(shape=(-1, -4), data=[1, 2, 3, 4]), LENGTH], ["'tokens'", "[-1, -4]"]),
    "a huge dimension": ([tensor(shape=(1, 2**62), data=[1]), LENGTH], ["'tokens'", str(2**62)]),
    "huge dimensions": ([tensor(shape=(2**62, 2**62), data=[1]), LENGTH], ["'tokens'", str(2**62)]),
    "a huge row of no rows": ([tensor(shape=(0, 2**62), data=[]), LENGTH], ["'tokens'", str(2**62)]),
    "many rows of nothing": ([tensor(shape=(2**62, 0), data=[]), LENGTH], ["'tokens'", "max_batch_size"]),
    "a dimension of 4000 digits": ([tensor(shape=(1, 10**4000), data=[]), LENGTH], ["'tokens'"]),
    "no shape": ([tensor(shape=(), data=[1]), LENGTH], ["'tokens'", "[]"]),
    "three dimensions": ([tensor(shape=(1, 2, 2), data=[1, 2, 3, 4]), LENGTH], ["'tokens'", "[1, 2, 2]"]),
    "tokens in one dimension": ([tensor(shape=(4,), data=[1, 2, 3, 4]), LENGTH], ["tokens", "[4]"]),
    "too many rows": ([tensor(shape=(4097, 1), data=[5] * 4097), LENGTH], ["'tokens'", "4096"]),
    "no lengths": ([TOKENS], ["'sequence_lengths'", "missing"]),
    "no tokens": ([LENGTH], ["'tokens'", "missing"]),
    "no inputs": ([], ["'tokens'", "missing"]),
    "twice": ([TOKENS, TOKENS, LENGTH], ["'tokens'", "twice"]),
    "an unknown input": ([TOKENS, LENGTH, tensor("input_ids", data=[1, 2, 3, 4])], ["'input_ids'", "sequence_lengths"]),
    "length 0": ([TOKENS, tensor("sequence_lengths", (1, 1), data=[0])], ["sequence_lengths[0]", "is 0"]),
    "a negative length": ([TOKENS, tensor("sequence_lengths", (1, 1), data=[-1])], ["sequence_lengths[0]", "is -1"]),
    "a length beyond the row": ([TOKENS, tensor("sequence_lengths", (1, 1), data=[5])], ["sequence_lengths[0]", "5"]),
    "a length as a fraction": ([TOKENS, tensor("sequence_lengths", (1, 1), "FP32", data=[4])], ["sequence_lengths"]),
    "lengths for two": ([TOKENS, tensor("sequence_lengths", (2, 1), data=[4, 4])], ["sequence_lengths", "[2, 1]"]),
    "a token that is not in the vocabulary": ([tensor(data=[5, 6, 999, 2]), LENGTH], ["row[0]", "999"]),
    "a token below 0": ([tensor(data=[5, -6, 7, 2]), LENGTH], ["row[0]", "-6"]),
    "more tokens than the model takes": (
        [tensor(shape=(1, 300), data=[5] * 300), tensor("sequence_lengths", (1, 1), data=[300])],
        ["row[0]", "300 tokens", "256"],
    ),
    "numbers as sentences": ([tensor("sentences", (1, 1), data=[1])], ["sentences"]),
    "two sentences in a row": ([tensor("sentences", (1, 2), "BYTES", data=["1", "2"])], ["sentences", "[1, 2]"]),
    "a sentence that is a number": ([tensor("sentences", (1, 1), "BYTES", data=[1])], ["'sentences'", "BYTES"]),
    "an empty sentence": ([tensor("sentences", (1, 1), "BYTES", data=[""])], ["row[0]"]),
    "add_EOS as a number": (
        [tensor("sentences", (1, 1), "BYTES", data=["1"]), tensor("add_EOS", (1, 1), data=[1])],
        ["add_EOS", "BOOL"],
    ),
    "shared memory": ([tensor(parameters={"shared_memory_region": "x"}), LENGTH], ["'tokens'", "shared_memory_region"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tensor_is_refused_by_name(target: Target, name: str) -> None:
    inputs, parts = BAD[name]
    message = refused(target.server.http.post(INFER, json={"inputs": inputs}), *parts)
    assert len(message) < 500
    target.sound()


def test_bad_tensors_allocate_no_memory(target: Target) -> None:
    before = target.peak_bytes()
    for inputs, _ in BAD.values():
        assert target.server.http.post(INFER, json={"inputs": inputs}).status_code == 400
    assert target.peak_bytes() - before < 16 << 20


def binary(kind: str, data: bytes, size: Any, name: str = "sentences", shape: Any = (1, 1)) -> tuple[bytes, str]:
    entry = tensor(name, shape, kind, parameters={"binary_data_size": size})
    head = json.dumps({"inputs": [entry]}).encode()
    return head + data, str(len(head))


BAD_BINARY = {
    "a size beyond the body": (*binary("INT64", b"1234", 8, "tokens"), ["'tokens'", "8", "4 bytes are left"]),
    "a size below 0": (*binary("INT64", b"", -8, "tokens"), ["'tokens'", "-8"]),
    "a size that is text": (*binary("INT64", b"12345678", "8", "tokens"), ["'tokens'"]),
    "a size that is true": (*binary("BOOL", b"1", True, "add_EOS"), ["'add_EOS'", "True"]),
    "a huge size": (*binary("INT64", b"12345678", 2**62, "tokens"), ["'tokens'", str(2**62)]),
    "too small for the shape": (*binary("INT64", b"1234", 4, "tokens"), ["'tokens'", "4 bytes", "expected 8"]),
    "too large for the shape": (*binary("INT32", b"12345678", 8, "tokens"), ["'tokens'", "8 bytes", "expected 4"]),
    "bytes after the tensors": (*binary("INT32", b"12345678", 4, "tokens"), ["4 unexpected bytes follow"]),
    "a huge shape": (*binary("INT64", b"12345678", 8, "tokens", (1, 2**62)), ["'tokens'", str(2**62)]),
    "no room for a string's length": (*binary("BYTES", b"\1\0", 2), ["'sentences'", "truncated"]),
    "a string longer than the tensor": (*binary("BYTES", b"\5\0\0\0abc", 7), ["'sentences'", "5 bytes", "3 are left"]),
    "a string of 4 GiB": (*binary("BYTES", b"\xff\xff\xff\xffabc", 7), ["'sentences'", "4294967295"]),
    "a string too many": (*binary("BYTES", b"\1\0\0\0a\1\0\0\0b", 10), ["'sentences'", "follow the 1 elements"]),
    "a string too few": (*binary("BYTES", b"\1\0\0\0a", 5, shape=(2, 1)), ["'sentences'", "1 elements"]),
    "not UTF-8": (*binary("BYTES", b"\2\0\0\0\xc3\x28", 6), ["sentences[0]", "UTF-8"]),
    "a header length beyond the body": (b'{"inputs": []}', "99", ["Inference-Header-Content-Length", "'99'"]),
    "a header length within the JSON": (b'{"inputs": []}', "5", ["not valid"]),
    "a header length below 0": (b'{"inputs": []}', "-1", ["Inference-Header-Content-Length"]),
    "a header length of words": (b'{"inputs": []}', "all", ["Inference-Header-Content-Length"]),
    "a header length of 5000 digits": (b'{"inputs": []}', "1" * 5000, ["Inference-Header-Content-Length"]),
    "a raw request": (b"12345678", "0", ["raw request"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BINARY)
def test_bad_bytes_are_refused_by_name(target: Target, name: str) -> None:
    body, length, parts = BAD_BINARY[name]
    reply = target.server.http.post(INFER, content=body, headers={"inference-header-content-length": length})
    refused(reply, *parts)
    target.sound()


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (b"", ["not valid"]),
        (b"{", ["not valid"]),
        (b"[]", ["not valid"]),
        (b"{}", ["inputs"]),
        (b'{"inputs": [1]}', ["inputs"]),
        (b'{"inputs": [], "id": 7}', ["id"]),
        (b'{"inputs": [{"name": "tokens"}]}', ["shape"]),
        (b'{"inputs": [{"name": "tokens", "shape": ["4"], "datatype": "INT64"}]}', ["shape"]),
        (b'{"inputs": [{"name": "tokens", "shape": [1.5], "datatype": "INT64"}]}', ["shape"]),
        (b'{"inputs": [], "outputs": [{"name": "values"}]}', ["'values'", "rewards, exceeded"]),
        (b'{"inputs": [], "outputs": [{"name": "rewards", "parameters": {"classification": 2}}]}', ["classification"]),
        (b'{"inputs": ' + b"[" * 100_000, ["not valid"]),
    ],
)
def test_malformed_inference_requests_are_refused(target: Target, body: bytes, parts: list[str]) -> None:
    refused(target.server.http.post(INFER, content=body), *parts)
    target.sound()


def test_errors_of_paths_verbs_and_encodings_have_tritons_shape(server: ServerProcess) -> None:
    http = server.http
    for path in ("/v2/models/nobody/infer", "/v2/models/reward_model/versions/2/infer", "/v2/repository/models/x/load"):
        refused(http.post(path, json={}), status=404)
    for path in ("/v2/models/nobody", "/v2/models/nobody/config"):
        refused(http.get(path), "unknown model: 'nobody' is not found", "reward_model", status=404)
    refused(http.get("/v2/models/nobody/ready"), "Model version not ready", "reward_model", status=400)
    refused(http.get("/v2/models/reward_model/versions/2"), "versions/2", "version is 1", status=404)
    refused(http.get(INFER), "POST", status=405)
    refused(http.post("/v2/models/reward_model/ready"), "GET", status=405)
    refused(http.post(INFER, content=b"xx", headers={"content-encoding": "gzip"}), "gzip")
    refused(http.post(INFER, content=b"xx", headers={"content-encoding": "br"}), "gzip, deflate")


def test_a_bad_row_fails_its_request_and_no_other(
    server: ServerProcess, rows: list[list[int]], expected: list[float]
) -> None:
    """Sent concurrently, so that they share the steps of the model."""
    bad = as_json(padded([rows[0], [5, 999, 2]]))
    good = as_json(padded(rows))
    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda i: server.http.post(INFER, json=bad if i % 2 else good), range(32)))
    for number, reply in enumerate(replies):
        if number % 2:
            refused(reply, "row[1]", "999")
        else:
            assert np.allclose(outputs_of(reply)["rewards"].flatten(), expected, atol=5e-5)


def test_a_score_beyond_fp32_is_an_error_and_not_infinity() -> None:
    from plaudit.serve.protocols.triton.routes import _matrix

    with pytest.raises(HttpError, match=r"row\[1\].*1e\+39"):
        _matrix([[1.0], [1e39]])
    assert _matrix([]).shape == (0, 1)


def test_sixty_megabytes_of_padding_are_not_unpacked_to_lists(target: Target) -> None:
    """One byte per token in the body; in Python lists it would be 8."""
    columns = 15_000
    tokens = np.zeros((4000, columns), dtype="u1")
    tokens[:, :3] = (5, 6, 2)
    shape = [4000, columns]
    inputs = [
        {"name": "tokens", "shape": shape, "datatype": "UINT8", "parameters": {"binary_data_size": tokens.size}},
        {"name": "sequence_lengths", "shape": [4000, 1], "datatype": "INT64", "data": [3] * 4000},
    ]
    head = json.dumps({"id": "7", "inputs": inputs}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    before = target.peak_bytes()
    reply = target.server.http.post(INFER, content=head + tokens.tobytes(), headers=headers)
    assert len(set(outputs_of(reply)["rewards"].flatten().tolist())) == 1
    assert target.peak_bytes() - before < 400 << 20


# Keys


@pytest.mark.slow
def test_a_key_is_required_and_read_from_triton_clients_headers() -> None:
    with ServerProcess(None, "--model", "sums", "--api-key", "secret-of-nemo", "--protocols", "triton") as server:
        body = as_json(padded([[5, 6, 2]]))
        refused(server.http.post(INFER, json=body), "Bearer", status=401)
        refused(server.http.get("/v2/models/reward_model/config"), status=401)
        refused(server.http.post(INFER, json=body, headers={"triton-access-token": "wrong"}), status=401)
        assert server.http.get("/v2/models/reward_model/ready").status_code == 200
        for headers in ({"triton-access-token": "secret-of-nemo"}, {"authorization": "Bearer secret-of-nemo"}):
            outputs_of(server.http.post(INFER, json=body, headers=headers))
        assert server.http.post("/get_reward", json={"query": []}).status_code == 404  # not among --protocols


def test_wire_functions_without_a_server() -> None:
    body, headers = as_binary(padded([[5, 6, 2]], 4))
    infer = triton.read_infer(body, headers["inference-header-content-length"].encode(), 8)
    assert infer.outputs == {"rewards": True, "exceeded": True}
    assert triton.reward_rows(infer) == triton.Rows([[5, 6, 2]], None, False)
    content, head = triton.write_infer(infer, "m", {n: np.zeros((1, 1), dtype="f4") for n in infer.outputs})
    assert head is not None
    assert json.loads(content[:head])["outputs"][0] == {
        "name": "rewards", "datatype": "FP32", "shape": [1, 1], "parameters": {"binary_data_size": 4},
    }  # fmt: skip
    with pytest.raises(HttpError, match="max_batch_size"):
        triton.read_infer(json.dumps(as_json(padded([[1]] * 9))).encode(), None, 8)
