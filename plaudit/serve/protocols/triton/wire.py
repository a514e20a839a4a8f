"""Triton's HTTP protocol (KServe v2 with the binary tensor extension), as tritonclient and NeMo-Aligner use it.

A body is JSON, followed, if the header Inference-Header-Content-Length gives the size of the JSON, by the raw bytes of
the tensors with `binary_data_size`, in order. A tensor's shape is checked against the allowed number of rows and the
size of the body before any memory is allocated for it.

NeMo-Aligner's reward models take `sentences` [B, 1], or `tokens` [B, T] with `sequence_lengths` [B, 1], and return
`rewards` [B, 1]; its older clients also send `add_EOS` and read `exceeded`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from plaudit.errors import one_line
from plaudit.serve.http.message import HttpError, Reply

NUMBERS = {
    "BOOL": "?", "INT8": "<i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "<u1", "UINT16": "<u2",
    "UINT32": "<u4", "UINT64": "<u8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
KINDS = {"f4": "FP32", "f8": "FP64", "i4": "INT32", "i8": "INT64"}  # datatypes of outputs, by numpy's names
# Unsupported ways to send and receive tensors: ignoring them would return wrong results, so they are rejected.
REFUSED_PARAMETERS = ("classification", "shared_memory_region")


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor of a model. `dims` exclude the batch dimension if the model is batched."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of a model. batched: its tensors have a first dimension of independent rows."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    batched: bool = True
    optional: bool = True


TEXT_OR_TOKENS = (
    Spec("sentences", "BYTES", (-1,)),
    Spec("tokens", "INT64", (-1,)),
    Spec("sequence_lengths", "INT64", (-1,)),
    Spec("add_EOS", "BOOL", (1,)),
)
REWARD = Signature(TEXT_OR_TOKENS, (Spec("rewards", "FP32", (1,)), Spec("exceeded", "INT32", (1,))))
ATTRIBUTES = Signature(TEXT_OR_TOKENS, (Spec("rewards", "FP32", (-1,)), Spec("exceeded", "INT32", (1,))))


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
class Tensor:
    """`values` are flat in row-major order: an array, or for BYTES a list."""

    shape: tuple[int, ...]
    values: Any


@dataclass(frozen=True, slots=True)
class Infer:
    """outputs     name -> whether it is returned as raw bytes
    parameters  of the whole request
    """

    id: str
    tensors: Mapping[str, Tensor]
    outputs: Mapping[str, bool]
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows to score: token lists, or sentences that still need tokenising."""

    tokens: list[list[int]] | None
    sentences: list[str] | None
    add_end: bool


def write_error(error: HttpError, request_id: str) -> Reply:
    status = {413: 400, 415: 400, 422: 400, 504: 503}.get(error.status, error.status)
    reply = error.shaped({"error": str(error)}, request_id, status)
    reply.headers.append((b"x-error-type", error.type.encode()))  # which the status does not show
    return reply


def read_infer(body: bytes, header_length: bytes | None, most_rows: int, signature: Signature = REWARD) -> Infer:
    size = json_size(header_length, len(body))
    try:
        request = _INFER.decode(body[:size])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = one_line(error, 200)
        raise _bad(f"the inference request is not valid: {why}") from None
    rest = memoryview(body)[size:]
    tensors: dict[str, Tensor] = {}
    names = [spec.name for spec in signature.inputs]
    for entry in request.inputs:
        if entry.name not in names:
            raise _bad(f"input {entry.name[:60]!r} is not one of {', '.join(names)}")
        if entry.name in tensors:
            raise _bad(f"input {entry.name!r} is given twice")
        _check_parameters(f"input {entry.name!r}", entry.parameters)
        count = _count(entry, len(body), most_rows)
        binary = entry.parameters.get("binary_data_size")
        if binary is None:
            tensors[entry.name] = Tensor(tuple(entry.shape), _from_json(entry, count))
            continue
        if type(binary) is not int or not 0 <= binary <= len(rest):
            raise _bad(f"input {entry.name!r}: binary_data_size is {str(binary)[:20]}, but {len(rest)} bytes are left")
        tensors[entry.name] = Tensor(tuple(entry.shape), _from_bytes(entry, count, bytes(rest[:binary])))
        rest = rest[binary:]
    if len(rest):
        raise _bad(f"{len(rest)} unexpected bytes follow the tensors")
    return Infer(request.id, tensors, _wanted(request, signature), request.parameters)


def json_size(header: bytes | None, body: int) -> int:
    """The size of the JSON part of a body of this size."""
    if header is None:
        return body
    # The number of digits is checked first: Python refuses to parse numbers with thousands of digits.
    if not header.isdigit() or len(header) > 12 or int(header) > body:
        raise _bad(
            f"Inference-Header-Content-Length {header[:20].decode('latin-1')!r} does not fit a body of {body} bytes"
        )
    if int(header) == 0:
        raise _bad("a raw request without a JSON header is not supported, because the model has several inputs")
    return int(header)


def _wanted(request: _Infer, signature: Signature) -> dict[str, bool]:
    names = [spec.name for spec in signature.outputs]
    everywhere = request.parameters.get("binary_data_output", False) is True
    wanted: dict[str, bool] = {}
    for output in request.outputs or ():
        if output.name not in names:
            raise _bad(f"output {output.name[:60]!r} is not one of {', '.join(names)}")
        _check_parameters(f"output {output.name!r}", output.parameters)
        wanted[output.name] = output.parameters.get("binary_data", everywhere) is True
    return wanted or dict.fromkeys(names, everywhere)


def _check_parameters(what: str, parameters: Mapping[str, Any]) -> None:
    for name in REFUSED_PARAMETERS:
        if name in parameters:
            raise _bad(f"{what}: {name} is not supported; send and receive tensors in the body")


def _count(entry: _Input, body: int, most_rows: int) -> int:
    """The number of elements; raises an error if the body cannot have that many."""
    what = f"input {entry.name!r}: shape {str(entry.shape)[:80]}"
    if entry.datatype != "BYTES" and entry.datatype not in NUMBERS:
        raise _bad(f"input {entry.name!r}: datatype {entry.datatype[:20]!r} is not supported")
    if not 1 <= len(entry.shape) <= 2 or any(n < 0 for n in entry.shape):
        raise _bad(f"{what}; expected [rows] or [rows, columns], none below 0")
    if entry.shape[0] > most_rows:
        raise _bad(f"{what} has more than {most_rows} rows (max_batch_size); split it")
    count = math.prod(entry.shape)
    # An element has at least one byte. With a dimension of 0 the product hides the others, so each is checked.
    if max(count, *entry.shape) > body:
        raise _bad(f"{what} is larger than the body of {body} bytes")
    if entry.datatype == "BYTES" and count > most_rows:
        raise _bad(f"{what} of BYTES; expected [rows, 1]")
    return count


def _from_bytes(entry: _Input, count: int, data: bytes) -> np.ndarray | list[bytes]:
    if entry.datatype == "BYTES":
        return _strings(entry, count, data)
    kind = np.dtype(NUMBERS[entry.datatype])
    if len(data) != count * kind.itemsize:
        raise _bad(
            f"input {entry.name!r}: {len(data)} bytes for shape {entry.shape} of {entry.datatype}, "
            f"expected {count * kind.itemsize}"
        )
    return np.frombuffer(data, dtype=kind)


def _strings(entry: _Input, count: int, data: bytes) -> list[bytes]:
    strings: list[bytes] = []
    at = 0
    while at < len(data):
        if len(strings) == count:
            raise _bad(
                f"input {entry.name!r}: {len(data) - at} bytes follow the {count} elements of shape {entry.shape}"
            )
        if at + 4 > len(data):
            raise _bad(f"input {entry.name!r}: the length of element {len(strings)} is truncated")
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if length > len(data) - at:
            raise _bad(
                f"input {entry.name!r}: element {len(strings)} has {length} bytes, but {len(data) - at} are left"
            )
        strings.append(data[at : at + length])
        at += length
    if len(strings) != count:
        raise _bad(f"input {entry.name!r}: {len(strings)} elements for shape {entry.shape}")
    return strings


def _from_json(entry: _Input, count: int) -> np.ndarray | list[bytes]:
    if not isinstance(entry.data, list):
        raise _bad(f"input {entry.name!r}: expected data or binary_data_size")
    flat = entry.data
    if flat and all(isinstance(row, list) for row in flat):
        if len(entry.shape) != 2 or any(len(row) != entry.shape[1] for row in flat):
            raise _bad(f"input {entry.name!r}: the rows of its data do not have shape {entry.shape}")
        flat = list(chain.from_iterable(flat))
    if len(flat) != count:
        raise _bad(f"input {entry.name!r}: {len(flat)} elements for shape {entry.shape}")
    kind: Any = float if entry.datatype.startswith("FP") else {"BYTES": str, "BOOL": bool}.get(entry.datatype, int)
    try:
        checked = msgspec.convert(flat, list[kind])
        if kind is str:
            return [value.encode() for value in checked]
        return np.array(checked, dtype=NUMBERS[entry.datatype])
    except (msgspec.ValidationError, OverflowError, ValueError) as error:
        why = one_line(error, 120)
        raise _bad(f"input {entry.name!r}: a value is not {entry.datatype} ({why})") from None


def reward_rows(infer: Infer) -> Rows:
    """The rows of a NeMo-Aligner request. Sentences take precedence over tokens, as in the original."""
    add_end = "add_EOS" in infer.tensors and _first_flag(infer.tensors["add_EOS"])
    if "sentences" in infer.tensors:
        return Rows(None, _sentences(infer.tensors["sentences"]), add_end)
    for name in ("tokens", "sequence_lengths"):
        if name not in infer.tensors:
            raise _bad(f"input {name!r} is missing: give sentences, or tokens together with sequence_lengths")
    return Rows(_token_rows(infer.tensors["tokens"], infer.tensors["sequence_lengths"]), None, False)


def _first_flag(flags: Tensor) -> bool:
    """The first row's flag, as in the original."""
    if not isinstance(flags.values, np.ndarray) or flags.values.dtype.kind != "b":
        raise _bad("add_EOS must be BOOL")
    return len(flags.values) > 0 and bool(flags.values[0])


def _sentences(sentences: Tensor) -> list[str]:
    if not isinstance(sentences.values, list) or sentences.shape[1:] not in ((), (1,)):
        raise _bad(f"sentences must be BYTES of shape [B, 1], but have shape {list(sentences.shape)}")
    texts = []
    for row, value in enumerate(sentences.values):
        try:
            texts.append(value.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _bad(f"sentences[{row}] is not UTF-8 ({error.reason} at byte {error.start})") from None
    return texts


def _token_rows(tokens: Tensor, lengths: Tensor) -> list[list[int]]:
    """Each row without its padding, which is never converted to a Python list."""
    if not isinstance(tokens.values, np.ndarray) or tokens.values.dtype.kind not in "iu" or len(tokens.shape) != 2:
        raise _bad(f"tokens must be integers of shape [B, T], but have shape {list(tokens.shape)}")
    count, columns = tokens.shape
    if not isinstance(lengths.values, np.ndarray) or lengths.values.dtype.kind not in "iu":
        raise _bad("sequence_lengths must be integers")
    if lengths.shape not in ((count,), (count, 1)):
        raise _bad(f"sequence_lengths must have shape [{count}, 1], but have shape {list(lengths.shape)}")
    rows = []
    for row, length in enumerate(lengths.values.tolist()):
        if not 1 <= length <= columns:
            raise _bad(f"sequence_lengths[{row}] is {length}; expected 1 to {columns}, the columns of tokens")
        rows.append(tokens.values[row * columns : row * columns + length].tolist())
    return rows


def write_infer(
    infer: Infer, model: str, outputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any] | None = None
) -> tuple[bytes, int | None]:
    """The body, and the size of its JSON part if it has binary tensors."""
    entries: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for name, binary in infer.outputs.items():
        values = outputs[name]
        kind = KINDS[values.dtype.str[1:]]
        data = np.ascontiguousarray(values, dtype=NUMBERS[kind])
        entry: dict[str, Any] = {"name": name, "datatype": kind, "shape": list(values.shape)}
        if binary:
            entry["parameters"] = {"binary_data_size": data.nbytes}
            tail.append(data.tobytes())
        else:
            entry["data"] = data.flatten().tolist()
        entries.append(entry)
    head: dict[str, Any] = {"id": infer.id, "model_name": model, "model_version": "1", "outputs": entries}
    if parameters:
        head["parameters"] = parameters
    text = msgspec.json.encode(head)
    return text + b"".join(tail), len(text) if tail else None


def config(name: str, most_rows: int, signature: Signature = REWARD) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "name": name, "platform": "", "backend": "plaudit", "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": most_rows if signature.batched else 0,
        "input": [
            {**_typed(spec), "optional": True} if signature.optional else _typed(spec) for spec in signature.inputs
        ],
        "output": [_typed(spec) for spec in signature.outputs],
        "instance_group": [{"name": name, "kind": "KIND_CPU", "count": 1}],
        "parameters": {}, "model_transaction_policy": {"decoupled": False},
    }  # fmt: skip
    if signature.batched:
        tree["dynamic_batching"] = {"preferred_batch_size": [], "max_queue_delay_microseconds": 0}
    return tree


def _typed(spec: Spec) -> dict[str, Any]:
    kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.dims)}


def metadata(name: str, signature: Signature = REWARD) -> dict[str, Any]:
    rows = [-1] if signature.batched else []

    def shaped(spec: Spec) -> dict[str, Any]:
        return {"name": spec.name, "datatype": spec.datatype, "shape": [*rows, *spec.dims]}

    return {
        "name": name, "versions": ["1"], "platform": "plaudit", "inputs": list(map(shaped, signature.inputs)),
        "outputs": list(map(shaped, signature.outputs)),
    }  # fmt: skip


def server_metadata(version: str) -> dict[str, Any]:
    return {
        "name": "plaudit",
        "version": version,
        "extensions": ["binary_tensor_data", "statistics", "model_repository"],
    }


def index(models: Sequence[tuple[str, bool, str]]) -> list[dict[str, str]]:
    """The models, given (name, ready, reason) of each."""
    return [
        {"name": name, "version": "1", "state": "READY" if ready else "UNAVAILABLE", "reason": reason}
        for name, ready, reason in models
    ]


def statistics(counts: Mapping[str, tuple[int, int, int]]) -> dict[str, Any]:
    """Statistics, given name -> (items answered, items failed, steps of the model)."""
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
