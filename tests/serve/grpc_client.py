"""Makes gRPC calls in a separate process, because gRPC's threads are incompatible with forks. Input (stdin, JSON): the
port, the calls (with fields, or a body in hexadecimal) and, for TLS, the CA, certificate and key. Output: the fields of
each response, or its error status."""

import json
import sys
from pathlib import Path

import grpc
from google.protobuf.json_format import ParseDict

from plaudit.serve.grpc.messages import MESSAGES, SERVICE


def as_json(value):
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, (bool, str, int)) else str(value)


def fields(response):
    results = {field.name: value for field, value in response.ListFields()}
    repeated = {name for name, value in results.items() if hasattr(value, "__len__") and not isinstance(value, str)}
    return {name: [*map(as_json, value)] if name in repeated else as_json(value) for name, value in results.items()}


config = json.load(sys.stdin)
address = f"localhost:{config['port']}"
if "ca" in config:
    files = [Path(config[name]).read_bytes() if name in config else None for name in ("ca", "key", "cert")]
    channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*files))
else:
    channel = grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])
results = []
for call in config["calls"]:
    name = call["method"]
    if "body" in call:
        request = bytes.fromhex(call["body"])
    else:
        request = ParseDict(call.get("fields", {}), MESSAGES[f"{name}Request"]()).SerializeToString()
    method = channel.unary_unary(f"/{SERVICE}/{name}", None, MESSAGES[f"{name}Response"].FromString)
    metadata = tuple(call.get("metadata", {}).items())
    try:
        results.append(fields(method(request, timeout=100, metadata=metadata, wait_for_ready=call.get("wait", True))))
    except grpc.RpcError as error:
        trailing = dict(error.trailing_metadata() or ())
        results.append({"status": error.code().name, "message": error.details(), "trailing": trailing})
print(json.dumps(results))
