"""Calls over gRPC, in a process of its own: gRPC's threads and forks do not go together. In (stdin, JSON): port, calls,
and of TLS the CA, certificate and key. Out: what each call gave, or its status."""

import json
import sys
from pathlib import Path

import grpc
from google.protobuf.json_format import ParseDict

from plaudit.serve.grpc.messages import MESSAGES, SERVICE


def shown(value):
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, (bool, str, int)) else str(value)


def fields(response):
    found = {field.name: value for field, value in response.ListFields()}
    several = {name for name, value in found.items() if hasattr(value, "__len__") and not isinstance(value, str)}
    return {name: [*map(shown, value)] if name in several else shown(value) for name, value in found.items()}


given = json.load(sys.stdin)
place = f"localhost:{given['port']}"
if "ca" in given:
    files = [Path(given[name]).read_bytes() if name in given else None for name in ("ca", "key", "cert")]
    channel = grpc.secure_channel(place, grpc.ssl_channel_credentials(*files))
else:
    channel = grpc.insecure_channel(place)
found = []
for call in given["calls"]:
    name = call["method"]
    request = ParseDict(call.get("fields", {}), MESSAGES[f"{name}Request"]())
    method = channel.unary_unary(
        f"/{SERVICE}/{name}", type(request).SerializeToString, MESSAGES[f"{name}Response"].FromString
    )
    metadata = tuple(call.get("metadata", {}).items())
    try:
        found.append(fields(method(request, timeout=100, metadata=metadata, wait_for_ready=call.get("wait", True))))
    except grpc.RpcError as error:
        trailing = dict(error.trailing_metadata() or ())
        found.append({"status": error.code().name, "message": error.details(), "trailing": trailing})
print(json.dumps(found))
