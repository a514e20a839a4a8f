"""KServe's v2 protocol over gRPC, compatible with Triton's clients, and /v1/rewards for `RewardClient`.

Each call is translated to the equivalent HTTP request and handled by the same application, so authentication, quotas,
limits, deadlines, accounting and errors are those of HTTP. Tensors stay raw bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
from google.protobuf.json_format import ParseDict

from plaudit.config.serve import LimitsTable, ListenTable
from plaudit.errors import ConfigError
from plaudit.serve.grpc.messages import DATA_TYPES, MESSAGES, SERVICE
from plaudit.serve.http.address import Tls
from plaudit.serve.http.app import App
from plaudit.serve.http.message import Connection

# Metadata keys a caller may send, with the meaning of the HTTP headers.
METADATA = (
    "authorization", "x-api-key", "triton-access-token", "x-request-id", "x-deadline", "x-route-key", "traceparent",
    "tracestate",
)  # fmt: skip
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND, 408: grpc.StatusCode.DEADLINE_EXCEEDED, 429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}  # fmt: skip
# The field of typed contents for each datatype, and its numpy dtype.
CONTENTS = {
    "BOOL": ("bool_contents", "?"), "INT8": ("int_contents", "<i1"), "INT16": ("int_contents", "<i2"),
    "INT32": ("int_contents", "<i4"), "INT64": ("int64_contents", "<i8"), "UINT8": ("uint_contents", "<u1"),
    "UINT16": ("uint_contents", "<u2"), "UINT32": ("uint_contents", "<u4"), "UINT64": ("uint64_contents", "<u8"),
    "FP32": ("fp32_contents", "<f4"), "FP64": ("fp64_contents", "<f8"),
}  # fmt: skip
END_SECONDS = 1.0
REWARDS = "plaudit.Rewards"  # forwards bodies of /v1/rewards unchanged, for `RewardClient`


class BadMessage(Exception):
    """The tensors of a message cannot be read."""


class GrpcServer:
    """A gRPC server on `grpc_port` of the table's host, with TLS if HTTP has TLS."""

    def __init__(self, app: App, table: ListenTable, tls: Tls | None) -> None:
        self._app = app
        self._server = grpc.aio.server(options=_options(table.limits), maximum_concurrent_rpcs=table.limits.connections)
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                handler, MESSAGES[f"{name}Request"].FromString, MESSAGES[f"{name}Response"].SerializeToString
            )
            for name, handler in self._methods().items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        own = {
            "Score": grpc.unary_unary_rpc_method_handler(self._score),
            "Live": grpc.unary_unary_rpc_method_handler(self._live),
        }  # fmt: skip
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REWARDS, own),))
        host = f"[{table.host}]" if ":" in table.host else table.host
        place = f"{host}:{table.grpc_port}"
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(place)
            else:
                self.port = self._server.add_secure_port(place, _credentials(tls))
        except RuntimeError:
            raise ConfigError(f"cannot listen on {place}; choose another --grpc-port") from None

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(END_SECONDS)

    def _methods(self) -> dict[str, Callable[[Any, Any], Awaitable[Any]]]:
        async def server_live(message: Any, context: Any) -> Any:
            return MESSAGES["ServerLiveResponse"](live=await self._probe("/v2/health/live", context))

        async def server_ready(message: Any, context: Any) -> Any:
            return MESSAGES["ServerReadyResponse"](ready=await self._probe("/v2/health/ready", context))

        async def model_ready(message: Any, context: Any) -> Any:
            return MESSAGES["ModelReadyResponse"](ready=await self._probe(f"{_path(message)}/ready", context))

        async def server_metadata(message: Any, context: Any) -> Any:
            return _parsed("ServerMetadataResponse", await self._json("GET", "/v2", context))

        async def model_metadata(message: Any, context: Any) -> Any:
            return _parsed("ModelMetadataResponse", await self._json("GET", _path(message), context))

        async def model_config(message: Any, context: Any) -> Any:
            config = await self._json("GET", f"{_path(message)}/config", context)
            for tensor in (*config["input"], *config["output"]):
                tensor["data_type"] = DATA_TYPES[tensor["data_type"]]
            return _parsed("ModelConfigResponse", {"config": config})

        async def model_statistics(message: Any, context: Any) -> Any:
            path = f"{_path(message)}/stats" if message.name else "/v2/models/stats"
            return _parsed("ModelStatisticsResponse", await self._json("GET", path, context))

        async def repository_index(message: Any, context: Any) -> Any:
            models = await self._json("POST", "/v2/repository/index", context)
            if message.ready:
                models = [model for model in models if model["state"] == "READY"]
            return _parsed("RepositoryIndexResponse", {"models": models})

        return {
            "ServerLive": server_live, "ServerReady": server_ready, "ModelReady": model_ready,
            "ServerMetadata": server_metadata, "ModelMetadata": model_metadata, "ModelConfig": model_config,
            "ModelStatistics": model_statistics, "RepositoryIndex": repository_index, "ModelInfer": self._infer,
        }  # fmt: skip

    async def _score(self, body: bytes, context: Any) -> bytes:
        return await self._own("POST", "/v1/rewards", context, body)

    async def _live(self, body: bytes, context: Any) -> bytes:
        return await self._own("GET", "/health/live", context)

    async def _own(self, method: str, path: str, context: Any, body: bytes = b"") -> bytes:
        """Returns the reply unchanged. Error headers of the HTTP reply become trailing metadata."""
        status, headers, content = await self._call(method, path, context, body)
        if status != 200:
            error = msgspec.json.decode(content).get("error") or {"type": "failed", "message": "a model has failed"}
            trailing = [("x-status", str(status)), ("x-error-type", error["type"])]
            if b"retry-after" in headers:
                trailing.append(("retry-after", headers[b"retry-after"].decode()))
            code = CODES.get(408 if status == 504 else status, grpc.StatusCode.INTERNAL if status >= 500 else None)
            await context.abort(code or grpc.StatusCode.INVALID_ARGUMENT, error["message"], tuple(trailing))
        return content

    async def _infer(self, message: Any, context: Any) -> Any:
        try:
            body, head = _http_body(message)
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        path = _path(message, message.model_name, message.model_version)
        extra = [(b"inference-header-content-length", str(head).encode())]
        _, headers, content = await self._call_or_abort("POST", f"{path}/infer", context, body, extra)
        return _infer_response(content, int(headers[b"inference-header-content-length"]))

    async def _probe(self, path: str, context: Any) -> bool:
        """Returns whether the endpoint is healthy; an unknown model is reported as not ready, as Triton does."""
        return (await self._call("GET", path, context))[0] == 200

    async def _json(self, method: str, path: str, context: Any) -> Any:
        return msgspec.json.decode((await self._call_or_abort(method, path, context))[2])

    async def _call_or_abort(
        self, method: str, path: str, context: Any, body: bytes = b"", extra: list[tuple[bytes, bytes]] | None = None
    ) -> tuple[int, Mapping[bytes, bytes], bytes]:
        """Returns the reply; aborts the call if it is an error."""
        status, headers, content = await self._call(method, path, context, body, extra)
        if status != 200:
            wait = headers.get(b"retry-after")
            trailing = () if wait is None else (("retry-after", wait.decode()),)
            code = CODES.get(408 if headers.get(b"x-error-type") == b"deadline" else status)
            message = msgspec.json.decode(content)["error"]
            await context.abort(code or grpc.StatusCode.INTERNAL, message, trailing)
        return status, headers, content

    async def _call(
        self, method: str, path: str, context: Any, body: bytes = b"", extra: list[tuple[bytes, bytes]] | None = None
    ) -> tuple[int, Mapping[bytes, bytes], bytes]:
        replies: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(event: Any) -> None:
            replies.append(event)

        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"", "scheme": "grpc",
            "server": ("grpc", self.port), "connection": Connection(), "arrived": True,
            "headers": [(b"content-length", str(len(body)).encode()), *(extra or ()), *_headers(context)],
        }  # fmt: skip
        await self._app(scope, receive, send)
        start, *parts = replies
        return start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts)


def _headers(context: Any) -> list[tuple[bytes, bytes]]:
    given = {str(key): value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    headers = [(name.encode(), given[name].encode()) for name in METADATA if name in given]
    left = context.time_remaining()
    if left is not None and "x-deadline" not in given:
        headers.append((b"x-deadline", f"{left:.3f}".encode()))
    return headers


def _path(message: Any, name: str | None = None, version: str | None = None) -> str:
    name, version = (message.name, message.version) if name is None else (name, version)
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")


def _parsed(kind: str, tree: Any) -> Any:
    return ParseDict(tree, MESSAGES[kind](), ignore_unknown_fields=True)


def _http_body(message: Any) -> tuple[bytes, int]:
    """Returns the body of the same HTTP request, with all tensors as raw bytes, and the size of its JSON part."""
    raw = list(message.raw_input_contents)
    if raw and len(raw) != len(message.inputs):
        raise BadMessage(
            f"raw_input_contents has {len(raw)} tensors; expected one for each of {len(message.inputs)} inputs"
        )
    tensors = raw or [_typed_bytes(tensor) for tensor in message.inputs]
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
    return b"".join([text, *tensors]), len(text)


def _typed_bytes(tensor: Any) -> bytes:
    if tensor.datatype == "BYTES":
        texts = tensor.contents.bytes_contents
        return b"".join(part for text in texts for part in (len(text).to_bytes(4, "little"), text))
    if tensor.datatype not in CONTENTS:
        raise BadMessage(f"input {tensor.name[:60]!r}: datatype {tensor.datatype[:20]!r} is not supported")
    field, dtype = CONTENTS[tensor.datatype]
    try:
        return np.array(getattr(tensor.contents, field), dtype=dtype).tobytes()
    except OverflowError:
        raise BadMessage(f"input {tensor.name[:60]!r}: a value does not fit {tensor.datatype}") from None


def _plain(parameters: Any) -> dict[str, Any]:
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], which) for name, which in chosen.items() if which is not None}


def _infer_response(content: bytes, size: int) -> Any:
    head = msgspec.json.decode(content[:size])
    response = MESSAGES["ModelInferResponse"](
        model_name=head["model_name"], model_version=head["model_version"], id=head.get("id") or ""
    )
    at = size
    for output in head["outputs"]:
        response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        end = at + output["parameters"]["binary_data_size"]
        response.raw_output_contents.append(content[at:end])
        at = end
    return response


def _options(limits: LimitsTable) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.body_bytes), ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.header_bytes), ("grpc.so_reuseport", 0),
    ]  # fmt: skip


def _credentials(tls: Tls) -> Any:
    """Credentials that read the current certificate for each new connection, so HTTP and gRPC renew it together."""
    authority = None if tls.ca is None else Path(tls.ca).read_bytes()

    def current() -> Any:
        cert, key = tls.pem
        return grpc.ssl_server_certificate_configuration([(key, cert)], authority)

    return grpc.dynamic_ssl_server_credentials(current(), current, require_client_authentication=tls.ca is not None)
