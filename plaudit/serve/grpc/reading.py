"""Converts a ModelInferRequest to the body of the same HTTP request.

A message of 64 MiB can have 32 million empty tensors, which take gigabytes when they are parsed. The fields are
therefore counted on the wire first, and a message with more than raw tensors is read in a reader process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from plaudit.serve.grpc.messages import MESSAGES
from plaudit.serve.http.message import HttpError

# The field of typed contents for each datatype, and its numpy dtype.
CONTENTS = {
    "BOOL": ("bool_contents", "?"), "INT8": ("int_contents", "<i1"), "INT16": ("int_contents", "<i2"),
    "INT32": ("int_contents", "<i4"), "INT64": ("int64_contents", "<i8"), "UINT8": ("uint_contents", "<u1"),
    "UINT16": ("uint_contents", "<u2"), "UINT32": ("uint_contents", "<u4"), "UINT64": ("uint64_contents", "<u8"),
    "FP32": ("fp32_contents", "<f4"), "FP64": ("fp64_contents", "<f8"),
}  # fmt: skip
REQUEST: Descriptor = MESSAGES["ModelInferRequest"].DESCRIPTOR
RAW = REQUEST.fields_by_name["raw_input_contents"].number
Buffer = bytes | memoryview
VARINT, FIXED64, SIZED, FIXED32 = 0, 1, 2, 5  # wire types
OPAQUE = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
FIXED_BYTES = {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_DOUBLE: 8}


@dataclass(frozen=True, slots=True)
class HttpBody:
    """head  bytes of the JSON at the start of `body`, which the raw tensors follow"""

    model: str
    version: str
    head: int
    body: bytes


def split(message: bytes, most: int) -> tuple[bytes, list[memoryview]] | None:
    """A message without its raw tensors, and these. None if the former has more than `most` bytes."""
    view, at, size = memoryview(message), 0, 0
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    while at < len(message):
        number, wire, begin, end = _field(message, at, len(message))
        if wire == SIZED and number == RAW:
            raw.append(view[begin:end])
            size += begin - at
        else:
            rest.append(view[at:end])
            size += end - at
        if size > most:
            return None
        at = end
    return b"".join(rest), raw


def read_whole(message: bytes, most_fields: int, most_numbers: int) -> HttpBody:
    """Reads a large message. `most_fields`: messages, texts and single numbers. `most_numbers`: numbers of lists."""
    _Count(message, most_fields, most_numbers).add(0, len(message), REQUEST)
    parsed = _parsed(message)
    return _http_body(parsed, list(parsed.raw_input_contents))


def read_infer(rest: bytes, raw: Sequence[Buffer]) -> HttpBody:
    return _http_body(_parsed(rest), raw)


def _parsed(message: bytes) -> Any:
    try:
        return MESSAGES["ModelInferRequest"].FromString(message)
    except DecodeError:
        raise _bad() from None


class _Count:
    """Counts what a parser would allocate, without allocating it."""

    def __init__(self, message: bytes, most_fields: int, most_numbers: int) -> None:
        self._message = message
        self._fields = self._most_fields = most_fields
        self._numbers = self._most_numbers = most_numbers

    def add(self, at: int, end: int, kind: Descriptor) -> None:
        fields = kind.fields_by_number
        while at < end:
            number, wire, begin, at = _field(self._message, at, end)
            self._fields -= 1
            if self._fields < 0:
                raise _too_many(f"{self._most_fields} fields")
            field = fields.get(number)
            if wire != SIZED or field is None or field.type in OPAQUE:
                continue
            if field.message_type is not None:
                self.add(begin, at, field.message_type)
            else:
                self._packed(begin, at, FIXED_BYTES.get(field.type))

    def _packed(self, begin: int, end: int, width: int | None) -> None:
        """The last byte of each varint is less than 128."""
        data = np.frombuffer(self._message, np.uint8, end - begin, begin)
        self._numbers -= int(np.count_nonzero(data < 128)) if width is None else data.size // width
        if self._numbers < 0:
            raise _too_many(f"{self._most_numbers} numbers")


def _field(message: bytes, at: int, end: int) -> tuple[int, int, int, int]:
    """The number and wire type of the field at `at`, and where its value begins and ends."""
    tag, begin = _varint(message, at, end)
    wire = tag & 7
    if wire == VARINT:
        _, after = _varint(message, begin, end)
    elif wire == SIZED:
        size, begin = _varint(message, begin, end)
        after = begin + size
    elif wire in (FIXED64, FIXED32):
        after = begin + (8 if wire == FIXED64 else 4)
    else:
        raise _bad()
    if after > end:
        raise _bad()
    return tag >> 3, wire, begin, after


def _varint(message: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _bad()


def _http_body(message: Any, raw: Sequence[Buffer]) -> HttpBody:
    """All tensors become raw bytes."""
    if raw and len(raw) != len(message.inputs):
        raise _bad(f"raw_input_contents has {len(raw)} tensors; expected one for each of {len(message.inputs)} inputs")
    tensors: Sequence[Buffer] = raw or [_typed_bytes(tensor) for tensor in message.inputs]
    inputs = [
        {
            "name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape),
            "parameters": {**_plain(tensor.parameters), "binary_data_size": len(data)},
        }
        for tensor, data in zip(message.inputs, tensors, strict=True)
    ]  # fmt: skip
    head: dict[str, Any] = {
        "id": message.id, "inputs": inputs, "parameters": {**_plain(message.parameters), "binary_data_output": True},
    }  # fmt: skip
    if message.outputs:
        head["outputs"] = [
            {"name": output.name, "parameters": {**_plain(output.parameters), "binary_data": True}}
            for output in message.outputs
        ]
    text = msgspec.json.encode(head)
    return HttpBody(message.model_name, message.model_version, len(text), b"".join([text, *tensors]))


def _typed_bytes(tensor: Any) -> bytes:
    if tensor.datatype == "BYTES":
        texts = tensor.contents.bytes_contents
        return b"".join(part for text in texts for part in (len(text).to_bytes(4, "little"), text))
    if tensor.datatype not in CONTENTS:
        raise _bad(f"input {tensor.name[:60]!r}: datatype {tensor.datatype[:20]!r} is not supported")
    field, dtype = CONTENTS[tensor.datatype]
    try:
        return np.array(getattr(tensor.contents, field), dtype=dtype).tobytes()
    except OverflowError:
        raise _bad(f"input {tensor.name[:60]!r}: a value does not fit {tensor.datatype}") from None


def _plain(parameters: Any) -> dict[str, Any]:
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], which) for name, which in chosen.items() if which is not None}


def _bad(message: str = "the message is not a ModelInferRequest") -> HttpError:
    return HttpError(400, "bad_message", message)


def _too_many(what: str) -> HttpError:
    return HttpError(413, "too_large", f"the message has more than {what}; split it, or send raw_input_contents")
