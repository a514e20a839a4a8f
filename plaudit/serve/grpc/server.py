"""KServe's v2 protocol over gRPC, compatible with Triton's clients, and /v1/rewards for `RewardClient`.

Each call is translated to the equivalent HTTP request and handled by the same application, so authentication, quotas,
limits, deadlines, accounting and errors are those of HTTP. Tensors stay raw bytes.

All handlers read their message as a stream, also where the client sends a single one: gRPC then calls them when the
metadata has arrived, and the message is read only after its caller was admitted. On the wire there is no difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import msgspec
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from plaudit.config.serve import LimitsTable, ListenTable
from plaudit.errors import ConfigError
from plaudit.serve.grpc.arrivals import Arrivals
from plaudit.serve.grpc.messages import DATA_TYPES, MESSAGES, SERVICE
from plaudit.serve.grpc.reading import HttpBody, read_infer, read_whole, split
from plaudit.serve.http.address import Tls
from plaudit.serve.http.app import App
from plaudit.serve.http.message import (
    INLINE_BYTES,
    TENANT,
    Access,
    Connection,
    Handler,
    HttpError,
    Reply,
    Request,
    Route,
    Routes,
)
from plaudit.serve.protocols.triton.wire import write_error

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
END_SECONDS = 1.0
Call = Callable[[Any], Awaitable[bytes]]
REWARDS = "plaudit.Rewards"  # forwards bodies of /v1/rewards unchanged, for `RewardClient`


class GrpcServer:
    """A gRPC server on `grpc_port` of the table's host, with TLS if HTTP has TLS."""

    def __init__(self, app: App, table: ListenTable, tls: Tls | None) -> None:
        self._app = app
        self._named = app.beside(Routes(self._routes()))
        self._copying = asyncio.Lock()  # one after the other, because a copy of 64 MiB holds the GIL
        self._arrivals = Arrivals(app.admission.arriving, _most_bytes(table.limits))
        self._server = grpc.aio.server(options=_options(table.limits), maximum_concurrent_rpcs=table.limits.connections)
        services: dict[str, Mapping[str, Call]] = {
            SERVICE: self._methods(),
            REWARDS: {"Score": self._score, "Live": self._live},
        }
        for service, methods in services.items():
            handlers = {name: grpc.stream_unary_rpc_method_handler(_lazily(each)) for name, each in methods.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self._table = table
        self._tls = tls
        self.port = 0
        if table.listen == "start":
            self._bind()

    def _bind(self) -> None:
        table, tls = self._table, self._tls
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
        if not self.port:
            self._bind()
        await self._server.start()

    async def stop(self, seconds: float = END_SECONDS) -> None:
        """Accepts no more calls; those in progress get `seconds`."""
        await self._server.stop(seconds)

    # From a call to HTTP. What is read from the message is read in the handler of a route, which is behind admission.

    def _routes(self) -> list[Route]:
        def route(name: str, handler: Handler, access: Access = "key", *, work: bool = False) -> Route:
            return Route("POST", _call_path(name), access, handler, "triton", work, errors=write_error)

        async def model_ready(request: Request) -> Reply:
            return await self._forward(request, "GET", f"{_path(await _small('ModelReady', request))}/ready")

        async def model_metadata(request: Request) -> Reply:
            return await self._forward(request, "GET", _path(await _small("ModelMetadata", request)))

        async def model_config(request: Request) -> Reply:
            return await self._forward(request, "GET", f"{_path(await _small('ModelConfig', request))}/config")

        async def model_statistics(request: Request) -> Reply:
            message = await _small("ModelStatistics", request)
            path = f"{_path(message)}/stats" if message.name else "/v2/models/stats"
            return await self._forward(request, "GET", path)

        async def repository_index(request: Request) -> Reply:
            message = await _small("RepositoryIndex", request)
            reply = await self._forward(request, "POST", "/v2/repository/index")
            models = msgspec.json.decode(reply.body)
            return Reply.json([model for model in models if model["state"] == "READY" or not message.ready])

        return [
            route("ModelReady", model_ready, "open"), route("ModelMetadata", model_metadata),
            route("ModelConfig", model_config), route("ModelStatistics", model_statistics),
            route("RepositoryIndex", repository_index), route("ModelInfer", self._infer_route, work=True),
        ]  # fmt: skip

    async def _forward(self, request: Request, method: str, path: str) -> Reply:
        endpoint = self._app.routes.find(method, path)
        if request.route is not None and request.route.access == "open" != endpoint.access:
            self._app.keys.admit(endpoint, request.credential())
        request.path = path
        return await endpoint.choose(request).handler(request)

    async def _infer_route(self, request: Request) -> Reply:
        message, limits = request.content, self._app.limits
        parts = split(message, INLINE_BYTES)
        if parts is None:
            most = limits.structures, limits.json_values
            call: HttpBody = await request.elsewhere(
                read_whole, message, most, limits.structures, request.tenant, request.deadline
            )
        elif len(message) <= INLINE_BYTES:
            call = read_infer(*parts)
        else:
            async with self._copying:
                call = await asyncio.to_thread(read_infer, *parts)
        request.grow(len(call.body))
        request.content = call.body
        request.headers[b"inference-header-content-length"] = str(call.head).encode()
        return await self._forward(request, "POST", f"{_model_path(call.model, call.version)}/infer")

    # From HTTP's reply to a response

    def _methods(self) -> dict[str, Call]:
        async def server_live(context: Any) -> bytes:
            return _written("ServerLive", live=await self._probe(self._app, "GET", "/v2/health/live", context))

        async def server_ready(context: Any) -> bytes:
            return _written("ServerReady", ready=await self._probe(self._app, "GET", "/v2/health/ready", context))

        async def model_ready(context: Any) -> bytes:
            path = _call_path("ModelReady")
            return _written("ModelReady", ready=await self._probe(self._named, "POST", path, context))

        async def server_metadata(context: Any) -> bytes:
            _, _, content = await self._call_or_abort(self._app, "GET", "/v2", context)
            return _parsed("ServerMetadata", msgspec.json.decode(content))

        async def model_metadata(context: Any) -> bytes:
            return _parsed("ModelMetadata", await self._json("ModelMetadata", context))

        async def model_config(context: Any) -> bytes:
            config = await self._json("ModelConfig", context)
            for tensor in (*config["input"], *config["output"]):
                tensor["data_type"] = DATA_TYPES[tensor["data_type"]]
            return _parsed("ModelConfig", {"config": config})

        async def model_statistics(context: Any) -> bytes:
            return _parsed("ModelStatistics", await self._json("ModelStatistics", context))

        async def repository_index(context: Any) -> bytes:
            return _parsed("RepositoryIndex", {"models": await self._json("RepositoryIndex", context)})

        async def model_infer(context: Any) -> bytes:
            _, headers, content = await self._call_or_abort(self._named, "POST", _call_path("ModelInfer"), context)
            return _infer_response(content, int(headers[b"inference-header-content-length"]))

        return {
            "ServerLive": server_live, "ServerReady": server_ready, "ModelReady": model_ready,
            "ServerMetadata": server_metadata, "ModelMetadata": model_metadata, "ModelConfig": model_config,
            "ModelStatistics": model_statistics, "RepositoryIndex": repository_index, "ModelInfer": model_infer,
        }  # fmt: skip

    async def _score(self, context: Any) -> bytes:
        return await self._own("POST", "/v1/rewards", context)

    async def _live(self, context: Any) -> bytes:
        return await self._own("GET", "/health/live", context)

    async def _own(self, method: str, path: str, context: Any) -> bytes:
        """Returns the reply unchanged. Error headers of the HTTP reply become trailing metadata."""
        status, headers, content = await self._call(self._app, method, path, context)
        if status != 200:
            error = msgspec.json.decode(content).get("error") or {"type": "failed", "message": "a model has failed"}
            trailing = [("x-status", str(status)), ("x-error-type", error["type"])]
            if b"retry-after" in headers:
                trailing.append(("retry-after", headers[b"retry-after"].decode()))
            code = CODES.get(408 if status == 504 else status, grpc.StatusCode.INTERNAL if status >= 500 else None)
            await context.abort(code or grpc.StatusCode.INVALID_ARGUMENT, error["message"], tuple(trailing))
        return content

    async def _probe(self, app: App, method: str, path: str, context: Any) -> bool:
        """Returns whether the endpoint is healthy; an unknown model is reported as not ready, as Triton does."""
        return (await self._call(app, method, path, context))[0] == 200

    async def _json(self, name: str, context: Any) -> Any:
        return msgspec.json.decode((await self._call_or_abort(self._named, "POST", _call_path(name), context))[2])

    async def _call_or_abort(
        self, app: App, method: str, path: str, context: Any
    ) -> tuple[int, Mapping[bytes, bytes], bytes]:
        """Returns the reply; aborts the call if it is an error."""
        status, headers, content = await self._call(app, method, path, context)
        if status != 200:
            wait = headers.get(b"retry-after")
            trailing = () if wait is None else (("retry-after", wait.decode()),)
            code = CODES.get(408 if headers.get(b"x-error-type") == b"deadline" else status)
            message = msgspec.json.decode(content)["error"]
            await context.abort(code or grpc.StatusCode.INTERNAL, message, trailing)
        return status, headers, content

    async def _call(self, app: App, method: str, path: str, context: Any) -> tuple[int, Mapping[bytes, bytes], bytes]:
        replies: list[Any] = []

        async def receive() -> dict[str, Any]:
            async with self._arrivals.one(TENANT.get()):
                message = await context.read()
            if message is grpc.aio.EOF:
                raise HttpError(400, "bad_message", "the call has no message")
            return {"type": "http.request", "body": message, "more_body": False}

        async def send(event: Any) -> None:
            replies.append(event)

        scope = {
            "type": "http", "method": method, "path": path, "query_string": b"", "scheme": "grpc",
            "server": ("grpc", self.port), "connection": Connection(), "headers": _headers(context),
        }  # fmt: skip
        await app(scope, receive, send)
        start, *parts = replies
        return start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts)


def _lazily(handler: Call) -> Callable[[Any, Any], Awaitable[bytes]]:
    async def call(_: Any, context: Any) -> bytes:
        return await handler(context)

    return call


def _call_path(name: str) -> str:
    return f"/{SERVICE}/{name}"


async def _small(name: str, request: Request) -> Any:
    """The message of a call that names a model."""
    body = await request.body()
    if len(body) > INLINE_BYTES:
        raise HttpError(413, "too_large", f"a {name}Request has at most {INLINE_BYTES} bytes, not {len(body)}")
    try:
        return MESSAGES[f"{name}Request"].FromString(body)
    except DecodeError:
        raise HttpError(400, "bad_message", f"the message is not a {name}Request") from None


def _headers(context: Any) -> list[tuple[bytes, bytes]]:
    given = {str(key): value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    headers = [(name.encode(), given[name].encode()) for name in METADATA if name in given]
    left = context.time_remaining()
    if left is not None and "x-deadline" not in given:
        headers.append((b"x-deadline", f"{left:.3f}".encode()))
    return headers


def _path(message: Any) -> str:
    return _model_path(message.name, message.version)


def _model_path(name: str, version: str) -> str:
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")


def _written(name: str, **values: Any) -> bytes:
    content: bytes = MESSAGES[f"{name}Response"](**values).SerializeToString()
    return content


def _parsed(name: str, tree: Any) -> bytes:
    content: bytes = ParseDict(tree, MESSAGES[f"{name}Response"](), ignore_unknown_fields=True).SerializeToString()
    return content


def _infer_response(content: bytes, size: int) -> bytes:
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
    written: bytes = response.SerializeToString()
    return written


def _most_bytes(limits: LimitsTable) -> int:
    return min(limits.body_bytes, limits.grpc_message_bytes)


def _options(limits: LimitsTable) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", _most_bytes(limits)), ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.header_bytes), ("grpc.so_reuseport", 0),
        ("grpc.http2.bdp_probe", 0),  # which would let a fast client send megabytes of a message that nobody reads yet
    ]  # fmt: skip


def _credentials(tls: Tls) -> Any:
    """Credentials that read the current certificate for each new connection, so HTTP and gRPC renew it together."""
    authority = None if tls.ca is None else Path(tls.ca).read_bytes()

    def current() -> Any:
        cert, key = tls.pem
        return grpc.ssl_server_certificate_configuration([(key, cert)], authority)

    return grpc.dynamic_ssl_server_credentials(current(), current, require_client_authentication=tls.ca is not None)
