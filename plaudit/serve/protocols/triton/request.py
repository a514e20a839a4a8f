"""The client side of Triton's HTTP protocol: tensors to a binary request, and a binary reply to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from plaudit.errors import BadReply, one_line
from plaudit.serve.protocols.triton.wire import KINDS, NUMBERS

HEADER = "Inference-Header-Content-Length"


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}


class _Reply(msgspec.Struct):
    outputs: list[_Output]
    parameters: dict[str, Any] = {}


_REPLY = msgspec.json.Decoder(_Reply)


@dataclass(frozen=True, slots=True)
class TritonReply:
    tensors: Mapping[str, np.ndarray]
    parameters: Mapping[str, Any]


def write_request(tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """The body and its headers."""
    inputs, tail = [], []
    for name, values in tensors.items():
        kind = KINDS[values.dtype.str[1:]]
        data = np.ascontiguousarray(values, dtype=NUMBERS[kind]).tobytes()
        size = {"binary_data_size": len(data)}
        inputs.append({"name": name, "datatype": kind, "shape": list(values.shape), "parameters": size})
        tail.append(data)
    head = msgspec.json.encode({"inputs": inputs, "parameters": {**parameters, "binary_data_output": True}})
    return head + b"".join(tail), {HEADER: str(len(head)), "Content-Type": "application/octet-stream"}


def read_reply(content: bytes, header: str | None) -> TritonReply:
    size = int(header) if header is not None and header.isdigit() else len(content)
    try:
        reply = _REPLY.decode(content[:size])
        at, tensors = size, {}
        for output in reply.outputs:
            count = output.parameters["binary_data_size"]
            data = np.frombuffer(content[at : at + count], dtype=NUMBERS[output.datatype])
            tensors[output.name] = data.reshape(output.shape)
            at += count
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise BadReply(f"the reply does not follow Triton's protocol: {one_line(error, 200)}") from None
    return TritonReply(tensors, reply.parameters)
