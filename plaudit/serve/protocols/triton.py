"""Triton's HTTP protocol (KServe v2 with the binary tensor extension), as tritonclient and NeMo-Aligner use it.

A body is JSON, and behind it, if the header Inference-Header-Content-Length says how long the JSON is, the raw bytes of
the tensors that have `binary_data_size`, in order. Nothing is allocated for a tensor before its size was checked
against the bytes that came.

NeMo-Aligner's reward models take `sentences` [B, 1], or `tokens` [B, T] with `sequence_lengths` [B, 1], and give
`rewards` [B, 1]; its older clients also send `add_EOS` and read `exceeded`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from plaudit.serve.http import HttpError, Reply

NUMBERS = {
    "BOOL": "?", "INT8": "<i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "<u1", "UINT16": "<u2",
    "UINT32": "<u4", "UINT64": "<u8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
OUTPUTS = ("rewards", "exceeded")
MOST_DIMENSIONS = 8
INPUTS = (
    ("sentences", "BYTES", -1),
    ("tokens", "INT64", -1),
    ("sequence_lengths", "INT64", -1),
    ("add_EOS", "BOOL", 1),
)


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Any = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Infer(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    outputs: list[_Output] | None = None
    parameters: dict[str, Any] = {}


_INFER = msgspec.json.Decoder(_Infer)


@dataclass(frozen=True, slots=True)
class Infer:
    """tensors  by name: an array, or for BYTES a list of bytes, with the shape as sent
    outputs  name -> whether it goes back as raw bytes
    """

    id: str
    tensors: Mapping[str, tuple[tuple[int, ...], np.ndarray | list[bytes]]]
    outputs: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Rows:
    """What is to be scored: token lists, or sentences that are still to be tokenised."""

    tokens: list[list[int]] | None
    sentences: list[str] | None
    add_end: bool


def write_error(error: HttpError, request_id: str) -> Reply:
    status = {413: 400, 415: 400, 422: 400, 504: 503}.get(error.status, error.status)
    reply = error.reply(request_id)
    return Reply(status, msgspec.json.encode({"error": str(error)}), headers=reply.headers)


def read_infer(body: bytes, header_length: bytes | None) -> Infer:
    size = len(body)
    if header_length is not None:
        if not header_length.isdigit() or int(header_length) > len(body):
            raise _bad(
                f"Inference-Header-Content-Length {header_length[:20].decode('latin-1')!r} does not fit {size} bytes"
            )
        size = int(header_length)
        if size == 0:
            raise _bad("a raw request without a JSON header is not supported: the models here have several inputs")
    try:
        asked = _INFER.decode(body[:size])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"the inference request is not valid: {' '.join(str(error).split())[:200]}") from None
    rest = memoryview(body)[size:]
    tensors: dict[str, tuple[tuple[int, ...], np.ndarray | list[bytes]]] = {}
    for entry in asked.inputs:
        if entry.name in tensors:
            raise _bad(f"input {entry.name[:60]!r} is there twice")
        shape, count = _shape(entry, len(body))
        binary = entry.parameters.get("binary_data_size")
        if binary is None:
            tensors[entry.name] = (shape, _from_json(entry, count))
            continue
        if type(binary) is not int or not 0 <= binary <= len(rest):
            raise _bad(f"input {entry.name[:60]!r}: binary_data_size {binary!r}, and {len(rest)} bytes are left")
        tensors[entry.name] = (shape, _from_bytes(entry, count, bytes(rest[:binary])))
        rest = rest[binary:]
    if len(rest):
        raise _bad(f"{len(rest)} bytes follow the tensors")
    everywhere = asked.parameters.get("binary_data_output", False) is True
    wanted = {o.name: o.parameters.get("binary_data", everywhere) is True for o in asked.outputs or ()}
    for name in wanted:
        if name not in OUTPUTS:
            raise _bad(f"output {name[:60]!r} is not one of {', '.join(OUTPUTS)}")
    return Infer(asked.id, tensors, wanted or {"rewards": everywhere})


def _shape(entry: _Input, most: int) -> tuple[tuple[int, ...], int]:
    if entry.datatype != "BYTES" and entry.datatype not in NUMBERS:
        raise _bad(f"input {entry.name[:60]!r}: datatype {entry.datatype[:20]!r} is not supported")
    if not 1 <= len(entry.shape) <= MOST_DIMENSIONS or any(n < 0 for n in entry.shape):
        raise _bad(
            f"input {entry.name[:60]!r}: shape {str(entry.shape)[:80]} must have 1 to {MOST_DIMENSIONS} dimensions >= 0"
        )
    count = math.prod(entry.shape)
    if count > most:  # an element takes at least a byte
        raise _bad(f"input {entry.name[:60]!r}: shape {str(entry.shape)[:80]} has more elements than the body bytes")
    return tuple(entry.shape), count


def _from_bytes(entry: _Input, count: int, data: bytes) -> np.ndarray | list[bytes]:
    if entry.datatype == "BYTES":
        return _strings(entry, count, data)
    kind = np.dtype(NUMBERS[entry.datatype])
    if len(data) != count * kind.itemsize:
        raise _bad(
            f"input {entry.name[:60]!r}: {len(data)} bytes for shape {entry.shape} of {entry.datatype}, "
            f"expected {count * kind.itemsize}"
        )
    return np.frombuffer(data, dtype=kind)


def _strings(entry: _Input, count: int, data: bytes) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at < len(data):
        if at + 4 > len(data):
            raise _bad(f"input {entry.name[:60]!r}: the length of element {len(found)} is cut off")
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if length > len(data) - at:
            raise _bad(f"input {entry.name[:60]!r}: element {len(found)} has {length} bytes, {len(data) - at} are left")
        found.append(data[at : at + length])
        at += length
    if len(found) != count:
        raise _bad(f"input {entry.name[:60]!r}: {len(found)} elements for shape {entry.shape}")
    return found


def _from_json(entry: _Input, count: int) -> np.ndarray | list[bytes]:
    flat = list(_flat(entry.data, 0)) if isinstance(entry.data, list) else None
    if flat is None or len(flat) != count:
        found = "no data" if flat is None else f"{len(flat)} elements"
        raise _bad(f"input {entry.name[:60]!r}: {found} for shape {entry.shape}")
    if entry.datatype == "BYTES":
        if not all(isinstance(value, str) for value in flat):
            raise _bad(f"input {entry.name[:60]!r}: BYTES as JSON are strings")
        return [value.encode("utf-8", "surrogatepass") for value in flat]
    allowed = bool if entry.datatype == "BOOL" else (int, float) if entry.datatype.startswith("FP") else int
    if not all(isinstance(value, allowed) and (allowed is bool or not isinstance(value, bool)) for value in flat):
        raise _bad(f"input {entry.name[:60]!r}: a value is not {entry.datatype}")
    try:
        return np.array(flat, dtype=NUMBERS[entry.datatype])
    except (OverflowError, ValueError):
        raise _bad(f"input {entry.name[:60]!r}: a value does not fit {entry.datatype}") from None


def _flat(value: Any, depth: int) -> Any:
    if not isinstance(value, list):
        yield value
    elif depth >= MOST_DIMENSIONS:
        raise _bad(f"data is nested deeper than {MOST_DIMENSIONS}")
    else:
        for item in value:
            yield from _flat(item, depth + 1)


def reward_rows(infer: Infer) -> Rows:
    """The rows of a NeMo-Aligner request. Sentences win over tokens, as they do there."""
    unknown = sorted(set(infer.tensors) - {name for name, _, _ in INPUTS})
    if unknown:
        raise _bad(f"input {unknown[0][:60]!r} is not one of {', '.join(name for name, _, _ in INPUTS)}")
    add_end = False
    if "add_EOS" in infer.tensors:
        flags = infer.tensors["add_EOS"][1]
        add_end = len(flags) > 0 and bool(flags[0])  # the original looks at the first row alone
    if "sentences" in infer.tensors:
        return Rows(None, _sentences(*infer.tensors["sentences"]), add_end)
    if "tokens" not in infer.tensors or "sequence_lengths" not in infer.tensors:
        raise _bad("give sentences, or tokens together with sequence_lengths")
    return Rows(_token_rows(infer), None, False)


def _sentences(shape: tuple[int, ...], values: np.ndarray | list[bytes]) -> list[str]:
    if not isinstance(values, list) or math.prod(shape[1:]) != 1:
        raise _bad(f"sentences must be BYTES of shape [B, 1], and have shape {list(shape)}")
    try:
        return [value.decode("utf-8") for value in values]
    except UnicodeDecodeError as error:
        raise _bad(f"sentences: not UTF-8 ({error.reason})") from None


def _token_rows(infer: Infer) -> list[list[int]]:
    (shape, tokens), (lengths_shape, lengths) = infer.tensors["tokens"], infer.tensors["sequence_lengths"]
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu" or len(shape) != 2:
        raise _bad(f"tokens must be integers of shape [B, T], and have shape {list(shape)}")
    if not isinstance(lengths, np.ndarray) or lengths.dtype.kind not in "iu" or len(lengths) != shape[0]:
        raise _bad(f"sequence_lengths must be integers of shape [{shape[0]}, 1], and have shape {list(lengths_shape)}")
    rows = tokens.reshape(shape).tolist()
    for row, length in enumerate(lengths.tolist()):
        if not 1 <= length <= shape[1]:
            raise _bad(f"sequence_lengths[{row}] is {length}; tokens has {shape[1]} columns")
        rows[row] = rows[row][:length]
    return rows


def write_infer(infer: Infer, model: str, outputs: Mapping[str, np.ndarray]) -> tuple[bytes, int | None]:
    """The body, and how much of it is JSON if not all of it is."""
    entries: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, binary in infer.outputs.items():
        values = outputs[name]
        kind = "FP32" if values.dtype.kind == "f" else "INT32"
        data = np.ascontiguousarray(values, dtype=NUMBERS[kind])
        entry: dict[str, Any] = {"name": name, "datatype": kind, "shape": list(values.shape)}
        if binary:
            entry["parameters"] = {"binary_data_size": data.nbytes}
            tail.append(data.tobytes())
        else:
            entry["data"] = data.flatten().tolist()
        entries.append(entry)
    head = msgspec.json.encode({"id": infer.id, "model_name": model, "model_version": "1", "outputs": entries})
    return head + b"".join(tail), len(head) if tail else None


def config(name: str, most_rows: int) -> dict[str, Any]:
    names = {"BYTES": "STRING"}
    return {
        "name": name, "platform": "", "backend": "plaudit", "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": most_rows,
        "input": [
            {"name": n, "data_type": f"TYPE_{names.get(kind, kind)}", "dims": [size], "optional": True}
            for n, kind, size in INPUTS
        ],
        "output": [
            {"name": "rewards", "data_type": "TYPE_FP32", "dims": [1]},
            {"name": "exceeded", "data_type": "TYPE_INT32", "dims": [1]},
        ],
        "instance_group": [{"name": name, "kind": "KIND_CPU", "count": 1}],
        "dynamic_batching": {"preferred_batch_size": [], "max_queue_delay_microseconds": 0},
        "parameters": {}, "model_transaction_policy": {"decoupled": False},
    }  # fmt: skip


def metadata(name: str) -> dict[str, Any]:
    return {
        "name": name, "versions": ["1"], "platform": "plaudit",
        "inputs": [{"name": n, "datatype": kind, "shape": [-1, size]} for n, kind, size in INPUTS],
        "outputs": [
            {"name": "rewards", "datatype": "FP32", "shape": [-1, 1]},
            {"name": "exceeded", "datatype": "INT32", "shape": [-1, 1]},
        ],
    }  # fmt: skip


def server_metadata(version: str) -> dict[str, Any]:
    return {
        "name": "plaudit",
        "version": version,
        "extensions": ["binary_tensor_data", "statistics", "model_repository"],
    }


def index(models: Sequence[tuple[str, bool, str]]) -> list[dict[str, str]]:
    """(name, ready, why not) of each."""
    return [
        {"name": name, "version": "1", "state": "READY" if ready else "UNAVAILABLE", "reason": reason}
        for name, ready, reason in models
    ]


def statistics(counts: Mapping[str, tuple[int, int, int]]) -> dict[str, Any]:
    """Name -> (items answered, items failed, steps of the model)."""
    zero = {"count": 0, "ns": 0}
    return {
        "model_stats": [
            {
                "name": name, "version": "1", "last_inference": 0, "inference_count": good, "execution_count": steps,
                "inference_stats": {
                    "success": {"count": good, "ns": 0}, "fail": {"count": failed, "ns": 0}, "queue": zero,
                    "compute_input": zero, "compute_infer": zero, "compute_output": zero, "cache_hit": zero,
                    "cache_miss": zero,
                },
                "batch_stats": [],
            }
            for name, (good, failed, steps) in counts.items()
        ]
    }  # fmt: skip


def _bad(message: str) -> HttpError:
    return HttpError(400, "invalid_tensor", message)
